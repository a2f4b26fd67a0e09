"""LoRA: freezes the weight of each chosen linear layer, and trains the product of two thin matrices instead.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models": a layer with weight W computes W x +
(alpha / rank) B A x. The matrices A and B are parameters of the layer itself, and a forward hook adds their
product. All other names in the state dict therefore stay the same, unlike with the `peft` package (see
docs/design.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

State = dict[str, torch.Tensor]

_A, _B = "lora_A", "lora_B"


def add_lora(
    module: nn.Module, rank: int, alpha: float, targets: Sequence[str], dropout: float = 0.0
) -> list[str]:
    """Adds an adapter to each linear layer whose name matches a pattern; returns the layers' names.

    `targets` are shell patterns such as "*.query". The product is scaled by `alpha / rank`. Raises ValueError
    if a pattern matches no layer, or if a matching layer cannot have an adapter.
    """
    linear = linear_layers(module)
    chosen: dict[str, nn.Linear] = {}
    for pattern in targets:
        found = {name: layer for name, layer in linear.items() if fnmatchcase(name, pattern)}
        if not found:
            raise ValueError(
                f"the pattern {pattern!r} matches no linear layer; the layers are {list(linear)[:10]}"
            )
        chosen |= found
    uses = Counter(id(p) for owner in module.modules() for p in owner._parameters.values())
    for name, layer in chosen.items():
        if is_lazy(layer.weight):
            raise ValueError(f"layer {name!r} is lazy, so its size is unknown; give it in_features")
        if own := [part for part in (_A, _B) if hasattr(layer, part)]:
            raise ValueError(
                f"layer {name!r} already has {own[0]!r}, the name of an adapter's matrix; choose other layers"
            )
        if not _is_plain(layer):
            raise ValueError(
                f"layer {name!r} computes more than W x + b (by its own forward, a hook, or a computed "
                "weight as with weight_norm), so no adapter can be merged into it; choose other layers"
            )
        if uses[id(layer.weight)] > 1:
            raise ValueError(
                f"layer {name!r} shares its weight with another layer, which a merged adapter would change "
                "too; choose other layers"
            )
        _adapt(layer, rank, alpha / rank, dropout)
    return list(chosen)


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linear layers by name.

    Leaves out the output layer of `nn.MultiheadAttention`, because attention never calls this layer.
    """
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and not isinstance(layer, NonDynamicallyQuantizableLinear)
    }


def _is_plain(layer: nn.Linear) -> bool:
    has_hooks = layer._forward_hooks or layer._forward_pre_hooks
    forward = layer.__dict__.get("forward", type(layer).forward)
    return forward is nn.Linear.forward and "weight" in layer._parameters and not has_hooks


@dataclass(frozen=True)
class Adapter:
    """The matrices A and B of one layer, and the options of their product."""

    first: nn.Parameter
    second: nn.Parameter
    scale: float
    dropout: float


def _adapt(layer: nn.Linear, rank: int, scale: float, dropout: float) -> None:
    weight = layer.weight
    first = torch.empty(rank, layer.in_features, dtype=weight.dtype, device=weight.device)
    nn.init.kaiming_uniform_(first, a=math.sqrt(5))
    second = weight.new_zeros(layer.out_features, rank)
    add_adapter(layer, Adapter(nn.Parameter(first), nn.Parameter(second), scale, dropout))


def add_adapter(layer: nn.Module, adapter: Adapter) -> None:
    """Adds the adapter's product to the outputs of a layer with whole inputs and outputs."""
    hold_adapter(layer, adapter)
    layer.register_forward_hook(_add_product)


def hold_adapter(layer: nn.Module, adapter: Adapter) -> None:
    """Gives the layer an adapter; the layer's `forward` must add `adapter_product`."""
    layer.register_parameter(_A, adapter.first)
    layer.register_parameter(_B, adapter.second)
    layer._lora_scale, layer._lora_dropout = adapter.scale, adapter.dropout  # type: ignore[assignment]


def take_adapter(layer: nn.Module) -> Adapter | None:
    """Removes the layer's adapter and returns it; returns None if there is none."""
    if not has_adapter(layer):
        return None
    own: Any = layer
    adapter = Adapter(own.lora_A, own.lora_B, own._lora_scale, own._lora_dropout)
    for name in (_A, _B, "_lora_scale", "_lora_dropout"):
        delattr(layer, name)
    for key in [key for key, hook in layer._forward_hooks.items() if hook is _add_product]:
        del layer._forward_hooks[key]
    return adapter


def has_adapter(layer: nn.Module) -> bool:
    return "_lora_scale" in layer.__dict__


def _add_product(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    # No closure over the layer, so that a copy of the network uses its own matrices.
    return output + adapter_product(layer, inputs[0])


def adapter_product(
    layer: Any, x: torch.Tensor, between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
) -> torch.Tensor:
    """Returns the adapter's output; a sharded layer communicates `between` its two matrices."""
    scale: float = layer._lora_scale
    seen = F.dropout(x, layer._lora_dropout, layer.training)
    return F.linear(between(F.linear(seen, layer.lora_A)), layer.lora_B) * scale


def find_adapters(module: nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in module.named_modules(remove_duplicate=False) if has_adapter(layer)}


def matrix_names(module: nn.Module) -> set[str]:
    return {f"{prefix}.{part}".lstrip(".") for prefix in find_adapters(module) for part in (_A, _B)}


def merged_state(module: nn.Module) -> State:
    """Returns the state dict with each adapter's product added to its layer's weight, and without adapters.

    If the weights are sharded, every rank must call this. A layer that holds one block of its weight has a
    method `own_block`, which returns the same block of a whole matrix.
    """
    state: State = module.state_dict()
    for prefix, layer in find_adapters(module).items():
        first, second, weight = (f"{prefix}.{name}".lstrip(".") for name in (_A, _B, "weight"))
        with torch.no_grad():
            cut = getattr(layer, "own_block", lambda whole: whole)
            product = _product(state.pop(second), state.pop(first), state[weight], cut)
            state[weight] = state[weight] + product * layer._lora_scale
    return state


def _product(
    second: Any, first: Any, weight: Any, cut: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Returns this rank's block of the product B A; `cut` takes the block of a whole matrix.

    If the weights are sharded (`DTensor`), the product is sharded in the same way.
    """
    if not hasattr(weight, "full_tensor"):
        return cut(torch.matmul(second, first))
    from torch.distributed.tensor import distribute_tensor

    whole = cut(second.full_tensor() @ first.full_tensor())
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)


def adapter_state(module: nn.Module) -> State:
    """Returns the trained tensors of this rank's shard of a network with adapters."""
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    return {name: tensor for name, tensor in module.state_dict().items() if name in trained}
