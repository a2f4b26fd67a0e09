"""The user's own classes and functions in a Keras config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle

from ringspark.extras.keras_models.library import import_keras


class Custom(dict[str, Any]):
    """Classes and functions by registered name.

    Pickled as bytes inside the outer pickle, so that `_load` can choose the torch backend before the classes
    are unpickled, which imports Keras.
    """

    def __reduce__(self) -> tuple[Callable[[bytes], Custom], tuple[bytes]]:
        return _load, (cloudpickle.dumps(dict(self)),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Custom:
        return self


def _load(pickled: bytes) -> Custom:
    import_keras()
    return Custom(cloudpickle.loads(pickled))


def find_custom(config: Mapping[str, Any]) -> Custom:
    """Returns the registered classes and functions that `config` refers to."""
    find = import_keras().saving.get_registered_object
    return Custom({name: found for name in _names(config) if (found := find(name)) is not None})


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
        # Keras writes a lambda as an entry of the class "__lambda__", or as the value of such an entry alone.
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
