"""Prepares Mixtral-like mixtures of the transformers library for expert parallelism.

Their experts have stacked weights, `gate_up_proj` and `down_proj`. A router chooses each token's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ringspark.models.outputs import as_outputs

Dispatch = Callable[[Any, torch.Tensor, list[int]], torch.Tensor]


def find_experts(network: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers with stacked experts, by name."""
    return {
        name: layer
        for name, layer in network.named_modules()
        if name.endswith(".experts") and _is_known(layer)
    }


def prepare_experts(network: nn.Module) -> dict[str, Mixture]:
    """Returns each mixture by the name of its module; replaces the network's `forward` if it has any."""
    mixtures = {name.rpartition(".")[0]: Mixture(layer) for name, layer in find_experts(network).items()}
    if mixtures and not fills_rows(network):
        network.forward = _WithRows(network)
    return mixtures


def fills_rows(network: nn.Module) -> bool:
    """Whether `prepare_experts` has changed the network, so that it takes batches without rows."""
    return isinstance(vars(network).get("forward"), _WithRows)


def fill_rows(value: torch.Tensor | None) -> torch.Tensor | None:
    """Adds a row of ones to a tensor without rows. The result has the tensor's gradient."""
    return None if value is None else torch.cat([value, value.new_ones((1, *value.shape[1:]))])


def _is_known(layer: Any) -> bool:
    names = {name for name, _ in layer.named_parameters()}
    if names != {"gate_up_proj", "down_proj"} or not callable(getattr(layer, "_apply_gate", None)):
        return False
    width = layer.down_proj.shape[-1]
    return bool(layer.gate_up_proj.shape[1:] == (2 * width, layer.down_proj.shape[1]))


class Mixture:
    """The experts of one mixture. Setting `dispatch` replaces their `forward`; copies keep working."""

    def __init__(self, experts: Any) -> None:
        self.experts, self.num_experts = experts, int(experts.gate_up_proj.shape[0])
        self._dispatch: Dispatch | None = None

    @property
    def dispatch(self) -> Dispatch | None:
        """Function that sends rows to experts on other ranks and returns outputs; None if all are local."""
        return self._dispatch

    @dispatch.setter
    def dispatch(self, dispatch: Dispatch) -> None:
        self._dispatch, self.experts.forward = dispatch, self

    def __call__(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Maps (tokens, dim) to (tokens, dim); `index` and `weights` are (tokens, experts per token)."""
        order = index.flatten().argsort(stable=True)
        rows = order // index.shape[1]
        sizes = torch.bincount(index.flatten(), minlength=self.num_experts).tolist()
        assert self._dispatch is not None
        out = self._dispatch(self.run, x[rows], sizes) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, rows, out.to(x.dtype))

    def run(self, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Computes this rank's experts; the first `sizes[0]` rows belong to the first expert, and so on."""
        experts = self.experts
        stacked = zip(experts.gate_up_proj.unbind(0), experts.down_proj.unbind(0), strict=True)
        found = []
        # An expert without rows runs too, so its gradient is zeros on any number of ranks.
        for own, (up, down) in zip(torch.split(rows, list(sizes)), stacked, strict=True):
            # Some classes clamp the gate.
            found.append(F.linear(experts._apply_gate(F.linear(own, up)), down))
        return torch.cat(found)


class _WithRows:
    """Replaces the network's `forward`. Without rows it computes one row, because the library would fail."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The library's forward; `inspect.signature` reads it."""
        return type(self.network).forward.__get__(self.network)  # type: ignore[no-any-return]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not inputs or len(inputs[0]):
            return self.__wrapped__(*inputs, **named)
        found = tuple(v[:0] for v in as_outputs(self.__wrapped__(*map(fill_rows, inputs), **named)))
        return found[0] if len(found) == 1 else found
