"""Reads a job file, YAML or JSON, into a dataclass. An error is one sentence that names the line and the key.

YAML is read as version 1.2: only `true` and `false` are booleans, `1e-3` is a number, and a date is a string.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import reduce
from typing import Any, TypeVar, get_args, get_type_hints

from ringspark.estimators.names import nearest

T = TypeVar("T")

Path = tuple[str | int, ...]

# Limits per file: repeated anchors could expand a small text to a huge job.
_MOST_VALUES = 100_000
_DEEPEST = 50
_SCALARS = {
    "bool": (r"true|True|false|False", "tTfF"),
    "int": (r"[-+]?\d+", "-+0123456789"),
    "float": (r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN)", "-+.0123456789"),
    "null": (r"~|null|Null|", "~nN\0"),
}
_TYPES = {"str": "a string", "int": "a whole number", "bool": "true or false", "float": "a number"}


@dataclass(frozen=True)
class JobFile:
    """Content of a job file, the line of each key, and the keys that `set_value` has changed."""

    name: str
    tree: Any
    lines: dict[Path, int] = field(default_factory=dict)
    changes: tuple[Path, ...] = ()

    @classmethod
    def parse(cls, name: str, text: str) -> JobFile:
        """Parses JSON if the name ends in .json, else YAML. Raises ValueError if the text is wrong."""
        if name.endswith(".json"):
            try:
                tree = json.loads(text, object_pairs_hook=_refuse_duplicates)
            except json.JSONDecodeError as error:
                raise ValueError(f"{name}, line {error.lineno}: this is not JSON: {error.msg}") from None
            except RecursionError:
                raise ValueError(f"{name} is nested too deeply") from None
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            # Nearly all JSON is also YAML, and the YAML parser gives line numbers.
            with suppress(ValueError):
                return cls(name, tree, _parse_yaml(name, text).lines)
            return cls(name, tree)
        return _parse_yaml(name, text)

    def error(self, path: Path, sentence: str) -> ValueError:
        """Returns an error with the line of `path`, or of the nearest key that encloses it."""
        for change in self.changes:
            if path[: len(change)] == change:
                return ValueError(f"--set {'.'.join(map(str, change))}: {sentence}")
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return ValueError(f"{self.name}, line {self.lines[path[:length]]}: {sentence}")
        return ValueError(f"{self.name}: {sentence}")

    def set_value(self, assignment: str) -> JobFile:
        """Returns the file with one value changed; `assignment` is KEY=VALUE, such as "params.epochs=3".

        Raises ValueError if the text is not an assignment, or if a part of the path has no keys.
        """
        dotted, equals, text = assignment.partition("=")
        keys = dotted.split(".")
        if not equals or not all(keys):
            raise ValueError(f"--set takes KEY=VALUE, such as params.epochs=3, got {assignment!r}")
        tree = json.loads(json.dumps(self.tree)) if isinstance(self.tree, Mapping) else {}
        inner = tree
        for number, key in enumerate(keys[:-1], 1):
            if inner.get(key) is None:
                inner[key] = {}
            inner = inner[key]
            if not isinstance(inner, dict):
                raise ValueError(
                    f"--set {dotted}: {'.'.join(keys[:number])} is {inner!r} and has no keys; set another key"
                )
        inner[keys[-1]] = _parse_value(text)
        path = tuple(keys)
        kept = {place: line for place, line in self.lines.items() if place[: len(path)] != path}
        return JobFile(self.name, tree, kept, (path, *self.changes))


def read_section(file: JobFile, kind: type[T], path: Path = ()) -> T:
    """Reads a section of the file, with its subsections, into a dataclass.

    Raises ValueError if a key is unknown or missing, or a value has a wrong type.
    """
    values, title = reduce(operator.getitem, path, file.tree), ".".join(map(str, path))
    known = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(values, Mapping):
        raise file.error(
            path, f"{title or 'a job'} must have the keys {', '.join(known)}, got {_shorten(values)}"
        )
    hints, given = get_type_hints(kind), {}
    for key, value in values.items():
        dotted = f"{title}.{key}" if title else str(key)
        if key not in known:
            hint = nearest(str(key), known) or f"; its keys are {', '.join(known)}"
            raise file.error((*path, key), f"{title or 'a job'} has no key {key!r}{hint}")
        inner = next((part for part in (hints[key], *get_args(hints[key])) if is_dataclass(part)), None)
        if isinstance(inner, type) and value is not None:
            given[key] = read_section(file, inner, (*path, key))
        else:
            given[key] = _check_type(file, (*path, key), hints[key], value, dotted)
    for name, entry in known.items():
        if name not in given and entry.default is MISSING and entry.default_factory is MISSING:
            raise file.error(path, f"{title or 'a job'} must have the key {name!r}; see docs/jobs.md")
    return kind(**given)


def yaml_or_json(value: Any) -> str:
    try:
        import yaml
    except ImportError:
        return json.dumps(value, indent=2)

    class Dumper(yaml.SafeDumper):
        """Quotes strings that this module would read as another type."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    Dumper.yaml_implicit_resolvers = {}
    _add_resolvers(Dumper)
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=100)).rstrip()


