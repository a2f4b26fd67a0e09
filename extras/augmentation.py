"""Random image augmentation, for the setting `transformBatch` or for the first layers of a network.

Random numbers come from torch's CPU generator, so one seed gives the same images on every device.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class RandomHorizontalFlip(nn.Module):
    """Mirrors each image of a tensor (batch, channels, height, width) left to right, with probability `p`."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p of RandomHorizontalFlip must be from 0 to 1, got {p}")
        self.p = p

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return images
        chosen = (torch.rand(len(images)) < self.p).to(images.device)
        return torch.where(chosen[:, None, None, None], images.flip(-1), images)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class RandomCrop(nn.Module):
    """Shifts each image of a tensor (batch, channels, height, width) by up to `padding` pixels each way.

    Pads all four sides, then crops the original size at a random position. He et al. 2016 (section 4.2) pad
    CIFAR images by 4 pixels.

    Args:
        mode: Padding mode of `torch.nn.functional.pad`: "reflect", or "constant" for zeros. Zeros are black
            only in images that are not normalized.
    """

    def __init__(self, padding: int, mode: str = "reflect") -> None:
        super().__init__()
        if padding < 1:
            raise ValueError(f"padding of RandomCrop must be at least 1, got {padding}")
        self.padding, self.mode = padding, mode

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return images
        num_rows, _, height, width = images.shape
        padded = F.pad(images, [self.padding] * 4, mode=self.mode)
        tops, lefts = torch.randint(2 * self.padding + 1, (2, num_rows))
        rows = (tops[:, None] + torch.arange(height)).to(images.device)  # (batch, height)
        columns = (lefts[:, None] + torch.arange(width)).to(images.device)  # (batch, width)
        each = torch.arange(num_rows, device=images.device)[:, None, None]
        # Indices around a slice put the channels last.
        cropped = padded[each, :, rows[:, :, None], columns[:, None, :]]  # (batch, height, width, channels)
        return cropped.permute(0, 3, 1, 2).contiguous()

    def extra_repr(self) -> str:
        return f"padding={self.padding}, mode={self.mode!r}"
