"""The base of our own optimizers: their state is plain tensors, and they read no number from the device.

So `state_dict` works as in torch's own, and a step on fake tensors shows the memory planner the allocations
of a real step. All settings are in the parameter groups, because Horovod recreates an optimizer from them
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn

Parameters = Iterable[nn.Parameter] | list[dict[str, Any]]


class DenseOptimizer(torch.optim.Optimizer):
    """Updates one parameter after another from its dense gradient; see `update`.

    Attributes:
        settings: The settings of a group with their defaults; the constructor takes them by name.
        is_elementwise: Whether each weight moves by its own gradient and state alone, so that a parameter can
            be sharded anywhere.
    """

    settings: ClassVar[dict[str, Any]]
    is_elementwise: ClassVar[bool] = False

    def __init__(self, params: Parameters, **given: Any) -> None:
        if unknown := sorted(given.keys() - self.settings.keys()):
            raise TypeError(f"{type(self).__name__} takes {list(self.settings)}, got {unknown[0]!r}")
        defaults = self.settings | given
        if not defaults["lr"] >= 0:
            raise ValueError(f"{type(self).__name__} needs a rate lr of 0 or above, got {defaults['lr']}")
        if not defaults["weight_decay"] >= 0:
            raise ValueError(
                f"{type(self).__name__} needs a weight_decay of 0 or above, got {defaults['weight_decay']}"
            )
        super().__init__(params, defaults)

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Updates one parameter in place; `state` is empty in its first step."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps over all parameters with a gradient. Raises ValueError for sparse or complex gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _check(type(self).__name__, parameter.grad)
                    self.update(parameter, parameter.grad, self.state[parameter], group)
        return loss


def _check(name: str, gradient: torch.Tensor) -> None:
    if gradient.is_sparse or gradient.is_complex():
        kind = "a sparse" if gradient.is_sparse else "a complex"
        raise ValueError(
            f"optimizer {name} takes dense real gradients, got {kind} one of shape {tuple(gradient.shape)}; "
            "make embeddings with sparse=False, or set optimizer='sgd'"
        )


def count_step(state: dict[str, Any]) -> int:
    """Counts and returns the parameter's steps, from 1; like torch, keeps the count on the host."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
    state["step"] += 1
    return int(state["step"])
