"""Describes a network of the transformers library by its class and its config, in JSON.

    {"transformers": "BertForSequenceClassification", "config": {...}, "attention": "sdpa",
     "dtype": "float32", "frozen": []}

The class is one that the library itself has under that name, so no code comes from a model's repository.
What is built is compared with the network it describes; one that was changed by hand has no description.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ringspark.models.layers import Description, find_tied_names, freeze, frozen_names, single_dtype
from ringspark.models.meta_device import build_on_meta

LIBRARY = "transformers"

# Without code or weights of a hub: other attention is a kernel that the library may fetch by its name.
_ATTENTION = ("eager", "sdpa")
_FETCHES = frozenset({
    *("attn_implementation", "_attn_implementation", "experts_implementation", "kernel_config"),
    *("auto_map", "backbone", "backbone_config", "quantization_config", "use_pretrained_backbone"),
    # What timm makes of them may be a file or a network of a hub.
    *("architecture", "checkpoint_path", "model_args", "pretrained_cfg", "use_timm_backbone"),
})  # fmt: skip
_BY_TIMM = ("timm_backbone", "timm_wrapper")
# Attributes that tell how a network was loaded, and nothing of what it computes.
_OF_LOADING = frozenset({"training", "name_or_path", "_weight_conversions"})
_COMPARED_ELSEWHERE = frozenset({"_modules", "_parameters", "_buffers"})
_PLAIN = (bool, int, float, str, type(None))


def describe(module: nn.Module) -> Description | None:
    """Returns the description of a network; None if it has none."""
    if not type(module).__module__.startswith(f"{LIBRARY}."):
        return None
    try:
        config: Any = module.config
        description = {
            LIBRARY: type(module).__name__,
            "config": json.loads(json.dumps(config.to_dict())),
            "attention": config._attn_implementation,
            "dtype": single_dtype(module),
            "frozen": frozen_names(module),
        }
        rebuilt = build_on_meta(lambda: build(description))
    except (ValueError, TypeError, AttributeError, RuntimeError, LookupError):
        return None
    return description if type(rebuilt) is type(module) and _is_same(rebuilt, module) else None


def build(description: Mapping[str, Any]) -> nn.Module:
    """Builds the network, with weights as its class draws them.

    Raises:
        ValueError: The library is not installed, or this is no description of a class of it.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "the network is one of the transformers library, which is not installed here; pip install "
            "'ringspark[transformers]'"
        ) from None
    name, settings = description[LIBRARY], description["config"]
    kind = getattr(transformers, name, None) if str(name).isidentifier() else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(
            f"transformers {transformers.__version__} has no network {name!r}; take the version that it was "
            "saved with"
        )
    if any(part in _BY_TIMM for part in kind.__module__.split(".")):
        raise ValueError(f"{name} builds its network by timm, which may fetch code or weights")
    _refuse_fetching(name, settings)
    if description["attention"] not in _ATTENTION:
        raise ValueError(f"the attention {description['attention']!r} of {name} is none of {_ATTENTION}")
    try:
        config: Any = kind.config_class.from_dict(settings)  # type: ignore[attr-defined]
        # Also what the class takes where the description says nothing.
        _refuse_fetching(name, config.to_dict())
        config._attn_implementation = description["attention"]
        module: nn.Module = kind(config)
        module.to(getattr(torch, description["dtype"]))
        freeze(module, description["frozen"])
    except Exception as error:  # the library checks a config in many ways
        raise ValueError(
            f"the config of {name} does not fit transformers {transformers.__version__} "
            f"({type(error).__name__}: {error}); take the version that it was saved with"
        ) from error
    return module


def _refuse_fetching(name: str, settings: Any) -> None:
    if fetched := sorted(key for key in _keys(settings) if key in _FETCHES):
        raise ValueError(f"the config of {name} names {fetched[0]!r}, which may fetch code or weights")


def _keys(value: Any) -> Iterator[str]:
    """Yields the names of all settings that are given, at any depth."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if inner is not None and inner is not False:
                yield key
            yield from _keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner)


def _is_same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = (dict(m.named_modules(remove_duplicate=False)) for m in (one, other))
    if ours.keys() != theirs.keys() or find_tied_names(one) != find_tied_names(other):
        return False
    return all(_form(ours[name]) == _form(theirs[name]) for name in ours)


def _compared(value: Any) -> Any:
    """Returns what of an attribute must be equal: all of plain values and functions, otherwise its type."""
    if isinstance(value, _PLAIN) or inspect.isfunction(value):
        return value
    if type(value) in (list, tuple):
        return type(value), [_compared(item) for item in value]
    if type(value) is dict and all(isinstance(key, _PLAIN) for key in value):
        return dict, {key: _compared(item) for key, item in value.items()}
    if type(value) in (set, frozenset) and all(isinstance(item, _PLAIN) for item in value):
        return type(value), value
    return type(value)


def _form(module: nn.Module) -> tuple[Any, ...]:
    """Returns what decides a layer's computation besides its weights, as far as it is plain."""
    tensors = {
        name: (tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in [*module._parameters.items(), *module._buffers.items()]
        if t is not None
    }
    # Of buffers that no checkpoint holds, the numbers come from the config.
    made = {
        name: buffer.tolist()
        for name in sorted(module._non_persistent_buffers_set)
        if (buffer := module._buffers[name]) is not None and not buffer.is_meta
    }
    # A method that was replaced by hand is an attribute that the class's own networks lack.
    attributes = {
        name: _compared(value)
        for name, value in module.__dict__.items()
        if name not in _COMPARED_ELSEWHERE
        and name not in _OF_LOADING
        and not (name == "_use_kernels" and value is False)
    }
    has_hooks = any(getattr(module, name) for name in ("_forward_hooks", "_forward_pre_hooks"))
    return type(module), tensors, made, attributes, has_hooks
