"""Settings of the last launch, next to their defaults from the table that declares all settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from typing import Any

from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.extras.report.content import Block, Table, shorten
from ringspark.extras.report.facts import RunFacts

# Settings per row in the table of defaults.
SETTINGS_PER_ROW = 3

# Shown elsewhere on the page.
_ELSEWHERE = frozenset({"run_uri"})


def _split_settings(config: TrainConfig) -> tuple[list[list[str]], list[list[str]]]:
    """Returns [name, value, default] of each changed setting, and [name, value] of each unchanged setting."""
    defaults = {f.name: f.default for f in fields(config)}
    changed, unchanged = [], []
    for name, setting in SETTINGS.items():
        if setting.field not in defaults or setting.field in _ELSEWHERE:
            continue
        value, default = getattr(config, setting.field), defaults[setting.field]
        if default is MISSING:
            # The columns, which every training has.
            default = setting.default if setting.default is None else (setting.default,)
        if value == default:
            unchanged.append([name, _text(value)])
        else:
            changed.append([name, _text(value), _text(default)])
    return changed, sorted(unchanged)


def make(run: RunFacts) -> Sequence[Block]:
    config = run.config
    if config is None:
        return []
    changed, unchanged = _split_settings(config)
    note = (
        "As the ranks received them, with automatic values resolved. Settings that ranks do not need, such "
        "as names of output columns, are not in the run's folder."
    )
    header, words = ["setting", "value"] * SETTINGS_PER_ROW, frozenset(range(2 * SETTINGS_PER_ROW))
    return [
        Table(["setting", "value", "default"], changed, words=words, title="Changed settings", note=note),
        Table(header, _wrap(unchanged), words=words, title="Defaults"),
    ]


def _wrap(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Reshapes a long narrow table to fewer, wider rows; reading down the columns keeps the order."""
    height = -(-len(rows) // SETTINGS_PER_ROW)
    padded = [*rows, *([["", ""]] * (height * SETTINGS_PER_ROW - len(rows)))]
    return [[cell for row in padded[place::height] for cell in row] for place in range(height)]


def _text(value: Any) -> str:
    if value is None or value in ("", (), []):
        return "unset"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str) and value.startswith("{"):
        # The config holds a network's description as JSON text.
        with suppress(ValueError):
            value = {key: part for key, part in json.loads(value).items() if part not in ({}, None, "")}
    if isinstance(value, dict):
        return shorten(", ".join(f"{key}: {_inner(of_key)}" for key, of_key in value.items()), 400)
    if isinstance(value, list | tuple):
        return shorten(", ".join(map(_inner, value)), 400)
    return shorten(str(value), 400)


def _inner(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
