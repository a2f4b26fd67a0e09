"""Base class of the networks for tables: the label's center and scale, and the mean of probabilities."""

import torch
from torch import nn


class TableNetwork(nn.Module):
    """Turns standardized outputs into values of the label, or the members' probabilities into logits.

    Args:
        center, scale: Mean and standard deviation of the label of a regression.
        averages: "values" or "probabilities": what the members' mean is taken of.
    """

    def __init__(self, center: float, scale: float, averages: str) -> None:
        super().__init__()
        self.center, self.scale, self.averages = center, scale, averages
        if averages == "probabilities":
            # The saved network's is set by the metric "temperature".
            self.calibrates = True
            self.register_buffer("temperature", torch.ones(()))

    def to_label(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns center + scale * outputs, at least in fp32: 16 bits would round a small scale away."""
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if self.training and self.scale != 1 and outputs.requires_grad:
            # The gradient of a standardized label: Adam's epsilon would stop tiny ones.
            outputs.register_hook(lambda gradient: gradient / self.scale**2)  # type: ignore[no-untyped-call]
        return self.center + self.scale * outputs

    def to_logits(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Returns calibrated logits of the mean probabilities."""
        assert isinstance(self.temperature, torch.Tensor)
        return probabilities.clamp_min(1e-12).log() / self.temperature
