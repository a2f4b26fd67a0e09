"""Residual networks for small images (He et al. 2016, "Deep Residual Learning", section 4.2).

In every stage except the first, the first block halves height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

import torch
from torch import nn
from torch.nn import functional as F

from ringspark.models.chain import Link
from ringspark.models.checks import check_choice, check_sizes

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    # Wu and He 2018: statistics are per row, so batch size and number of workers change nothing.
    "group": lambda channels: nn.GroupNorm(gcd(channels, 8), channels),
}


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut: (batch, in, h, w) -> (batch, out, h / stride, w / stride)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: str) -> None:
        super().__init__()
        self.first = _convolution(in_channels, out_channels, 3, stride)
        self.first_norm = NORMS[norm](out_channels)
        self.second = _convolution(out_channels, out_channels, 3)
        self.second_norm = NORMS[norm](out_channels)
        changes = stride != 1 or in_channels != out_channels
        # He et al.'s option B: the shortcut is a projection if the shape changes.
        self.shortcut = _convolution(in_channels, out_channels, 1, stride) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network of `2 * sum(depths) + 2` layers; the outputs are logits or values.

    Args:
        in_channels: Channels of the images.
        out_features: Outputs per row.
        depths: Blocks of each stage; `[n, n, n]` gives the paper's networks.
        width: Channels of the first stage; each further stage has twice as many.
        norm: `"batch"` or `"group"`.
    """

    def __init__(
        self,
        in_channels: int,
        out_features: int,
        depths: Sequence[int] = (3, 3, 3),
        width: int = 16,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        check_sizes(in_channels=in_channels, out_features=out_features, width=width)
        if not depths or min(depths) < 1:
            raise ValueError(f"depths must hold at least one number, each at least 1, got {list(depths)}")
        check_choice("norm", norm, NORMS)
        self.stem = _convolution(in_channels, width, 3)
        self.stem_norm = NORMS[norm](width)
        blocks = []
        channels = width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(ResidualBlock(channels, width * 2**stage, stride, norm))
                channels = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, out_features)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Maps (batch, in_channels, height, width) to (batch, out_features)."""
        return self._pooled_head(self.blocks(self._stem(images)))

    def links(self) -> list[Link]:
        blocks = [Link(f"blocks.{key}", b, (f"blocks.{key}",)) for key, b in self.blocks.named_children()]
        stem = Link("stem", self._stem, ("stem", "stem_norm"))
        return [stem, *blocks, Link("head", self._pooled_head, ("head",))]

    def _stem(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.stem_norm(self.stem(images)))

    def _pooled_head(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


def _convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    # The normalization that follows would subtract the bias again.
    layer = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
