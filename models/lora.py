"""LoRA: trains a product of two thin matrices beside each chosen linear layer, whose own weight stays.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models". A layer with weight W gives
W x + (alpha / rank) B A x, with A (rank, in) drawn as a linear layer's weight and B (out, rank) zero at
first, so that the first outputs are those of the network without adapters.

A and B are parameters of the layer itself, `lora_A` and `lora_B`, and a hook adds their product: no layer is
wrapped or replaced, so all other names of the state dict stay as they are. The `peft` package replaces the
layers, and every worker would import it and `transformers` for three seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
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
    """Gives each linear layer whose name matches a pattern an adapter; returns the layers' names.

    Args:
        alpha: The product counts `alpha / rank` times.
        targets: Shell patterns over names of linear layers, such as "*.query".
        dropout: Probability with which the adapter, in training, does not see an input.

    Raises:
        ValueError: A pattern matches no linear layer, or a layer cannot have an adapter.
    """
    linear = linear_layers(module)
    chosen: dict[str, nn.Linear] = {}
    for pattern in targets:
        found = {name: layer for name, layer in linear.items() if fnmatchcase(name, pattern)}
        if not found:
            raise ValueError(f"the pattern {pattern!r} matches no linear layer; they are {list(linear)[:10]}")
        chosen |= found
    uses = Counter(id(p) for owner in module.modules() for p in owner._parameters.values())
    for name, layer in chosen.items():
        if is_lazy(layer.weight):
            raise ValueError(f"layer {name!r} is lazy, its sizes are not known yet; give it its in_features")
        if own := [part for part in (_A, _B) if hasattr(layer, part)]:
            raise ValueError(
                f"layer {name!r} has a {own[0]!r} of its own, where an adapter's would stand; choose other "
                "layers"
            )
        if not _is_plain(layer):
            raise ValueError(
                f"layer {name!r} computes more than W x + b (by its own forward, by a hook or by a weight "
                "that is computed, as weight_norm's), so that no adapter can be merged into it; choose other "
                "layers"
            )
        if uses[id(layer.weight)] > 1:
            raise ValueError(
                f"layer {name!r} shares its weight with another layer, which a merged adapter would change "
                "too; choose other layers"
            )
        _adapt(layer, rank, alpha / rank, dropout)
    return list(chosen)


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linear layers that are called, by name; attention of torch's own only reads its weights."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and not isinstance(layer, NonDynamicallyQuantizableLinear)
    }


def _is_plain(layer: nn.Linear) -> bool:
    """Whether the layer computes W x + b of a parameter W, which alone a merged adapter changes."""
    has_hooks = layer._forward_hooks or layer._forward_pre_hooks
    forward = layer.__dict__.get("forward", type(layer).forward)
    return forward is nn.Linear.forward and "weight" in layer._parameters and not has_hooks


def _adapt(layer: nn.Linear, rank: int, scale: float, dropout: float) -> None:
    weight = layer.weight
    first = torch.empty(rank, layer.in_features, dtype=weight.dtype, device=weight.device)
    nn.init.kaiming_uniform_(first, a=math.sqrt(5))
    layer.register_parameter(_A, nn.Parameter(first))
    layer.register_parameter(_B, nn.Parameter(weight.new_zeros(layer.out_features, rank)))
    layer._lora_scale, layer._lora_dropout = scale, dropout  # type: ignore[assignment]
    layer.register_forward_hook(_add_product)


def _add_product(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    # The layer is the hook's argument, so that a copy of the network uses its own matrices.
    seen = F.dropout(inputs[0], layer._lora_dropout, layer.training)  # type: ignore[arg-type]
    product = F.linear(F.linear(seen, layer.lora_A), layer.lora_B)  # type: ignore[arg-type]
    return output + product * _scale(layer)


def _scale(layer: Any) -> float:
    scale: float = layer._lora_scale
    return scale


def find_adapters(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers that have an adapter of ours, by name; a user's own may have such matrices too."""
    return {
        name: layer
        for name, layer in module.named_modules(remove_duplicate=False)
        if "_lora_scale" in layer.__dict__
    }


def matrix_names(module: nn.Module) -> set[str]:
    """Returns the names of the adapters' matrices in the state dict."""
    return {f"{prefix}.{part}".lstrip(".") for prefix in find_adapters(module) for part in (_A, _B)}


def merged_state(module: nn.Module) -> State:
    """Returns the state dict of the network without adapters that computes the same as this one with them.

    Runs on every rank where the ranks hold parts of the weights.
    """
    state: State = module.state_dict()
    for prefix, layer in find_adapters(module).items():
        first, second, weight = (f"{prefix}.{name}".lstrip(".") for name in (_A, _B, "weight"))
        with torch.no_grad():
            product = _product(state.pop(second), state.pop(first), state[weight])
            state[weight] = state[weight] + product * _scale(layer)
    return state


def _product(second: Any, first: Any, weight: Any) -> torch.Tensor:
    """Returns B A, cut as the weight is where the ranks hold parts (`DTensor`) of all three."""
    if not hasattr(weight, "full_tensor"):
        return torch.matmul(second, first)
    from torch.distributed.tensor import distribute_tensor

    whole = second.full_tensor() @ first.full_tensor()
    return distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)


def adapter_state(module: nn.Module) -> State:
    """Returns the tensors that a training with adapters trains: matrices, and parameters chosen beside them.

    Returns nothing for a network without adapters.
    """
    if not find_adapters(module):
        return {}
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    return {name: tensor for name, tensor in module.state_dict().items() if name in trained}
