"""Chooses which parameters to train: `freeze` by patterns, and the adapters of `lora`.

If all parameters of a batch normalisation are frozen, it keeps its running statistics and normalises by them
in training too. Otherwise the outputs of frozen layers would change with every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ringspark.estimators.names import nearest
from ringspark.estimators.options.finetuning import LoRA
from ringspark.models.lora import add_lora, find_adapters, merged_state
from ringspark.models.process_state import fork_generators

Tensors = tuple[torch.Tensor, ...]


def tune(module: nn.Module, freeze: Sequence[str] = (), lora: LoRA | None = None) -> nn.Module:
    """Freezes parameters and adds adapters, in place; returns the module.

    Raises ValueError if a pattern matches nothing, or nothing is left to train.
    """
    if lora is not None:
        _add_adapters(module, lora)
    elif freeze:
        _freeze(module, match_names(freeze, _names(module), "freeze", "parameter"))
    if not any(p.requires_grad for p in module.parameters()):
        name = type(module).__name__
        if not freeze:
            raise ValueError(f"model {name} has no trainable parameters; unfreeze some")
        raise ValueError(f"freeze leaves no parameter of model {name} to train; narrow its patterns")
    return module


def _add_adapters(module: nn.Module, lora: LoRA) -> None:
    names = _names(module)
    trained = match_names(lora.train, names, "lora's 'train'", "parameter")
    before = dict(module.named_parameters(remove_duplicate=False))
    try:
        add_lora(module, lora.rank, lora.alpha or lora.rank, lora.targets, lora.dropout)
    except ValueError as error:
        raise ValueError(f"lora's targets: {error}") from error
    # One name of a tied parameter is enough.
    kept = {id(parameter) for name, parameter in before.items() if name in trained}
    _freeze(module, {name for name in names if name not in trained and id(before.get(name)) not in kept})


def _names(module: nn.Module) -> list[str]:
    """Returns the names of all parameters, and of the buffers of normalisations without parameters."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for prefix, layer in module.named_modules():
        if isinstance(layer, _NormBase) and not any(True for _ in layer.parameters()):
            names += [_within(prefix, name) for name, _ in layer.named_buffers()]
    return names


def _within(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def match_names(patterns: Iterable[str], names: Sequence[str], setting: str, kind: str) -> set[str]:
    """Returns all matching names. A pattern of `setting` that matches no `kind` raises ValueError."""
    found: set[str] = set()
    for pattern in patterns:
        own = {name for name in names if fnmatchcase(name, pattern)}
        if not own:
            raise ValueError(
                f"{setting} has the pattern {pattern!r}, which matches no {kind} of the model"
                f"{nearest(pattern, names) or f'; they are {list(names)[:10]}'}"
            )
        found |= own
    return found


def _freeze(module: nn.Module, names: set[str]) -> None:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in names:
            parameter.requires_grad_(False)
    for prefix, layer in module.named_modules():
        if not isinstance(layer, _NormBase) or not layer.track_running_stats:
            continue
        own = [name for name, _ in layer.named_parameters()] or [name for name, _ in layer.named_buffers()]
        if names.issuperset(_within(prefix, name) for name in own):
            layer.eval()
            # Not a bound method, which a pickle would look up on the layer's class.
            layer.train = partial(_stay, layer)  # type: ignore[method-assign, assignment]


def _stay(layer: nn.Module, mode: bool = True) -> nn.Module:
    return layer


def check_adapters(module: nn.Module, run: Callable[[], Tensors]) -> Tensors:
    """Returns the outputs of `run`, which calls the module on a few rows. Runs on the driver.

    Raises ValueError if a layer with an adapter is not called, or if merging adapters changes the outputs.
    """
    silent = find_adapters(module)

    def record(name: str, *_: object) -> None:
        silent.pop(name, None)

    hooks = [layer.register_forward_hook(partial(record, name)) for name, layer in list(silent.items())]
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
    """Returns the outputs with random adapters, unmerged and merged; restores the module."""
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
                layer.lora_B.normal_(std=1 / layer._lora_scale)
            unmerged, state = run_seeded(), merged_state(module)
            for name, layer in layers.items():
                layer.weight.data = state[f"{name}.weight".lstrip(".")]
                layer.lora_B.zero_()
            return unmerged, run_seeded()
    finally:
        hook.remove()
        for layer in layers.values():
            layer.weight.data = first[id(layer)]
            layer.lora_B.zero_()


def _random_inputs(_: nn.Module, inputs: Tensors) -> Tensors:
    return tuple(torch.rand_like(values) if values.is_floating_point() else values for values in inputs)


def _agree(first: Tensors, second: Tensors) -> bool:
    def differ(one: torch.Tensor, two: torch.Tensor) -> bool:
        tolerance = torch.finfo(one.dtype).eps ** 0.5 if one.is_floating_point() else 0.0
        # A comparison with NaN is False: outputs that are not finite pass.
        return bool((one.double() - two.double()).abs().max() > tolerance * two.double().abs().max())

    return not any(differ(one, two) for one, two in zip(first, second, strict=True) if one.numel())
