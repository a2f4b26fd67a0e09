"""Describes a network of the transformers library by its class and config, in JSON.

    {"transformers": "BertForSequenceClassification", "config": {...}, "attention": "sdpa",
     "dtype": "float32", "frozen": []}

The class must belong to the transformers library itself, so that no code from a model's repository is run.
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

# Other attention names are kernels that the library may fetch from a hub.
_ATTENTION = ("eager", "sdpa")
_FETCHES = frozenset({
    *("attn_implementation", "_attn_implementation", "experts_implementation", "kernel_config"),
    *("auto_map", "backbone", "backbone_config", "quantization_config", "use_pretrained_backbone"),
    # timm may load a file or a hub's network for these.
    *("architecture", "checkpoint_path", "model_args", "pretrained_cfg", "use_timm_backbone"),
})  # fmt: skip
_BY_TIMM = ("timm_backbone", "timm_wrapper")
# Attributes that are compared separately, or have no effect on the computation.
_NOT_COMPARED = frozenset(
    {"_modules", "_parameters", "_buffers", "training", "name_or_path", "_weight_conversions"}
)
_PLAIN = (bool, int, float, str, type(None))


def describe(module: nn.Module) -> Description | None:
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
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "the network needs the transformers library, which is not installed; pip install "
            "'ringspark[transformers]'"
        ) from None
    name, settings = description[LIBRARY], description["config"]
    kind = getattr(transformers, name, None) if str(name).isidentifier() else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(
            f"transformers {transformers.__version__} has no network {name!r}; use the version that saved it"
        )
    if any(part in _BY_TIMM for part in kind.__module__.split(".")):
        raise ValueError(f"{name} builds its network by timm, which may fetch code or weights")
    _refuse_fetching(name, settings)
    if description["attention"] not in (*_ATTENTION, None):
        raise ValueError(
            f"the attention of {name} must be one of {_ATTENTION}, got {description['attention']!r}"
        )
    try:
        config: Any = kind.config_class.from_dict(settings)  # type: ignore[attr-defined]
        # The class's defaults too.
        _refuse_fetching(name, config.to_dict())
        if description["attention"] is not None:
            config._attn_implementation = description["attention"]
        module: nn.Module = kind(config)
        module.to(getattr(torch, description["dtype"]))
        freeze(module, description["frozen"])
    except Exception as error:  # the library raises many types
        raise ValueError(
            f"the config of {name} does not fit transformers {transformers.__version__} "
            f"({type(error).__name__}: {error}); use the version that saved it"
        ) from error
    return module


def build_from_config(
    name: str, config: Mapping[str, Any], attention: str | None = None, dtype: str = "float32"
) -> nn.Module:
    """Builds a network with random weights from a dict such as `config.json`; keys may be missing.

    `attention` is "eager", "sdpa" or None for the default of the class.
    """
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype must be the name of a torch dtype such as 'float32', got {dtype!r}")
    return build({LIBRARY: name, "config": config, "attention": attention, "dtype": dtype, "frozen": []})


def stop_caching(network: nn.Module) -> None:
    """Turns off key-value caches, because a recomputed block would append its keys and values twice."""
    for module in network.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def _refuse_fetching(name: str, settings: Any) -> None:
    if fetched := sorted(key for key in _keys(settings) if key in _FETCHES):
        raise ValueError(f"the config of {name} names {fetched[0]!r}, which may fetch code or weights")


def _keys(value: Any) -> Iterator[str]:
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
    tensors = {
        name: (tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in [*module._parameters.items(), *module._buffers.items()]
        if t is not None
    }
    # Values of non-persistent buffers come from the config, not from a checkpoint.
    buffers = {
        name: buffer.tolist()
        for name in sorted(module._non_persistent_buffers_set)
        if (buffer := module._buffers[name]) is not None and not buffer.is_meta
    }
    # A method that was replaced by hand shows as an instance attribute.
    attributes = {
        name: _compared(value)
        for name, value in module.__dict__.items()
        if name not in _NOT_COMPARED and not (name == "_use_kernels" and value is False)
    }
    has_hooks = any(getattr(module, name) for name in ("_forward_hooks", "_forward_pre_hooks"))
    return type(module), tensors, buffers, attributes, has_hooks
