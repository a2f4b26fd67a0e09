"""Imports Keras with the torch backend, and finds the user's own classes and functions in its registry."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle


def import_keras() -> Any:
    """Returns the module `keras` with the torch backend, even if the environment names another backend.

    Raises ValueError if Keras is missing, too old, or imported with another backend.
    """
    if "keras" not in sys.modules:
        before = os.environ.get("KERAS_BACKEND")
        os.environ["KERAS_BACKEND"] = "torch"
        try:
            import keras
        except ImportError:
            raise ValueError(
                "the network needs Keras 3, which is not installed here; pip install 'ringspark[keras]'"
            ) from None
        finally:
            # A child process may want another backend.
            if before is None:
                del os.environ["KERAS_BACKEND"]
            else:
                os.environ["KERAS_BACKEND"] = before
    import keras

    if int(keras.__version__.split(".")[0]) < 3:
        raise ValueError(f"the network needs Keras 3, got Keras {keras.__version__}; pip install 'keras>=3'")
    backend = keras.backend.backend()
    if backend != "torch":
        raise ValueError(
            f"a Keras model needs the torch backend, but this process has imported Keras with the {backend} "
            "backend; set the environment variable KERAS_BACKEND=torch before keras is imported"
        )
    return keras


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
