"""Settings of the last launch, next to their defaults from the table that declares all settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from typing import Any

from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.extras.report.content import Block, Table, Text, shorten
from ringspark.extras.report.facts import RunFacts


def make(run: RunFacts) -> Sequence[Block]:
    if run.config is None:
        return []
    changed, unchanged = [], []
    known = {field.name: field.default for field in fields(run.config) if field.name != "run_uri"}
    for name, setting in SETTINGS.items():
        if setting.field not in known:
            continue
        value, default = getattr(run.config, setting.field), known[setting.field]
        if default is MISSING:
            # The columns, which every training has.
            default = setting.default if setting.default is None else (setting.default,)
        if value == default:
            unchanged.append(f"{name}: {_text(value)}")
        else:
            changed.append([name, _text(value), _text(default)])
    note = (
        "As the ranks received them, with automatic values resolved. Settings that ranks do not need, such "
        "as names of output columns, are not in the run's folder."
    )
    header, words = ["setting", "value", "default"], frozenset({0, 1, 2})
    return [
        Table(header, changed, words=words, title="Changed settings", note=note),
        Text(f"At their defaults: {'; '.join(sorted(unchanged))}."),
    ]


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
