"""The settings that decide how the ranks exchange what they learn; a strategy is chosen by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringspark.estimators.collectives.compressors import is_asked


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The settings of the exchange, equal on all ranks.

    Attributes:
        micro_batches: The most backward passes per optimizer step.
        sharding: Parts of the training's state that are split over the ranks.
        noise_scale: Whether each step tells `GradientSync.local_square`.
        seed: Seed of random choices that an exchange makes.
        compression: Name and options of the compressor of gradients, such as {"name": "powersgd", "rank": 2}.
        consistency: How far apart the ranks may run, such as {"name": "ssp", "staleness": 3}; see
            `parallel.consistency`.
        timeout_seconds: The longest wait for a rank that takes no step.
        local_steps: 1 if the ranks exchange in every step; else the setting `localSteps` with all its keys.
    """

    micro_batches: int = 1
    sharding: str = "none"
    noise_scale: bool = False
    seed: int = 0
    compression: Mapping[str, Any] = field(default_factory=lambda: {"name": "none"})
    consistency: Mapping[str, Any] = field(default_factory=lambda: {"name": "bsp"})
    timeout_seconds: float = 600.0
    local_steps: int | Mapping[str, Any] = 1

    @property
    def strategy(self) -> str:
        """The key of `STRATEGIES` that these settings ask for."""
        if self.consistency["name"] != "bsp":
            return "hogwild" if self.consistency["name"] == "hogwild" else "parameter_server"
        if isinstance(self.local_steps, Mapping):
            return _OF_LOCAL[self.local_steps["name"]]
        return "compressed" if is_asked(self.compression) else _OF_SHARDING[self.sharding]


_OF_LOCAL = {"average": "local_average", "diloco": "diloco", "elastic": "elastic"}
_OF_SHARDING = {"none": "data_parallel", "optimizer": "zero1", "gradients": "zero2", "parameters": "zero3"}
