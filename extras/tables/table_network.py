"""Base class of the networks for tables: scaling of the label, and calibrated logits."""

import torch
from torch import nn


class TableNetwork(nn.Module):
    """Scales outputs to the label, or turns mean probabilities into logits.

    Args:
        center, scale: Mean and standard deviation of the label of a regression.
        averages: "values" or "probabilities": the outputs of the members to average.
    """

    def __init__(self, center: float, scale: float, averages: str) -> None:
        super().__init__()
        self.center, self.scale, self.averages = center, scale, averages
        if averages == "probabilities":
            # The metric "temperature" sets it in the saved network.
            self.calibrates = True
            self.register_buffer("temperature", torch.ones(()))

    def to_label(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns center + scale * outputs in fp32 or wider. 16 bits would lose a small scale."""
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if self.training and self.scale != 1 and outputs.requires_grad:
            # As for a standardized label. Adam's epsilon would swallow a tiny gradient.
            outputs.register_hook(lambda gradient: gradient / self.scale**2)  # type: ignore[no-untyped-call]
        return self.center + self.scale * outputs

    def to_logits(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Returns calibrated logits of the mean probabilities."""
        assert isinstance(self.temperature, torch.Tensor)
        return probabilities.clamp_min(1e-12).log() / self.temperature
