"""Makes Spark Params, their getters and setters from declared settings.

For example::

    @with_settings(*settings_of(Recovery).values())
    class RecoveryParams(DeclaredParams): ...

Type checkers and editors read the same members in a stub, which scripts/show_stubs.py writes.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Protocol, TypeVar

from pyspark.ml import Estimator, Transformer
from pyspark.ml.param import Param, Params

from ringspark.estimators.names import nearest
from ringspark.estimators.options.checked import WrongTypeError, listed
from ringspark.estimators.options.declare import Options
from ringspark.estimators.training.settings.setting import Setting
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.pipelines import storage
from ringspark.pipelines.notebook_table import notebook_table

S = TypeVar("S", bound="DeclaredParams")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

_SPARK_PREFIX = re.compile(r'^Invalid param value given for param "\w+"\. ')


class Getter(Protocol[T_co]):
    """Type of a getter in a stub."""

    def __get__(self, stage: Any, kind: Any = None) -> Callable[[], T_co]: ...


class Setter(Protocol[T_contra]):
    """Type of a setter in a stub."""

    def __get__(self, stage: S, kind: Any = None) -> Callable[[T_contra], S]: ...


def with_settings(*settings: Setting, fixed: Collection[str] = ()) -> Callable[[type[S]], type[S]]:
    """Returns a decorator that gives a class the Param, getter and setter of each setting.

    A method that the class defines itself is kept. The settings named in `fixed` get no setter.
    """

    def add(cls: type[S]) -> type[S]:
        for setting in settings:
            suffix = setting.name[0].upper() + setting.name[1:]
            made = {setting.name: param_of(setting), f"get{suffix}": _getter(setting)}
            if setting.name not in fixed:
                made[f"set{suffix}"] = _setter(setting)
            for name, member in made.items():
                if name not in vars(cls):
                    setattr(cls, name, member)
        cls.SETTINGS = cls.SETTINGS | {setting.name: setting for setting in settings}
        return cls

    return add


def param_of(setting: Setting) -> Param[Any]:
    """Returns the Param of a setting; it raises the setting's own error for a wrong value."""
    return Param(
        Params._dummy(), setting.name, setting.words, lambda value: _copied(listed(setting.check(value)))
    )


def _getter(setting: Setting) -> Any:
    def get(self: Params) -> Any:
        return value_of(self, setting.name)

    return _named(get, "get", setting)


def _setter(setting: Setting) -> Any:
    def set_value(self: Params, value: Any) -> Params:
        return self._set(**{setting.name: value})

    return _named(set_value, "set", setting)


def value_of(stage: Any, name: str) -> Any:
    """Returns the value of a setting; None if it is unset and has no default."""
    setting = stage.SETTINGS[name]
    value = stage.getOrDefault(name) if stage.isDefined(name) else None
    if setting.empty_is_unset and value == "":
        return setting.default
    return _copied(value)


def _copied(value: Any) -> Any:
    """Returns a copy of lists and dicts, also within each other, so that a caller cannot change the stage."""
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return {key: _copied(each) for key, each in value.items()} if type(value) is dict else value


def values_of(stage: Any) -> dict[str, Any]:
    return {name: value_of(stage, name) for name in stage.SETTINGS}


def plain_values(stage: Any) -> dict[str, Any]:
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


def _named(function: Any, verb: str, setting: Setting) -> Any:
    function.__name__ = f"{verb}{setting.name[0].upper()}{setting.name[1:]}"
    function.__doc__ = f"{verb.capitalize()}s `{setting.name}`: {setting.words}."
    return function


class DeclaredParams(Params):
    """Spark Params that come from declared settings.

    `help` and editors see the constructor's keywords, and the settings of each section.

    Attributes:
        SETTINGS: The settings of the stage by name.
    """

    SETTINGS: ClassVar[dict[str, Setting]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # From the last base class to the first, so that a class can override a setting of its bases.
        found = {n: s for base in reversed(cls.__mro__) for n, s in vars(base).get("SETTINGS", {}).items()}
        cls.SETTINGS = {name: found[name] for name in dict.fromkeys((*SETTINGS, *found)) if name in found}
        is_stage = issubclass(cls, (Estimator, Transformer))
        if is_stage and cls.__name__[0] != "_":
            cls.__signature__ = _signature(cls.SETTINGS)  # type: ignore[attr-defined]
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{_describe(cls.SETTINGS)}"

    def __init__(self, **params: Any) -> None:
        # After Spark's mixins, which also set defaults.
        super().__init__()
        defaults = {name: setting.default for name, setting in self.SETTINGS.items()}
        self._setDefault(**{name: listed(value) for name, value in defaults.items() if value is not None})
        self.setParams(**params)

    def setParams(self: S, **params: Any) -> S:
        """Sets Params by name; None clears one. Raises TypeError for a keyword that is not a Param."""
        names = [param.name for param in self.params]
        for name in params:
            if name not in names:
                hint = nearest(name, names) or "; explainParams() lists its Params"
                raise TypeError(f"{type(self).__name__} has no Param {name!r}{hint}")
        return self._set(**params)

    def _repr_html_(self) -> str:
        """Returns the settings that are not at their defaults, for a notebook. Calls no Spark."""
        values = {name: (value, self.SETTINGS[name].default) for name, value in values_of(self).items()}
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
        lines = []
        for group, names in _by_group(self.SETTINGS).items():
            lines += [f"{group}:", *(f"  {self.explainParam(name)}" for name in names)]
        return "\n".join(lines)

    def _notebook_note(self) -> str:
        """Returns the sentence that a notebook shows below the settings."""
        return ""

    def set(self, param: Param[Any], value: Any) -> None:
        """Sets a Param, or clears it if the value is None."""
        self._shouldOwn(param)
        self._set(**{param.name: value})

    def _set(self: S, **values: Any) -> S:
        """Sets Params by name; the value None clears a Param, in setters as in constructors."""
        for name in [name for name, value in values.items() if value is None]:
            self.clear(self.getParam(name))
            del values[name]
        try:
            super()._set(**values)
        except TypeError as error:
            raise WrongTypeError(_SPARK_PREFIX.sub("", str(error))) from None
        return self


def _by_group(settings: dict[str, Setting]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, setting in settings.items():
        groups.setdefault(setting.group, []).append(name)
    return groups


def _signature(settings: dict[str, Setting]) -> inspect.Signature:
    keyword = inspect.Parameter.KEYWORD_ONLY
    found = [inspect.Parameter(name, keyword, default=each.default) for name, each in settings.items()]
    return inspect.Signature(found)


def _describe(settings: dict[str, Setting]) -> str:
    """Returns the settings by section, one line each, for `help`."""
    lines = []
    for group, names in _by_group(settings).items():
        lines += [f"{group.capitalize()}:", *(f"    {name}: {settings[name].words}" for name in names), ""]
    return "\n".join(lines).rstrip()
