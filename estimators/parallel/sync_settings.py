"""Settings of the gradient synchronization, which select the strategy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ringspark.estimators.options.sync import AllReduce, Sync

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """Settings of the gradient synchronization; equal on all ranks except for `device`.

    Attributes:
        sync: How the ranks agree on their weights; `sync.strategy` is a key of `STRATEGIES`.
        micro_batches: Largest number of backward passes per optimizer step.
        noise_scale: Whether `GradientSync.local_square` is computed in each step.
        seed: Seed of random compressors.
        timeout_seconds: Longest wait for a rank that takes no step.
        autocast: Makes the context of a forward pass.
    """

    sync: Sync = AllReduce()
    micro_batches: int = 1
    noise_scale: bool = False
    seed: int = 0
    timeout_seconds: float = 600.0
    device: torch.device = _CPU
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
