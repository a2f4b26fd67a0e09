"""The settings of the last start beside their defaults, from the one table that declares them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.extras.report.content import Block, Section, Table, shorten
from ringspark.extras.report.facts import Facts

# Rows that stand beside each other in the table of defaults.
BESIDE = 3

# Told elsewhere on the page: the folder of the run.
_ELSEWHERE = frozenset({"run_uri"})


def differing(config: TrainConfig) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """Returns the settings that differ from their defaults, and the others: name -> (value, default).

    Each setting is in one of the two, once; None stands for a default that there is not.
    """
    defaults = {f.name: f.default for f in fields(config)}
    changed: dict[str, tuple[Any, Any]] = {}
    others: dict[str, tuple[Any, Any]] = {}
    for name, setting in SETTINGS.items():
        if setting.field not in defaults or setting.field in _ELSEWHERE:
            continue
        value, default = getattr(config, setting.field), defaults[setting.field]
        if default is MISSING:
            # Of what every training has: its columns.
            default = setting.default if setting.default is None else (setting.default,)
        (others if value == default else changed)[name] = (value, default)
    return changed, others


def _make(facts: Facts) -> Sequence[Block]:
    config = facts.run.config
    if config is None:
        return []
    changed, others = differing(config)
    rows = [[name, _text(value), _text(default)] for name, (value, default) in changed.items()]
    rest = [[name, _text(value)] for name, (value, _) in sorted(others.items())]
    words = frozenset({0, 1, 2})
    return [
        Table(
            ["setting", "value", "default"],
            rows,
            words=words,
            title="Other than their defaults",
            note="As the ranks got them: what a default leaves open is decided here. What ranks need not "
            "know, such as names of output columns, is not in the run's folder.",
        ),
        Table(
            ["setting", "value"] * BESIDE, _beside(rest), words=frozenset(range(2 * BESIDE)), title="Defaults"
        ),
    ]


def _beside(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns the rows of a long narrow table in fewer and wider ones, to be read column by column."""
    height = -(-len(rows) // BESIDE)
    padded = [*rows, *([["", ""]] * (height * BESIDE - len(rows)))]
    return [[cell for row in padded[place::height] for cell in row] for place in range(height)]


def _text(value: Any) -> str:
    if value is None or value in ("", (), []):
        return "unset"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str) and value.startswith("{"):
        value = _parsed(value)
    if isinstance(value, dict):
        return shorten(", ".join(f"{key}: {_inner(of_key)}" for key, of_key in value.items()), 400)
    if isinstance(value, list | tuple):
        return shorten(", ".join(map(_inner, value)), 400)
    return shorten(str(value), 400)


def _parsed(text: str) -> Any:
    """Returns a network's description, which the config has as JSON text."""
    try:
        return {key: value for key, value in json.loads(text).items() if value not in ({}, None, "")}
    except ValueError:
        return text


def _inner(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


SECTION = Section(name="settings", title="Settings", make=_make)
