"""Makes a Spark Param, its getter and its setter from a setting's declaration.

class _TrainingParams(DeclaredParams):
    epochs, getEpochs, setEpochs = declared(EPOCHS)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from pyspark.ml.param import Param, Params, TypeConverters

from ringspark.estimators.names import nearest
from ringspark.estimators.options.base import Options
from ringspark.estimators.training.settings.declaration import Kind, Setting
from ringspark.estimators.training.settings.table import GROUPS, SETTINGS
from ringspark.pipelines import storage
from ringspark.pipelines.notebook_table import notebook_table

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)
S = TypeVar("S", bound=Params)


class Getter(Protocol[T_co]):
    def __get__(self, stage: Any, kind: Any = None) -> Callable[[], T_co]: ...


class Setter(Protocol[T_contra]):
    def __get__(self, stage: S, kind: Any = None) -> Callable[[T_contra], S]: ...


_TYPES: dict[Kind, Callable[[Any], Any]] = {
    "int": TypeConverters.toInt,
    "float": TypeConverters.toFloat,
    "bool": TypeConverters.toBoolean,
    "str": TypeConverters.toString,
    "names": lambda value: TypeConverters.toListString([value] if isinstance(value, str) else value),
    "numbers": TypeConverters.toListFloat,
    "object": TypeConverters.identity,
}


def param_of(setting: Setting[Any]) -> Param[Any]:
    """Returns the Param of a setting, which refuses values with the setting's own message."""
    of_type = setting.convert or _TYPES[setting.kind]

    def convert(value: Any) -> Any:
        try:
            converted = of_type(value)
        except TypeError:
            if setting.convert is not None:
                raise
            # Spark's own words name Python's types, not what would be accepted.
            raise TypeError(f"{setting.name} {setting.type_rule()}, got {value!r}") from None
        setting.check(converted)
        return converted

    return Param(Params._dummy(), setting.name, setting.words, convert)


def getter(setting: Setting[T]) -> Getter[T]:
    """Returns a getter, which returns None for an unset setting without a default."""

    def get(self: Params) -> T:
        return value_of(self, setting)

    return cast(Getter[T], _named(get, "get", setting))


def setter(setting: Setting[T]) -> Setter[T]:
    def set_value(self: Params, value: T) -> Params:
        return self._set(**{setting.name: value})

    return cast(Setter[T], _named(set_value, "set", setting))


def declared(setting: Setting[T]) -> tuple[Param[Any], Getter[T], Setter[T]]:
    """Returns Param, getter and setter of a setting, for the body of a class."""
    return param_of(setting), getter(setting), setter(setting)


def value_of(stage: Params, setting: Setting[T]) -> T:
    value: Any = stage.getOrDefault(setting.name) if stage.isDefined(setting.name) else None
    if setting.empty_is_unset and value == "":
        return setting.default
    # A copy: a caller who changes the list does not change the stage.
    return cast(T, list(value) if isinstance(value, list) else value)


def _has(stage: Params, setting: Setting[Any]) -> bool:
    """Whether the stage has this setting, not just a Param of its name, such as Spark's `parallelism`."""
    return bool(stage.hasParam(setting.name) and stage.getParam(setting.name).doc == setting.words)


def values_of(stage: Params) -> dict[str, Any]:
    return {name: value_of(stage, setting) for name, setting in SETTINGS.items() if _has(stage, setting)}


def plain_values(stage: Params) -> dict[str, Any]:
    """Returns the settings that have a value, as plain data; objects as text."""
    return {name: _plain(value) for name, value in values_of(stage).items() if value is not None}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return storage.redact_text(value)
    if isinstance(value, Options):
        return _plain(value.to_values())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "to_json") and not isinstance(value, type):
        data = value.to_json()
        return _plain(json.loads(data) if isinstance(data, str) else data)
    # An object's address says nothing, and differs each time.
    return getattr(value, "__qualname__", type(value).__qualname__)


def _named(function: Any, verb: str, setting: Setting[Any]) -> Any:
    function.__name__ = f"{verb}{setting.name[0].upper()}{setting.name[1:]}"
    function.__doc__ = f"{verb.capitalize()}s `{setting.name}`: {setting.words}."
    return function


class DeclaredParams(Params):
    def __init__(self, *args: Any) -> None:
        # Ours come last: Spark's own mixins also set defaults.
        super().__init__(*args)
        self._setDefault(
            **{
                name: list(setting.default) if isinstance(setting.default, list) else setting.default
                for name, setting in SETTINGS.items()
                if setting.default is not None and _has(self, setting)
            }
        )

    def _repr_html_(self) -> str:
        """Returns the settings that are not at their defaults, for a notebook. Calls no Spark."""
        values = {name: (value, SETTINGS[name].default) for name, value in values_of(self).items()}
        rows = [
            (name, _plain(value), "unset" if default is None else _plain(default))
            for name, (value, default) in values.items()
            if value is not default and _plain(value) != _plain(default)
        ]
        note = self._notebook_note()
        if not rows:
            note = f"All settings are at their defaults. {note}".strip()
        title = f"{type(self).__name__} {self.uid}"
        return notebook_table(title, ["setting", "value", "default"], rows, note)

    def explainParams(self) -> str:
        """Returns the Params by group, one line each, with meaning, default and value."""
        lines, left = [], {param.name for param in self.params}
        for group, settings in GROUPS.items():
            names = [setting.name for setting in settings if _has(self, setting)]
            if names:
                lines += [f"{group}:", *(f"  {self.explainParam(name)}" for name in names)]
            left -= set(names)
        if lines and left:
            lines += ["other:", *(f"  {self.explainParam(name)}" for name in sorted(left))]
        return "\n".join(lines) or super().explainParams()

    def _notebook_note(self) -> str:
        """Returns the sentence that a notebook shows below the settings."""
        return ""

    def _set(self: S, **values: Any) -> S:
        """Sets Params by name; the value None clears a Param, in setters as in constructors."""
        for name in [name for name, value in values.items() if value is None]:
            self.clear(self.getParam(name))
            del values[name]
        super()._set(**values)
        return self


def set_params(stage: Params, keywords: dict[str, Any]) -> None:
    """Sets constructor keywords (None means unset); raises TypeError for a keyword that is no Param."""
    names = [param.name for param in stage.params]
    for name in keywords:
        if name not in names:
            hint = nearest(name, names) or f"; its Params are {names}"
            raise TypeError(f"{type(stage).__name__} has no Param {name!r}{hint}")
    stage._set(**{name: value for name, value in keywords.items() if value is not None})
