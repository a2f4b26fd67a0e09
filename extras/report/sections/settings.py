"""The settings of the last start and their defaults, from the table that declares them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.extras.report.content import Block, Section, Table, shorten
from ringspark.extras.report.facts import Facts

# Settings per row in the table of defaults.
SETTINGS_PER_ROW = 3

# Shown elsewhere on the page.
_ELSEWHERE = frozenset({"run_uri"})


def split_settings(config: TrainConfig) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """Returns the settings that differ from their defaults, and the others: name -> (value, default).

    Each setting is in exactly one of the two; None means that there is no default.
    """
    defaults = {f.name: f.default for f in fields(config)}
    changed: dict[str, tuple[Any, Any]] = {}
    others: dict[str, tuple[Any, Any]] = {}
    for name, setting in SETTINGS.items():
        if setting.field not in defaults or setting.field in _ELSEWHERE:
            continue
        value, default = getattr(config, setting.field), defaults[setting.field]
        if default is MISSING:
            # The columns, which every training has.
            default = setting.default if setting.default is None else (setting.default,)
        (others if value == default else changed)[name] = (value, default)
    return changed, others


def _make(facts: Facts) -> Sequence[Block]:
    config = facts.run.config
    if config is None:
        return []
    changed, others = split_settings(config)
    rows = [[name, _text(value), _text(default)] for name, (value, default) in changed.items()]
    rest = [[name, _text(value)] for name, (value, _) in sorted(others.items())]
    words = frozenset({0, 1, 2})
    return [
        Table(
            ["setting", "value", "default"],
            rows,
            words=words,
            title="Changed settings",
            note="As the ranks received them, with automatic values resolved. Settings that ranks do not "
            "need, such as names of output columns, are not in the run's folder.",
        ),
        Table(
            ["setting", "value"] * SETTINGS_PER_ROW,
            _wrap(rest),
            words=frozenset(range(2 * SETTINGS_PER_ROW)),
            title="Defaults",
        ),
    ]


def _wrap(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns the rows of a long narrow table in fewer and wider rows, to be read column by column."""
    height = -(-len(rows) // SETTINGS_PER_ROW)
    padded = [*rows, *([["", ""]] * (height * SETTINGS_PER_ROW - len(rows)))]
    return [[cell for row in padded[place::height] for cell in row] for place in range(height)]


def _text(value: Any) -> str:
    if value is None or value in ("", (), []):
        return "unset"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str) and value.startswith("{"):
        value = _parse(value)
    if isinstance(value, dict):
        return shorten(", ".join(f"{key}: {_inner(of_key)}" for key, of_key in value.items()), 400)
    if isinstance(value, list | tuple):
        return shorten(", ".join(map(_inner, value)), 400)
    return shorten(str(value), 400)


def _parse(text: str) -> Any:
    """Returns a network's description, which the config holds as JSON text."""
    try:
        return {key: value for key, value in json.loads(text).items() if value not in ({}, None, "")}
    except ValueError:
        return text


def _inner(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


SECTION = Section(name="settings", title="Settings", make=_make)