def _parse_yaml(name: str, text: str) -> JobFile:
    try:
        import yaml
    except ImportError:
        raise ValueError(
            f"{name} is YAML, which needs the package PyYAML; pip install pyyaml, or write the job as JSON "
            "in a .json file"
        ) from None

    class Loader(yaml.SafeLoader):
        """Reads plain values by YAML 1.2's core schema only."""

    Loader.yaml_implicit_resolvers = {}
    _add_resolvers(Loader)
    lines: dict[Path, int] = {}
    try:
        loader = Loader(text)
        root = loader.get_single_node()
        tree = None if root is None else _value(name, loader, root, (), lines)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}, line {mark.line + 1}" if mark is not None else name
        problem = getattr(error, "problem", None) or error
        raise ValueError(f"{place}: this is not YAML: {problem}") from None
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply") from None
    return JobFile(name, tree, lines)


def _add_resolvers(kind: Any) -> None:
    for tag, (pattern, first) in _SCALARS.items():
        letters = ["" if letter == "\0" else letter for letter in first]
        kind.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(rf"^(?:{pattern})$"), letters)


def _value(name: str, loader: Any, node: Any, path: Path, lines: dict[Path, int]) -> Any:
    if len(path) > _DEEPEST or len(lines) > _MOST_VALUES:
        raise ValueError(f"{name} is too large for a job, or an alias refers to itself; shorten the file")
    if node.id == "sequence":
        values = []
        for number, entry in enumerate(node.value):
            lines[(*path, number)] = entry.start_mark.line + 1
            values.append(_value(name, loader, entry, (*path, number), lines))
        return values
    if node.id != "mapping":
        return _scalar(name, loader, node)
    mapping: dict[str, Any] = {}
    for key_node, entry in node.value:
        key, line = key_node.value, key_node.start_mark.line + 1
        if key_node.id != "scalar":
            raise ValueError(f"{name}, line {line}: a key must be a string")
        if key in mapping:
            raise ValueError(f"{name}, line {line}: {key!r} is a duplicate key; remove one")
        lines[(*path, key)] = line
        mapping[key] = _value(name, loader, entry, (*path, key), lines)
    return mapping


def _scalar(name: str, loader: Any, node: Any) -> Any:
    kind = node.tag.rpartition(":")[2]
    if kind == "float" and "." not in node.value.lstrip("+-.") and "n" not in node.value.lower():
        return float(node.value)
    if kind == "int":
        return int(node.value)  # 010 is ten, as in YAML 1.2
    if kind in (*_SCALARS, "str"):
        return loader.construct_object(node)
    raise ValueError(f"{name}, line {node.start_mark.line + 1}: jobs take no YAML tag {node.tag}; remove it")


def _check_type(file: JobFile, path: Path, hint: Any, value: Any, title: str) -> Any:
    options = [getattr(option, "__origin__", option) for option in (get_args(hint) or (hint,))]
    if isinstance(getattr(hint, "__origin__", None), type):
        options = [hint.__origin__]
    for option in options:
        if option is Any or (isinstance(option, type) and isinstance(value, option)):
            if isinstance(value, bool) and bool not in options and Any not in options:
                break
            return value
    if float in options and type(value) is int:
        return float(value)
    if dict in options:
        raise file.error(path, f"{title} must have keys and values, got {_shorten(value)}")
    words = " or ".join(_TYPES[option.__name__] for option in options if option.__name__ in _TYPES)
    raise file.error(path, f"{title} must be {words}, got {_shorten(value)}")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is a duplicate key; remove one")
        found[key] = value
    return found


def _parse_value(text: str) -> Any:
    """Parses the value of an assignment as JSON; if it is not JSON, returns the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    # Such as "Infinity", which is not JSON, but Python's parser accepts it.
    return text if isinstance(value, float) and not math.isfinite(value) else value


def _shorten(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
