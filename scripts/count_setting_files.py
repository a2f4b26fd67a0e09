"""Prints which files of the packages mention each setting.

    python scripts/count_setting_files.py

A file mentions a setting if its code has the Spark name (`numWorkers`, `getNumWorkers`, also in messages) or
reads the config's field (`config.num_workers`). Comments and docstrings do not count. The folder
training/settings counts once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ringspark.estimators.training.settings.setting import Setting
from ringspark.estimators.training.settings.table import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("pipelines", "models", "estimators", "extras", "jobs")
DECLARED_IN = "estimators/training/settings"
# Variable names that hold a config.
CONFIGS = frozenset({"config", "_config"})


def places() -> dict[str, list[str]]:
    """Returns setting -> files that mention it, in alphabetical order."""
    words: dict[str, set[str]] = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            place = DECLARED_IN if name.startswith(f"{DECLARED_IN}/") else name
            words.setdefault(place, set()).update(find_words(ast.parse(path.read_text())))
    return {
        name: sorted({DECLARED_IN} | {place for place, found in words.items() if found & _spellings(setting)})
        for name, setting in SETTINGS.items()
    }


def find_words(tree: ast.Module) -> Iterator[str]:
    """Yields identifiers, words of strings, and config attributes as "config.name"."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
            of = node.value
            if (of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")) in CONFIGS:
                yield f"config.{node.attr}"
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.keyword | ast.arg) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from re.findall(r"\w+", node.value)


def _spellings(setting: Setting) -> set[str]:
    name = setting.name
    methods = {f"{verb}{name[0].upper()}{name[1:]}" for verb in ("get", "set")}
    # A single word such as "loss" is ambiguous, so only its methods and fields count.
    own = {name} if name.lower() != name else set()
    return methods | own | {f"config.{setting.field or name}"}


def main() -> None:
    """Prints the table, the most frequent setting first."""
    for name, found in sorted(places().items(), key=lambda row: (-len(row[1]), row[0])):
        print(f"{len(found):3} {name:24} {', '.join(found)}")


if __name__ == "__main__":
    main()
