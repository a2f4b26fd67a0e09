"""Describes a network of torch's own layers in JSON, so that it is saved and built without pickle.

    {"layers": {"layer": "Sequential", "children": {"0": {"layer": "Linear", "in_features": 4, ...}}}}

`describe` checks its result: it builds a network from the description, and returns None if any attribute of
that network differs from the original.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ringspark.models.adapters import ADAPTERS, LIBRARIES, AdaptedNetwork, find_library
from ringspark.models.meta_device import build_on_meta

Description: TypeAlias = dict[str, Any]

_OF_ALL_MODULES = frozenset(nn.Module().__dict__)
_HOOKS = [name for name in sorted(_OF_ALL_MODULES) if name.endswith("_hooks")]
# An RNN's second reference to its parameters.
_VIEWS = frozenset({"_flat_weights", "_flat_weight_refs"})
_MAX_DEPTH = 50


class _NoDescriptionError(Exception):
    """A layer is not torch's own, or its constructor arguments cannot be read from the layer."""


def describe(module: nn.Module) -> Description | None:
    known: dict[int, str] = {}
    if any(is_lazy(tensor) for tensor in [*module.parameters(), *module.buffers()]):
        return None
    try:
        description = {
            "layers": _layer(module, "", known),
            "tied": find_tied_names(module),
            "frozen": frozen_names(module),
            "dtype": single_dtype(module),
        }
        rebuilt = build_on_meta(lambda: build(description))
    except (_NoDescriptionError, TypeError, ValueError, RuntimeError, AttributeError):
        return None
    return description if _is_same(rebuilt, module) else None


def describe_network(module: nn.Module) -> Description | None:
    """Like `describe`, also for a library's network, or an adapted network."""
    if isinstance(module, AdaptedNetwork):
        return module.description()
    library = find_library(module)
    return describe(module) or (library and library.describe(module))


def build_network(description: Mapping[str, Any]) -> nn.Module:
    packages = ADAPTERS | LIBRARIES
    for package in packages.keys() & description.keys():
        network: nn.Module = import_module(packages[package]).build(description)
        return network
    return build(description)


def build(description: Mapping[str, Any]) -> nn.Module:
    try:
        module = _build(description["layers"], "", {})
        module.to(getattr(torch, description["dtype"]))
        for first, *others in description["tied"]:
            parameter = module.get_parameter(first)
            for other in others:
                owner, _, name = other.rpartition(".")
                setattr(module.get_submodule(owner), name, parameter)
        freeze(module, description["frozen"])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"the network's description does not fit torch {torch.__version__} ({type(error).__name__}: "
            f"{error}); use the torch version that saved it"
        ) from error
    return module


def frozen_names(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]


def freeze(module: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        module.get_parameter(name).requires_grad_(False)


def single_dtype(module: nn.Module) -> str:
    tensors = [*module.parameters(), *module.buffers()]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else "float32"


def _layer(module: nn.Module | None, path: str, known: dict[int, str]) -> Description:
    if module is None:
        raise _NoDescriptionError
    if id(module) in known:
        return {"same_as": known[id(module)]}
    known[id(module)] = path
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind or path.count(".") > _MAX_DEPTH:
        raise _NoDescriptionError
    if kind is nn.Sequential:
        # Not named_children(), which names a repeated layer once.
        children = {name: _layer(child, f"{path}.{name}", known) for name, child in module._modules.items()}
        return {"layer": "Sequential", "children": children}
    return {"layer": kind.__name__} | {name: _plain(value) for name, value in _arguments(module).items()}


def _arguments(module: nn.Module) -> dict[str, Any]:
    special = _ARGUMENTS.get(type(module))
    if special is not None:
        return special(module)
    arguments: dict[str, Any] = {}
    if type(module).__init__ is nn.Module.__init__:
        return arguments
    for parameter in inspect.signature(type(module)).parameters.values():
        if parameter.name in ("device", "dtype"):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise _NoDescriptionError
        if hasattr(module, parameter.name):
            value = getattr(module, parameter.name)
            # The attribute is the bias or None; the argument is a bool.
            has_tensor = parameter.name in module._parameters
            arguments[parameter.name] = value is not None if has_tensor else value
        elif parameter.default is parameter.empty:
            raise _NoDescriptionError
    return arguments


def _of_rnn(module: Any) -> dict[str, Any]:
    names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
    arguments = {name: getattr(module, name) for name in names}
    if isinstance(module, nn.LSTM):
        arguments["proj_size"] = module.proj_size
    if isinstance(module, nn.RNN):
        arguments["nonlinearity"] = module.nonlinearity
    return arguments


def _of_attention(module: Any) -> dict[str, Any]:
    names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
    return {name: getattr(module, name) for name in names} | {
        "bias": module.in_proj_bias is not None,
        "add_bias_kv": module.bias_k is not None,
    }


def _of_encoder_layer(module: Any) -> dict[str, Any]:
    return {
        "d_model": module.linear1.in_features,
        "nhead": module.self_attn.num_heads,
        "dim_feedforward": module.linear1.out_features,
        "dropout": module.dropout.p,
        # The comparison finds any other callable.
        "activation": "gelu" if module.activation is nn.functional.gelu else "relu",
        "layer_norm_eps": module.norm1.eps,
        "batch_first": module.self_attn.batch_first,
        "norm_first": module.norm_first,
        "bias": module.linear1.bias is not None,
    }


# Layers whose attributes differ from their arguments' names.
_ARGUMENTS: dict[type[nn.Module], Callable[[Any], dict[str, Any]]] = {
    nn.RNN: _of_rnn,
    nn.LSTM: _of_rnn,
    nn.GRU: _of_rnn,
    nn.MultiheadAttention: _of_attention,
    nn.TransformerEncoderLayer: _of_encoder_layer,
}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    raise _NoDescriptionError


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _build(description: Mapping[str, Any], path: str, known: dict[str, nn.Module]) -> nn.Module:
    if "same_as" in description:
        return known[description["same_as"]]
    name = description["layer"]
    kind = getattr(nn, name, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError(
            f"torch {torch.__version__} has no layer {name!r}; use the torch version that saved it"
        )
    if kind is nn.Sequential:
        module: nn.Module = kind()
        known[path] = module
        for child, inner in description["children"].items():
            module.add_module(child, _build(inner, f"{path}.{child}", known))
        return module
    known[path] = module = kind(
        **{key: _tuples(value) for key, value in description.items() if key != "layer"}
    )
    return module


def find_tied_names(module: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{prefix}.{name}" if prefix else name)
    return [group for group in names.values() if len(group) > 1]


def _is_same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = (list(m.named_modules(remove_duplicate=False)) for m in (one, other))
    return len(ours) == len(theirs) and all(
        name == other_name and _is_same_layer(first, second)
        for (name, first), (other_name, second) in zip(ours, theirs, strict=True)
    )


def _is_same_layer(one: nn.Module, other: nn.Module) -> bool:
    if type(one) is not type(other) or any(getattr(other, hooks) for hooks in _HOOKS):
        return False
    if one._non_persistent_buffers_set != other._non_persistent_buffers_set:
        return False
    for kind in ("_parameters", "_buffers"):
        ours, theirs = ({n: _form(t) for n, t in getattr(m, kind).items()} for m in (one, other))
        if ours != theirs:
            return False
    own = [
        {name: value for name, value in m.__dict__.items() if name not in _OF_ALL_MODULES | _VIEWS}
        for m in (one, other)
    ]
    return bool(own[0] == own[1])


def _form(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad)
