"""Several optimizers by name as one, for checkpoints and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ringspark.estimators.training.build import check_held, check_kind


class NamedOptimizers(torch.optim.Optimizer):
    """The union of several optimizers: it shares their parameter groups and their state.

    Attributes:
        by_name: The optimizers; each has the common state.
    """

    by_name: dict[str, torch.optim.Optimizer]

    @classmethod
    def of(cls, optimizers: Mapping[str, torch.optim.Optimizer]) -> NamedOptimizers:
        # A checkpoint compares the class's name, so it shows the kind of each optimizer.
        title = ", ".join(f"{name}: {type(one).__name__}" for name, one in optimizers.items())
        made: NamedOptimizers = type(title, (cls,), {})(optimizers)
        return made

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        groups = [group for one in optimizers.values() for group in one.param_groups]
        super().__init__([{"params": []}], {})
        self.by_name, self.param_groups = dict(optimizers), groups
        for one in optimizers.values():
            self.state.update(one.state)
        for one in optimizers.values():
            one.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for one in self.by_name.values():
            one.step()


def join_optimizers(made: Any, network: nn.Module) -> torch.optim.Optimizer:
    """Checks the optimizers that were made for the network, and joins a dict of them into one."""
    if isinstance(made, Mapping):
        if not made or not all(isinstance(name, str) and name for name in made):
            raise ValueError(f"optimizer must return optimizers by name, got {made!r}; name each of them")
        for optimizer in made.values():
            check_kind(optimizer)
        made = NamedOptimizers.of(made)
    check_held(made, network)
    return made  # type: ignore[no-any-return]


def optimizers_by_name(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Returns the optimizers of a `NamedOptimizers`; a single optimizer has the name ""."""
    return optimizer.by_name if isinstance(optimizer, NamedOptimizers) else {"": optimizer}
