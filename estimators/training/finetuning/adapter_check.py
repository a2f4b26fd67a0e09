"""Checks on the driver that each adapter is used, and that merging does not change the network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ringspark.models.lora import find_adapters, merged_state
from ringspark.models.process_state import fork_generators

Tensors = tuple[torch.Tensor, ...]


def check_adapters(module: nn.Module, run: Callable[[], Tensors]) -> Tensors:
    """Returns the outputs of `run`, which calls the module on a few rows.

    Raises ValueError if a layer with an adapter is not called, or the merged network computes something else.
    """
    silent = find_adapters(module)

    def note(name: str, *_: object) -> None:
        silent.pop(name, None)

    hooks = [
        layer.register_forward_hook(partial(note, name)) for name, layer in find_adapters(module).items()
    ]
    outputs = run()
    for hook in hooks:
        hook.remove()
    if silent:
        raise ValueError(
            f"lora's targets have layer {min(silent)!r}, which the forward of model {type(module).__name__} "
            "does not call, so an adapter would change nothing; choose layers that it calls"
        )
    if hooks and not _agree(*_run_both_ways(module, run)):
        raise ValueError(
            f"model {type(module).__name__} gives other outputs once lora's adapters are merged into its "
            "weights: it also uses the weight of a target layer without calling the layer; choose other "
            "layers"
        )
    return outputs


@torch.no_grad()
def _run_both_ways(module: nn.Module, run: Callable[[], Tensors]) -> tuple[Tensors, Tensors]:
    """Returns the outputs with random adapters, and with the same adapters merged; restores the module."""
    layers = find_adapters(module)
    first = {id(layer): layer.weight.data for layer in layers.values()}

    def run_seeded() -> Tensors:
        torch.manual_seed(0)
        return run()

    # A first layer's adapter would map zeros to zeros.
    hook = module.register_forward_pre_hook(_random_inputs)
    try:
        with fork_generators():
            for layer in layers.values():
                # The product is about as large as the layer's own weight.
                layer.lora_B.normal_(std=1 / layer._lora_scale)  # type: ignore[operator, arg-type]
            beside, state = run_seeded(), merged_state(module)
            for name, layer in layers.items():
                layer.weight.data = state[f"{name}.weight".lstrip(".")]
                layer.lora_B.zero_()  # type: ignore[operator]
            return beside, run_seeded()
    finally:
        hook.remove()
        for layer in layers.values():
            layer.weight.data = first[id(layer)]
            layer.lora_B.zero_()  # type: ignore[operator]


def _random_inputs(_: nn.Module, inputs: Tensors) -> Tensors:
    return tuple(torch.rand_like(values) if values.is_floating_point() else values for values in inputs)


def _agree(first: Tensors, second: Tensors) -> bool:
    """Returns whether the outputs are equal up to rounding."""

    def differ(one: torch.Tensor, two: torch.Tensor) -> bool:
        tolerance = torch.finfo(one.dtype).eps ** 0.5 if one.is_floating_point() else 0.0
        # A comparison with NaN is False: outputs that are not finite pass.
        return bool((one.double() - two.double()).abs().max() > tolerance * two.double().abs().max())

    return not any(differ(one, two) for one, two in zip(first, second, strict=True) if one.numel())
