"""The base class of settings with options. pydantic checks each option.

A subclass of `Options` defines the value of a Param, a section of `TrainConfig` and of a job file, and a
table of the page "Settings". Nothing here imports torch or Spark.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_type_hints

from ringspark.estimators.names import nearest
from ringspark.estimators.options.checked import WrongTypeError, check, either, listed, type_rules

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

O = TypeVar("O", bound="Options")  # noqa: E741


def option(default: Any = MISSING, remedy: str = "") -> Any:
    """Declares an option; it is required without a default. `remedy` ends the message of a range error."""
    return field(default=default, metadata={"remedy": remedy})


def to_snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])([A-Z])", lambda match: f"_{match[1].lower()}", name)


class _Signature:
    """Signature of a class of options for `help` and editors; its types omit the ranges."""

    def __get__(self, instance: object, owner: Any) -> inspect.Signature:
        hints, (_, *options) = get_type_hints(owner), inspect.signature(owner.__init__).parameters.values()
        return inspect.Signature([each.replace(annotation=hints[each.name]) for each in options])


class _AnyCase(type):
    """Lets a constructor take the names of a job file, such as maxGradNorm for max_grad_norm."""

    def __call__(cls: Any, *args: Any, **options: Any) -> Any:
        given = {to_snake_case(name): value for name, value in options.items()}
        if refusal := cls._refusal(options, len(args)):
            raise TypeError(refusal)
        return super().__call__(*args, **given)


@dataclass(frozen=True, kw_only=True)
class Options(metaclass=_AnyCase):
    """The options of one setting.

    A class with variants, such as `Sync`, has no instances itself. A variant's dict has its name as "name".

    Attributes:
        NAME: Name of a variant in dicts and files; by default its class name in lower case.
        SHORTHAND: Name of the option that a plain value sets, such as "stages" for pipeline=2; "" for none.
    """

    NAME: ClassVar[str] = ""
    SHORTHAND: ClassVar[str] = ""
    # What `help` and the API pages show.
    __signature__ = _Signature()

    def __init_subclass__(cls) -> None:
        if "NAME" not in cls.__dict__:
            cls.NAME = cls.__name__.lower()
        # `dataclass` keeps a method that the class has itself.
        type.__setattr__(cls, "__repr__", Options.__repr__)

    def __post_init__(self) -> None:
        hints = hints_of(type(self))
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not each.default:
                subject, remedy = f"{type(self).__name__}'s {each.name}", each.metadata.get("remedy", "")
                object.__setattr__(self, each.name, check(hints[each.name], value, subject, remedy))

    @classmethod
    def variants(cls) -> dict[str, type[Options]]:
        """Returns the variants of a setting by name; none for a class without variants."""
        found: dict[str, type[Options]] = {}
        for variant in cls.__subclasses__():
            found |= variant.variants() or {variant.NAME: variant}
        return found

    @classmethod
    def of(cls: type[O], value: Any, subject: str = "") -> O:
        """Converts a dict of options, the name of a variant, or the value of `SHORTHAND`.

        `subject` is the setting, for the errors.
        """
        variants = cls.variants()
        if isinstance(value, cls) and not type(value).variants():
            return value
        subject = subject or cls.__name__
        if variants and isinstance(value, str):
            value = {"name": value}
        known = [variant.__name__ for variant in variants.values()] or [f"a {cls.__name__}"]
        if cls.SHORTHAND and value is not None and not isinstance(value, Mapping | Options):
            hint = hints_of(cls)[cls.SHORTHAND]
            try:
                value = {cls.SHORTHAND: check(hint, value, f"{cls.__name__}'s {cls.SHORTHAND}")}
            except WrongTypeError:
                known = [*type_rules(hint), *known]
        if not isinstance(value, Mapping):
            forms = either(
                [*known, "a dict with a name and options" if variants else "a dict of its options"]
            )
            raise WrongTypeError(f"{subject} must be {forms}, got {value!r}")
        given = dict(value)
        made: type[Any] = cls
        if variants:
            name = given.pop("name", None)
            if name is None:
                names = ", ".join(variants)
                raise ValueError(f"{subject} needs a 'name' in its dict, got {value!r}; add one of {names}")
            key = name.replace("_", "").lower() if isinstance(name, str) else ""
            if key not in variants:
                hint = nearest(str(name), variants)
                raise ValueError(f"{subject} must be one of {', '.join(variants)}, got {name!r}{hint}")
            made = variants[key]
        elif Options not in cls.__bases__ and given.get("name") == cls.NAME:
            del given["name"]
        if refusal := made._refusal(given):
            raise ValueError(refusal)
        return made(**{str(key): item for key, item in given.items()})  # type: ignore[no-any-return]

    @classmethod
    def _refusal(cls, given: Mapping[Any, Any], num_positional: int = 0) -> str:
        """Returns the error about an unknown or a missing option; "" if there is none."""
        options = {each.name: each for each in fields(cls)}
        names, known = ", ".join(options) or "no options", {to_snake_case(str(key)) for key in given}
        for key in given:
            name = to_snake_case(str(key))
            if name not in options:
                hint = nearest(name, options) or f"; it takes {names}"
                return f"{cls.__name__} has no option {key!r}{hint}"
        needed = [name for name, each in options.items() if each.default is MISSING][num_positional:]
        if missing := [name for name in needed if name not in known]:
            return f"{cls.__name__} needs the option {missing[0]!r}; it takes {names}"
        return ""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        """Makes pydantic accept every value that `of` accepts."""
        from pydantic_core import core_schema

        return core_schema.with_info_plain_validator_function(
            lambda value, info: cls.of(value, info.context or ""),
        )

    # Reads a result of `to_values`.
    from_values = of

    def to_values(self) -> dict[str, Any]:
        """Returns all options as plain data, with the name of a variant."""
        is_variant = Options not in type(self).__bases__
        values = {each.name: plain(getattr(self, each.name)) for each in fields(self)}
        return ({"name": self.NAME} if is_variant else {}) | values

    def __repr__(self) -> str:
        """Returns the constructor's call, without options at their defaults."""
        given = [f"{f.name}={v!r}" for f in fields(self) if (v := getattr(self, f.name)) != f.default]
        return f"{type(self).__name__}({', '.join(given)})"


@lru_cache
def hints_of(cls: Any) -> dict[str, Any]:
    """Returns the type of each field, with its constraints."""
    return get_type_hints(cls, include_extras=True)


def plain(value: Any) -> Any:
    return value.to_values() if isinstance(value, Options) else listed(value)
