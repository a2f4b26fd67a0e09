"""The settings by which ranks synchronize; a strategy is chosen by them."""

from __future__ import annotations

from dataclasses import dataclass

from ringspark.estimators.options.sync import AllReduce, Sync


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The settings by which ranks synchronize, equal on all ranks.

    Attributes:
        sync: How the ranks agree on their weights; `sync.strategy` is a key of `STRATEGIES`.
        micro_batches: Largest number of backward passes per optimizer step.
        noise_scale: Whether each step measures `GradientSync.local_square`.
        seed: Seed of the compressor's random choices.
        timeout_seconds: Longest wait for a rank that takes no step.
    """

    sync: Sync = AllReduce()  # noqa: RUF009
    micro_batches: int = 1
    noise_scale: bool = False
    seed: int = 0
    timeout_seconds: float = 600.0
