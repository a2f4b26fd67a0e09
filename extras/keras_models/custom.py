"""The user's own classes and functions in a Keras config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ringspark.extras.keras_models.library import import_keras


def find_custom(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the registered classes and functions that `config` refers to, by registered name."""
    find = import_keras().saving.get_registered_object
    return {name: found for name in _names(config) if (found := find(name)) is not None}


def missing_names(config: Mapping[str, Any], custom: Mapping[str, Any]) -> list[str]:
    keras = import_keras()
    found = (custom, *(vars(keras)[name].__dict__ for name in ("activations", "initializers", "ops")))
    return sorted({
        name
        for name in _names(config)
        if not any(name in names for names in found) and keras.saving.get_registered_object(name) is None
    })  # fmt: skip


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        name, module, kind = (value.get(key) for key in ("registered_name", "module", "class_name"))
        # A lambda is an entry of its own, or the bare value that the entry would have.
        if kind == "__lambda__" or value.keys() == {"value"}:
            yield "a lambda"
        elif kind == "function":
            yield str(value.get("config"))
        elif isinstance(name, str) and str(module).partition(".")[0] != "keras":
            yield name
        for inner in value.values():
            yield from _names(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _names(inner)
