"""Calls of the network by a loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ringspark.estimators.training.precision import autocast
from ringspark.models.module_hooks import replace_forward


@contextmanager
def calls_in(network: nn.Module, precision: str, device: torch.device) -> Iterator[None]:
    """Makes a loss's own calls of the network compute in `precision`, and the rest of the loss in fp32.

    Inner gradients must be computed outside of autocast, which would also round layers that stay in fp32.
    """
    if precision == "fp32":
        yield
        return
    forward = autocast(precision, device)(network.forward)  # type: ignore[operator]
    with replace_forward(network, forward):
        yield
