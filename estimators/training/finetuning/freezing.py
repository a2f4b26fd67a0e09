"""Chooses which parameters to train: `freeze` by patterns, and the adapters of `lora`.

A frozen parameter has no gradient, no communication and no optimizer state. A batch normalisation that is
frozen whole keeps its running statistics and normalises by them, in training too; otherwise "frozen" layers
would compute something else after every step. Dropout works in frozen layers as in others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ringspark.estimators.names import nearest
from ringspark.estimators.options.finetuning import LoRA
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models.lora import add_lora


def tune(module: nn.Module, freeze: Sequence[str] = (), lora: LoRA | None = None) -> nn.Module:
    """Freezes parameters and adds adapters, in place; returns the module. Runs on the driver and every rank.

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


def apply_finetuning(module: nn.Module, config: TrainConfig) -> nn.Module:
    """Does `tune` as a training's config says."""
    return tune(module, config.freeze, config.lora)


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
    """Returns all names of all parameters, and of the buffers of normalisations without parameters."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for prefix, layer in module.named_modules():
        if isinstance(layer, _NormBase) and not any(True for _ in layer.parameters()):
            names += [_within(prefix, name) for name, _ in layer.named_buffers()]
    return names


def _within(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def match_names(patterns: Iterable[str], names: Sequence[str], setting: str, kind: str) -> set[str]:
    """Returns the names that match a pattern; raises ValueError if a pattern matches none."""
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
    """Replaces `train` in a layer that stays in evaluation mode."""
    return layer
