"""Reads a job file, YAML or JSON, into a dataclass. An error is one sentence that names the line and the key.

YAML is read as version 1.2: only `true` and `false` are booleans, and `1e-3` is a number. A date
stays a string.
"""

from __future__ import annotations

import io
import json
import math
import operator
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import reduce
from types import NoneType
from typing import Any, TypeVar, get_args

from ringspark.estimators.names import nearest
from ringspark.estimators.options.checked import check, listed
from ringspark.estimators.options.declare import hints_of

T = TypeVar("T")

Path = tuple[str | int, ...]

# Limits per file: repeated anchors could expand a small text to a huge job.
_MOST_VALUES = 100_000
_DEEPEST = 50
_KINDS = ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "value")
_WORDS = {"true": True, "True": True, "false": False, "False": False}
_WORDS_OF_NOTHING = ("", "~", "null", "Null")
_INT = re.compile(r"[-+]?\d+")
_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?\.inf|\.nan")
# Strings that are written without quotes.
_PLAIN = re.compile(r"[A-Za-z_/][\w./ -]*", re.ASCII)


class _NotYamlError(ValueError):
    """The YAML parser, which also finds lines and duplicate keys of JSON, cannot read the text."""


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
        try:
            tree = json.loads(text) if name.endswith(".json") else None
            found = _parse_yaml(name, text)
            return found if tree is None else cls(name, tree, found.lines)
        except _NotYamlError:
            if tree is None:
                raise
            return cls(name, tree)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}, line {error.lineno}: this is not JSON: {error.msg}") from None
        except RecursionError:
            raise ValueError(f"{name} is nested too deeply") from None

    def error(self, path: Path, sentence: str) -> ValueError:
        """Returns an error with the line of `path`, or of the nearest key that encloses it."""
        for change in self.changes:
            if path[: len(change)] == change:
                return ValueError(f"--set {'.'.join(map(str, change))}: {sentence}")
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return ValueError(f"{self.name}, line {self.lines[path[:length]]}: {sentence}")
        return ValueError(f"{self.name}: {sentence}")

    @contextmanager
    def place(self, *path: str | int, title: str = "") -> Iterator[None]:
        """Puts the line of a key, and `title`, before the message of an error about its value."""
        try:
            yield
        except (TypeError, ValueError) as error:
            raise self.error(path, f"{title}{error}") from None

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
    section: Any = kind
    known = {entry.name: entry for entry in fields(section)}
    if not isinstance(values, Mapping):
        keys = ", ".join(known)
        raise file.error(path, f"{title or 'a job'} must have the keys {keys}, got {_shorten(values)}")
    hints, given = hints_of(section), {}
    for key, value in values.items():
        dotted = f"{title}.{key}" if title else str(key)
        if key not in known:
            hint = nearest(str(key), known) or f"; its keys are {', '.join(known)}"
            raise file.error((*path, key), f"{title or 'a job'} has no key {key!r}{hint}")
        inner = next((part for part in (hints[key], *get_args(hints[key])) if is_dataclass(part)), None)
        if isinstance(inner, type) and not (value is None and NoneType in get_args(hints[key])):
            given[key] = read_section(file, inner, (*path, key))
            continue
        with file.place(*path, key):
            given[key] = listed(check(hints[key], value, dotted))
    for name, entry in known.items():
        if name not in given and entry.default is MISSING and entry.default_factory is MISSING:
            raise file.error(path, f"{title or 'a job'} must have the key {name!r}; see docs/jobs.md")
    return kind(**given)


def yaml_or_json(value: Any) -> str:
    """Returns plain data as YAML, or as JSON if ruamel.yaml is not installed."""
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.representer import RoundTripRepresenter
    except ImportError:
        return json.dumps(value, indent=2)

    class Representer(RoundTripRepresenter):
        """Quotes all but plain words, because ruamel writes `?x` in a list so that it reads as a key."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_str(self, data: str) -> Any:
            style = None if _PLAIN.fullmatch(data) else '"'
            return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Representer.add_representer(str, Representer.represent_str)
    yaml, text = YAML(), io.StringIO()
    yaml.Representer = Representer
    yaml.default_flow_style, yaml.width = None, 100
    yaml.dump(value, text)
    return text.getvalue().rstrip()


def _parse_yaml(name: str, text: str) -> JobFile:
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError
    except ImportError:
        raise ValueError(
            "job files are read with the package ruamel.yaml, which is not installed; run pip install "
            "ruamel.yaml"
        ) from None

    if text.lstrip("\ufeff").startswith("%"):
        raise ValueError(f"{name}, line 1: a job file has no YAML directives; remove the line")
    lines: dict[Path, int] = {}
    try:
        # Nodes instead of values: ruamel's values forget how keys and numbers were written.
        root = YAML(typ="safe", pure=True).compose(text)
        return JobFile(name, None if root is None else _value(name, root, (), lines), lines)
    except YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        place = name if mark is None else f"{name}, line {mark.line + 1}"
        raise _NotYamlError(f"{place}: this is not YAML: {problem}") from None


def _value(name: str, node: Any, path: Path, lines: dict[Path, int]) -> Any:
    """Returns a node as plain data, and records the line of each key in `lines`."""
    line = node.start_mark.line + 1
    if len(path) > _DEEPEST or len(lines) > _MOST_VALUES:
        raise ValueError(f"{name} is too large for a job, or an alias refers to itself; shorten the file")
    kind = str(node.tag).rpartition(":")[2]
    if kind not in _KINDS or not str(node.tag).startswith("tag:yaml.org"):
        raise ValueError(
            f"{name}, line {line}: a job must not have the YAML tag {str(node.tag)!r}; remove it"
        )
    if node.id == "sequence":
        lines |= {(*path, number): entry.start_mark.line + 1 for number, entry in enumerate(node.value)}
        return [_value(name, entry, (*path, number), lines) for number, entry in enumerate(node.value)]
    if node.id == "scalar":
        return _scalar(kind, node.value)
    mapping: dict[str, Any] = {}
    for key, entry in node.value:
        place = f"{name}, line {key.start_mark.line + 1}"
        if key.id != "scalar" or key.tag.endswith(":merge"):
            raise ValueError(f"{place}: a key must be a string; write it as one")
        if key.value in mapping:
            raise ValueError(f"{place}: {key.value!r} is a duplicate key; remove one")
        lines[(*path, key.value)] = key.start_mark.line + 1
        mapping[key.value] = _value(name, entry, (*path, key.value), lines)
    return mapping


def _scalar(kind: str, text: str) -> Any:
    """Returns the value of a plain scalar. A text such as 1_000 stays a string."""
    if kind == "bool":
        return _WORDS.get(text, text)
    if kind == "null" and text in _WORDS_OF_NOTHING:
        return None
    if kind == "int" and _INT.fullmatch(text):
        return int(text)  # 010 is ten
    if kind in ("int", "float") and _FLOAT.fullmatch(text):
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    return text


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
