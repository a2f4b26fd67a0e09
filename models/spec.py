"""`ModelSpec`: a network as an import path and JSON keyword arguments, saved and rebuilt without pickle."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from typing import TypeAlias

from torch import nn

from ringspark.models.adapters import LIBRARIES, adapt_network
from ringspark.models.checks import suggest
from ringspark.models.registry import MODELS

_IMPORTABLE = "give the class's own import path, in a module that driver and workers have, or an nn.Module"

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


@dataclass(frozen=True, init=False, repr=False)
class ModelSpec:
    """A network, given by its name or import path and the arguments of its class.

    >>> spec = ModelSpec("mlp", {"in_features": 4, "hidden": [32], "out_features": 1})
    >>> sum(parameter.numel() for parameter in spec.build().parameters())  # 4 * 32 + 32, then 32 + 1
    193

    Attributes:
        target: A name in `MODELS`, or `"package.module:Class"` for a network of your own.
        kwargs: Keyword arguments of the class. Tuples become lists, as they would in JSON. A network
            "transformers:Class" takes the dict `config`, and may take `attention` and `dtype`.

    Raises:
        ValueError: If the target is neither a known name nor an import path, or an argument is not JSON.
    """

    target: str
    kwargs: dict[str, JSON]

    def __init__(self, target: str, kwargs: Mapping[str, object] | None = None) -> None:
        if not isinstance(target, str):
            raise ValueError(
                f"ModelSpec's target must be a name or 'package.module:Class', got {type(target).__name__}"
            )
        _check_target(target)
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise ValueError(f"ModelSpec({target!r}): kwargs must be a dict, got {type(kwargs).__name__}")
        checked: dict[str, JSON] = {}
        for key, value in (kwargs or {}).items():
            if not isinstance(key, str):
                raise ValueError(f"ModelSpec({target!r}): argument names must be strings, got {key!r}")
            checked[key] = _to_json_value(value, where=f"ModelSpec({target!r}): argument {key!r}")
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "kwargs", checked)

    @property
    def library(self) -> str | None:
        """Module about the library of a target such as "transformers:BertModel"; None for other targets."""
        return LIBRARIES.get(self.target.partition(":")[0])

    def build(self) -> nn.Module:
        cls = _import_class(self.target)
        make: Callable[..., nn.Module] = cls
        if self.library is not None:
            make = partial(importlib.import_module(self.library).build_from_config, cls.__name__)
        signature = inspect.signature(make)
        try:
            signature.bind(**self.kwargs)
        except TypeError as error:
            raise ValueError(
                f"model {self.target!r} does not take these arguments: {error}; it takes "
                f"{', '.join(signature.parameters) or 'none'}"
            ) from error
        try:
            # A copy, because a network may keep and change its lists.
            network: nn.Module = adapt_network(make(**copy.deepcopy(self.kwargs)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"model {self.target!r} could not be built: {error}") from error
        return network

    def shorten(self, num_blocks: int) -> ModelSpec | None:
        """Returns the spec with fewer blocks; None if its library has no such function."""
        if self.library is None:
            return None
        shorter: ModelSpec | None = importlib.import_module(self.library).shorten(self, num_blocks)
        return shorter

    def to_json(self) -> str:
        """Returns the spec as one line of JSON; equal specs give equal text."""
        return json.dumps({"target": self.target, "kwargs": self.kwargs}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        """Reads the result of `to_json`. Raises ValueError if the text is not a spec."""
        try:
            fields = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"a ModelSpec must be JSON: {error}") from error
        if not isinstance(fields, dict) or not {"target"} <= set(fields) <= {"target", "kwargs"}:
            raise ValueError(f"a ModelSpec holds 'target' and 'kwargs', got {text[:80]}")
        return cls(fields["target"], fields.get("kwargs"))

    def check_apart(self, folder: str) -> None:
        """Raises ValueError if the class may come from a file in `folder`, the folder of the saved stage.

        Nothing is imported. Any folder on `sys.path` can be imported as a namespace package, so a target such
        as `model.weights.net` might run a file among the saved data.
        """
        for value in self.kwargs.values():
            if isinstance(value, dict) and isinstance(target := value.get("target"), str):
                ModelSpec(target).check_apart(folder)  # a network in a wrapper
        if self.target in MODELS:
            return

        def refusal(why: str) -> ValueError:
            return ValueError(f"model {self.target!r} is not imported: {why}")

        folder, name, places = os.path.realpath(folder), "", None
        for part in self.target.partition(":")[0].split("."):
            name = f"{name}.{part}" if name else part
            found = _find_module(name, places)
            if found is None:
                return  # `build` raises an error for it
            package = found.submodule_search_locations
            if package is not None and not found.has_location:
                raise refusal(f"{name} is a namespace package, which may be any folder on sys.path")
            files = [os.path.realpath(file) for file in (found.origin or "", *(package or ())) if file]
            if any(_is_inside(file, folder) for file in files):
                raise refusal(f"{name} lies in {folder!r}, next to the weights")
            if places is None and package and any(_is_inside(folder, os.path.realpath(p)) for p in package):
                raise refusal(f"the package {name} contains the folder {folder!r}")
            places = list(package or ())

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        return f"ModelSpec({self.target!r}, {self.kwargs!r})"


def _check_target(target: str) -> None:
    if ":" not in target:
        if target in MODELS:
            return
        raise ValueError(
            f"a model must be one of {', '.join(sorted(MODELS))}, or 'package.module:Class', got "
            f"{target!r}{suggest(target, MODELS)}"
        )
    module_name, _, class_name = target.partition(":")
    parts = [*module_name.split("."), *class_name.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise ValueError(f"a model's import path must be 'package.module:Class', got {target!r}")
    if module_name == "__main__":
        raise ValueError(
            f"model {target!r} is defined in the main script, which workers cannot import; "
            "move the class into a module, or pass the nn.Module itself"
        )


def _find_module(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    """Returns a module's import spec, without any import; `places` are the folders of the parent package."""
    if name in sys.modules:
        return sys.modules[name].__spec__
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        found: ModuleSpec | None = find(name, places) if find is not None else None
        if found is not None:
            return found
    return None


