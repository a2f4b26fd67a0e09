"""A network whose last input is an offset of its outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ringspark.models import ModelSpec
from ringspark.models.outputs import as_outputs


class OffsetNetwork(nn.Module):
    """Adds an offset to the outputs of a network before the link.

    Args:
        network: The network, or the target and kwargs of its `ModelSpec`.
        link: "identity" adds the offset to outputs, "logit" to the logit of the last class, and "log" adds it
            to the logarithm of outputs that are positive means.
    """

    def __init__(self, network: nn.Module | dict[str, Any], link: str) -> None:
        super().__init__()
        self.network = network if isinstance(network, nn.Module) else ModelSpec(**network).build()
        self.link = link

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Maps the network's inputs and an offset (batch,) to the network's outputs."""
        *own, offset = inputs
        found = tuple(self._shift(each, offset) for each in as_outputs(self.network(*own)))
        return found[0] if len(found) == 1 else found

    def _shift(self, output: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        offset = offset.float().view(-1, *[1] * (output.dim() - 1))
        if self.link == "log":
            return output * offset.exp()
        if self.link == "logit" and output.dim() > 1:
            offset = functional.pad(offset, (output.shape[-1] - 1, 0))
        return output + offset
