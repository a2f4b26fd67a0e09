"""Reads a job file, YAML or JSON, into a dataclass. An error is one sentence that names the line and the key.

YAML is read as version 1.2: only `true` and `false` are booleans, and `1e-3` is a number. A date
stays a string.
"""

from __future__ import annotations

import io
import json
import math
import operator
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import reduce
from typing import Any, TypeVar, get_args

from ringspark.estimators.names import nearest
from ringspark.estimators.options.checked import check, listed
from ringspark.estimators.options.declare import hints_of

T = TypeVar("T")

Path = tuple[str | int, ...]

# Limits per file: repeated anchors could expand a small text to a huge job.
_MOST_VALUES = 100_000
_DEEPEST = 50


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
            is_json, lines = name.endswith(".json"), dict[Path, int]()
            tree = json.loads(text) if is_json else None
            # The YAML parser also reads JSON. It reports lines and refuses duplicate keys.
            yaml = _plain(name, _parse_yaml(name, text), (), lines)
            return cls(name, tree if is_json else yaml, lines)
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
        if isinstance(inner, type) and value is not None:
            given[key] = read_section(file, inner, (*path, key))
            continue
        try:
            given[key] = listed(check(hints[key], value, dotted))
        except ValueError as error:
            raise file.error((*path, key), str(error)) from None
    for name, entry in known.items():
        if name not in given and entry.default is MISSING and entry.default_factory is MISSING:
            raise file.error(path, f"{title or 'a job'} must have the key {name!r}; see docs/jobs.md")
    return kind(**given)


def yaml_or_json(value: Any) -> str:
    """Returns plain data as YAML, or as JSON if ruamel.yaml is not installed."""
    try:
        from ruamel.yaml import YAML
    except ImportError:
        return json.dumps(value, indent=2)
    yaml, text = YAML(), io.StringIO()
    yaml.default_flow_style, yaml.width = None, 100
    yaml.representer.ignore_aliases = lambda _: True
    yaml.dump(value, text)
    return text.getvalue().rstrip()


def _parse_yaml(name: str, text: str) -> Any:
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.constructor import ConstructorError, DuplicateKeyError, RoundTripConstructor
        from ruamel.yaml.error import YAMLError
    except ImportError:
        raise ValueError(
            "job files are read with the package ruamel.yaml, which is not installed; run pip install "
            "ruamel.yaml"
        ) from None

    class Constructor(RoundTripConstructor):
        """Reads dates as strings, and refuses tags and aliases of the value that they are in."""

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            if node in self.recursive_objects and node not in self.constructed_objects:
                # ruamel would return None.
                raise ConstructorError(None, None, "an alias refers to itself", node.start_mark)
            return super().construct_object(node, deep)

        def refuse(self, node: Any) -> Any:
            raise ConstructorError(
                None, None, f"a job must not have the YAML tag '{node.tag}'; remove it", node.start_mark
            )

    Constructor.add_constructor("tag:yaml.org,2002:timestamp", RoundTripConstructor.construct_scalar)
    Constructor.add_constructor(None, Constructor.refuse)
    yaml = YAML()
    yaml.Constructor = Constructor
    try:
        return yaml.load(text)
    except DuplicateKeyError as error:
        key = str(error.problem).partition('"')[2].partition('"')[0]
        line = error.problem_mark.line + 1
        raise ValueError(f"{name}, line {line}: {key!r} is a duplicate key; remove one") from None
    except YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        place = name if mark is None else f"{name}, line {mark.line + 1}"
        raise ValueError(f"{place}: this is not YAML: {problem}") from None


def _plain(name: str, node: Any, path: Path, lines: dict[Path, int]) -> Any:
    """Returns a node as plain data with string keys; records the line of each key in `lines`."""
    if len(path) > _DEEPEST or len(lines) > _MOST_VALUES:
        raise ValueError(f"{name} is too large for a job; shorten the file")
    if isinstance(node, Mapping):
        found: dict[str, Any] = {}
        for key, value in node.items():
            if place := (node.lc.data or {}).get(key):  # type: ignore[attr-defined]  # a key merged by `<<` has no line
                lines[(*path, str(key))] = place[0] + 1
            if isinstance(key, tuple | Mapping):
                raise ValueError(f"{name}, line {node.lc.line + 1}: a key must be a string")  # type: ignore[attr-defined]
            found[str(key)] = _plain(name, value, (*path, str(key)), lines)
        return found
    if isinstance(node, list):
        for number in range(len(node)):
            lines[(*path, number)] = node.lc.item(number)[0] + 1  # type: ignore[attr-defined]
        return [_plain(name, value, (*path, number), lines) for number, value in enumerate(node)]
    # ruamel's numbers and strings remember how they were written.
    return next((kind(node) for kind in (bool, int, float, str) if isinstance(node, kind)), node)


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
