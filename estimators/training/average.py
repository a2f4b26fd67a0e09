"""Moving average of the weights; with `emaDecay` it is validated and becomes the model.

average = decay * average + (1 - decay) * weights, after each optimizer step, for the trained parameters
(Polyak and Juditsky 1992; Tarvainen and Valpola 2017). Every rank averages the parameters that it holds. The
average of 16-bit weights is fp32, because rounding would lose the change of a single step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ringspark.estimators.parallel.optimizer_state import shard_like

State = dict[str, torch.Tensor]


def has_modes(optimizer: object) -> bool:
    """Whether an optimizer has train() and eval(), as those without a schedule (Defazio et al. 2024)."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


class Average:
    """The weights that are validated and saved: their average, or what `optimizer.eval()` makes of them."""

    def __init__(
        self, network: nn.Module, decay: float | None, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._modal: Any = optimizer if has_modes(optimizer) else None
        self._network = network
        self._decay = decay
        self._parameters: list[nn.Parameter] = []
        self.values: State = {}
        self.add_new()

    def add_new(self) -> None:
        """Starts the average of the parameters that are trained by now."""
        for name, parameter in self._network.named_parameters():
            if parameter.requires_grad and self._decay is not None and name not in self.values:
                self._parameters.append(parameter)
                self.values[name] = _at_least_fp32(parameter.detach()).clone()

    @torch.no_grad()
    def update(self) -> None:
        # A pipeline stage may have no trained parameters.
        if self._decay is not None and self.values:
            weights = [_at_least_fp32(p.detach()) for p in self._parameters]
            torch._foreach_lerp_(list(self.values.values()), weights, 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the average into the network inside the context, and restores the weights bitwise."""
        if self._decay is None and self._modal is None:
            yield
            return
        moved = self._parameters
        if self._modal is not None:
            moved = [p for group in self._modal.param_groups for p in group["params"]]
        kept = [p.detach().clone() for p in moved]
        if self._modal is not None:
            self._modal.eval()
        else:
            self._put(moved, list(self.values.values()))
        try:
            yield
        finally:
            if self._modal is not None:
                self._modal.train()
            self._put(moved, kept)

    @torch.no_grad()
    def _put(self, parameters: list[nn.Parameter], tensors: list[torch.Tensor]) -> None:
        # FSDP2 keeps the last unit's gathered parameters after an evaluation; they must be gathered again.
        modules: Any = self._network.modules()
        for module in modules:
            if hasattr(module, "set_reduce_scatter_unused_params"):
                module.reshard()
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.copy_(tensor)

    @torch.no_grad()
    def restart(self) -> None:
        """Makes the present weights the average."""
        for own, parameter in zip(self.values.values(), self._parameters, strict=True):
            own.copy_(parameter)

    @torch.no_grad()
    def load(self, state: State, *, is_new: bool = False) -> None:
        """Loads a stored average; if `is_new`, layers without a stored average start from their weights."""
        if is_new:
            here = zip(self.values, self._parameters, strict=True)
            state = {name: state.get(name, parameter.detach()) for name, parameter in here}
        shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (state, self.values)]
        if shapes[0] != shapes[1]:
            raise ValueError("the checkpoint averages the weights of another network; use another checkpoint")
        for name, own in self.values.items():
            value = state[name]
            is_whole = hasattr(own, "full_tensor") and not hasattr(value, "full_tensor")
            own.copy_(shard_like(value, own) if is_whole else value)


def _at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
