"""A moving average of the weights, which is validated and becomes the model if `emaDecay` is set.

After each optimizer step that was taken, average = decay * average + (1 - decay) * weights, for the trained
parameters, from the initial weights (Polyak and Juditsky 1992; Tarvainen and Valpola 2017). Buffers, such as
the statistics of batch normalisation, are averages already and are not averaged again.

Every rank averages the parameters that it holds, so the ranks' averages are equal without communication.
16-bit weights are averaged in fp32, because 16 bits would lose one step's share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ringspark.estimators.parallel.optimizer_state import shard_like

State = dict[str, torch.Tensor]


class Average:
    """The average of one network's trained parameters; without a decay it does nothing.

    Attributes:
        values: The average of each parameter by name, on the parameter's device.
    """

    def __init__(self, network: nn.Module, decay: float | None) -> None:
        self._network = network
        self._decay = decay
        trained = {n: p for n, p in network.named_parameters() if p.requires_grad and decay is not None}
        self._parameters = list(trained.values())
        self.values: State = {name: _at_least_fp32(p.detach()).clone() for name, p in trained.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Adds the weights after an optimizer step to the average."""
        # A pipeline stage may have no trained parameters.
        if self._decay is not None and self.values:
            weights = [_at_least_fp32(p.detach()) for p in self._parameters]
            torch._foreach_lerp_(list(self.values.values()), weights, 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets the network hold the average inside the context, then the weights again, bitwise."""
        if self._decay is None:
            yield
            return
        kept = [p.detach().clone() for p in self._parameters]
        self._put(list(self.values.values()))
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, tensors: list[torch.Tensor]) -> None:
        self._free_gathered()
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.copy_(tensor)

    def _free_gathered(self) -> None:
        # FSDP2 keeps the last unit's gathered parameters after an evaluation; they must be gathered again.
        modules: Any = self._network.modules()
        for module in modules:
            if hasattr(module, "set_reduce_scatter_unused_params"):
                module.reshard()

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Restores a checkpoint's whole tensors. Raises ValueError if they are of other parameters."""
        shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (state, self.values)]
        if shapes[0] != shapes[1]:
            raise ValueError("the checkpoint's average of the weights is of another network; use another one")
        for name, own in self.values.items():
            own.copy_(shard_like(state[name], own) if hasattr(own, "full_tensor") else state[name])


def _at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