def _is_inside(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder if os.path.isabs(path) else False


def _import_class(target: str) -> type[nn.Module]:
    module_name, _, class_path = MODELS.get(target, target).partition(":")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        raise ValueError(
            f"model {target!r} could not be imported: {type(error).__name__}: {error}; {_IMPORTABLE}"
        ) from error
    for part in class_path.split("."):
        if not hasattr(found, part):
            raise ValueError(
                f"model {target!r} could not be imported: {module_name} has no {class_path!r}; {_IMPORTABLE}"
            )
        found = getattr(found, part)
    # Checked before the call: a spec may come from a file, which must not be able to call any function.
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"model {target!r} must be a subclass of torch.nn.Module, got {found!r}")
    return found


def _to_json_value(value: object, where: str) -> JSON:
    """Returns a deep copy of `value` in JSON types. Error messages name the value `where`."""
    if value is None or isinstance(value, bool | int | str):
        # The type must match exactly: a str or int subclass (an Enum, numpy.str_) would change its type.
        if value is None or type(value) in (bool, int, str):
            return value
    elif type(value) is float:
        if math.isfinite(value):
            return value
        raise ValueError(f"{where} must be a finite number, got {value}")
    elif isinstance(value, list | tuple):
        return [_to_json_value(item, f"{where}[{i}]") for i, item in enumerate(value)]
    elif isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} must have strings as keys, got {key!r}")
        return {key: _to_json_value(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise ValueError(
        f"{where} must be JSON (None, bool, int, float, str, list or dict), got {type(value).__name__}"
    )
