"""The base of our optimizers: they update lists of parameters at once, and read no number from the device.

On a GPU, an operation of `torch._foreach_*` over a list of tensors takes a few launches, not one per tensor.
The memory planner can step these optimizers on fake tensors. All settings are in the parameter groups,
because Horovod recreates an optimizer from them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ringspark.estimators.training.optimizers.registry import Parameters


class TensorList(list[torch.Tensor]):
    """List of tensors; its method `mul_(2)`, for example, calls `torch._foreach_mul_(tensors, 2)`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(torch, f"_foreach_{name}")

        def apply(*given: Any, **options: Any) -> TensorList:
            result = operation(self, *given, **options)
            return self if name.endswith("_") else TensorList(result)

        return apply

    def local(self) -> TensorList:
        """Returns this rank's shards of DTensors, and other tensors as they are."""
        # Looks for the method, because importing the DTensor class takes a second.
        return TensorList(tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in self)

    def reduce(self, reduction: Callable[..., torch.Tensor], *dims: Sequence[int]) -> list[TensorList]:
        """Returns one list per entry of `dims`: each tensor, reduced over these dimensions with keepdim=True.

        Dimensions are negative, because this stacks tensors of equal shape; torch cannot reduce a list.
        """
        places: dict[torch.Size, list[int]] = {}
        for index, tensor in enumerate(self):
            places.setdefault(tensor.shape, []).append(index)
        results = [TensorList(self) for _ in dims]
        for indices in places.values():
            own = [self[index] for index in indices]
            stacked = torch.stack(own) if len(own) > 1 else own[0][None]
            for result, over in zip(results, dims, strict=True):
                reduced = reduction(stacked, dim=over, keepdim=True)
                for index, value in zip(indices, reduced.unbind(), strict=True):
                    result[index] = value
        return results


@dataclass
class Batch:
    """Parameters of one device and dtype that have taken equally many steps; `step` counts from 1."""

    step: int
    parameters: TensorList
    gradients: TensorList
    states: list[dict[str, Any]]

    def state(self, key: str) -> TensorList:
        return TensorList(state[key] for state in self.states if key in state)


class DenseOptimizer(torch.optim.Optimizer):
    """Updates the parameters of a group together, from dense gradients.

    Attributes:
        settings: Defaults of a group's settings, which the constructor takes by name.
        moments: Names of the state tensors that have the parameter's shape.
        is_elementwise: Whether an update of a weight depends only on the gradient and state of that weight.
    """

    settings: ClassVar[dict[str, Any]]
    moments: ClassVar[tuple[str, ...]] = ()
    is_elementwise: ClassVar[bool] = False

    def __init__(self, params: Parameters, **given: Any) -> None:
        if unknown := sorted(given.keys() - self.settings.keys()):
            raise TypeError(f"{type(self).__name__} takes {list(self.settings)}, got {unknown[0]!r}")
        defaults = self.settings | given
        for name, words in {"lr": "rate lr", "weight_decay": "weight_decay"}.items():
            if not defaults[name] >= 0:
                raise ValueError(f"{type(self).__name__} needs a {words} of 0 or above, got {defaults[name]}")
        super().__init__(params, defaults)

    def new_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {name: torch.zeros_like(parameter) for name in self.moments}

    def kind(self, parameter: torch.Tensor) -> Hashable:
        """Returns a key; the parameters of a batch have equal keys."""
        return None

    def max_values(self, device: torch.device) -> int:
        """Returns how many values a batch of several parameters may have, which bounds temporaries."""
        # On a CPU, an operation costs less than the memory of long lists.
        return 1 << (24 if device.type == "cuda" else 18)

    def update(self, batch: Batch, group: dict[str, Any]) -> None:
        """Updates the parameters and states of a batch in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient. Raises ValueError for sparse or complex gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for batch in self._batches([p for p in group["params"] if p.grad is not None]):
                self.update(batch, group)
        return loss

    def _batches(self, parameters: list[nn.Parameter]) -> list[Batch]:
        states = [self._prepare(parameter) for parameter in parameters]
        batches: list[Batch] = []
        growing: dict[Hashable, tuple[Batch | None, int]] = {}
        for parameter, state, step in zip(parameters, states, count(states, "step"), strict=True):
            gradient: Any = parameter.grad
            key = (parameter.device, parameter.dtype, gradient.dtype, step, self.kind(parameter))
            batch, size = growing.get(key, (None, 0))
            if batch is None or size + parameter.numel() > self.max_values(parameter.device):
                batch, size = Batch(step, TensorList(), TensorList(), []), 0
                batches.append(batch)
            growing[key] = batch, size + parameter.numel()
            batch.parameters.append(parameter)
            batch.gradients.append(gradient)
            batch.states.append(state)
        return batches

    def _prepare(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Checks the gradient; returns the state, which is new in the first step."""
        gradient: Any = parameter.grad
        if gradient.is_sparse or gradient.is_complex():
            kind = "a sparse" if gradient.is_sparse else "a complex"
            raise ValueError(
                f"optimizer {type(self).__name__} takes dense real gradients, got {kind} one of "
                f"shape {tuple(gradient.shape)}; make embeddings with sparse=False, or set "
                "optimizer='sgd'"
            )
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update(self.new_state(parameter))
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        return state


def count(states: list[dict[str, Any]], key: str, by: int = 1) -> list[int]:
    """Adds `by` to each count, which is on the host like torch's step counts; returns the counts."""
    if not states:
        return []
    counts = [state[key] for state in states]
    torch._foreach_add_(counts, by)
    return [int(number) for number in torch.stack(counts).tolist()]
