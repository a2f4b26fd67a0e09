"""The base of our optimizers: their state is plain tensors, and they read no number from the device.

So the memory planner can step them on fake tensors. All settings are in the parameter groups, because Horovod
recreates an optimizer from them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn

Parameters = Iterable[nn.Parameter] | list[dict[str, Any]]


class DenseOptimizer(torch.optim.Optimizer):
    """Updates one parameter after another from its dense gradient.

    Attributes:
        settings: Defaults of a group's settings, which the constructor takes by name.
        is_elementwise: Whether an update of a weight depends only on the gradient and state of that weight.
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
                if (gradient := parameter.grad) is None:
                    continue
                if gradient.is_sparse or gradient.is_complex():
                    kind = "a sparse" if gradient.is_sparse else "a complex"
                    raise ValueError(
                        f"optimizer {type(self).__name__} takes dense real gradients, got {kind} one of "
                        f"shape {tuple(gradient.shape)}; make embeddings with sparse=False, or set "
                        "optimizer='sgd'"
                    )
                self.update(parameter, gradient, self.state[parameter], group)
        return loss


def count_step(state: dict[str, Any]) -> int:
    """Counts the parameter's steps on the host, like torch; returns the count, from 1."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
    state["step"] += 1
    return int(state["step"])
