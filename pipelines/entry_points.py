"""Finds classes that other installed packages declare as entry points, such as readers.

The search reads a file of every installed package, so callers look up built-in names first.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from importlib.metadata import entry_points
from typing import Any


def list_entry_points(group: str) -> list[str]:
    return sorted({point.name for point in entry_points(group=group)})


def load_entry_point(
    group: str, setting: str, name: str, known: Collection[str], needed: Collection[str]
) -> Any:
    """Returns the class that an installed package declares under a name.

    Args:
        setting: Param that holds the name, for messages.
        known: Built-in names, for messages.
        needed: Attributes that the class must have.

    Raises:
        ValueError: No package or several packages declare the name, the import fails, or the class lacks an
            attribute.
    """
    found = {point.value: point for point in entry_points(group=group, name=name)}
    if not found:
        names = [*known, *list_entry_points(group)]
        raise ValueError(
            f"{setting} must be one of {', '.join(sorted(names))}, got {name!r}; to use another "
            f"name, install the package that declares it in {group!r} on the driver and on the executors"
        )
    if len(found) > 1:
        raise ValueError(
            f"{setting} {name!r} is declared by several packages, as {' and as '.join(sorted(found))}; "
            "uninstall all but one"
        )
    (point,) = found.values()
    try:
        part = point.load()
    except Exception as error:
        raise ValueError(
            f"{setting} {name!r} cannot be imported from {point.value}: {type(error).__name__}: {error}; "
            "repair or uninstall its package"
        ) from error
    lacking = sorted(set(needed) - set(dir(part))) if isinstance(part, type) else ["a class"]
    lacking += sorted(getattr(part, "__abstractmethods__", ())) if inspect.isabstract(part) else []
    if lacking:
        raise ValueError(
            f"{setting} {name!r} ({point.value}) lacks {', '.join(lacking)}; its class must have the "
            "attributes that docs/hooks.md lists"
        )
    return part
