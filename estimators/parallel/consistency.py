"""Consistency of asynchronous training: how far the workers may run apart.

- bsp (bulk synchronous parallel): all workers take each step together.
- ssp (stale synchronous parallel, Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous
  Parallel Parameter Server"): no worker reads while it is more than `staleness` steps ahead of the slowest.
- asp (asynchronous parallel): no worker waits for another.
- hogwild (Recht et al. 2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent"):
  the workers of one host write into the same weights, without a lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Name -> options with their defaults; None marks a required option.
CONSISTENCIES: dict[str, dict[str, Any]] = {
    "bsp": {},
    "ssp": {"staleness": None, "correction": "none"},
    "asp": {"correction": "none"},
    "hogwild": {},
}
CORRECTIONS = ("none", "staleness")


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """Guarantees of a server to its readers.

    Attributes:
        bound: Largest number of steps by which a reader may be ahead of the slowest worker, or None.
        corrects: Whether a late gradient is applied with a smaller rate.
    """

    bound: int | None = 0
    corrects: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Consistency:
        bounds = {"bsp": 0, "ssp": settings.get("staleness")}
        return cls(bound=bounds.get(settings["name"]), corrects=settings.get("correction") == "staleness")

    @property
    def in_step(self) -> bool:
        """Whether no worker reads between two updates of a step, so that the step can be applied at once."""
        return self.bound == 0
