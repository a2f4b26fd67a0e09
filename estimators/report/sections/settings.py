"""The settings of the last start beside their defaults, from the one table that declares them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ringspark.estimators.report.content import Block, Section, Table, shorten
from ringspark.estimators.report.facts import Facts
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.settings.table import SETTINGS


def differing(config: TrainConfig) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """Returns the settings that differ from their defaults, and the others: name -> (value, default)."""
    changed: dict[str, tuple[Any, Any]] = {}
    others: dict[str, tuple[Any, Any]] = {}
    for name, setting in sorted(SETTINGS.items()):
        if not setting.field or not hasattr(config, setting.field):
            continue
        value, default = getattr(config, setting.field), setting.default
        default = tuple(default) if isinstance(default, list) else default
        (others if value == default else changed)[name] = (value, default)
    return changed, others


def _make(facts: Facts) -> Sequence[Block]:
    config = facts.run.config
    if config is None:
        return []
    changed, others = differing(config)
    fixed = [
        ["network", shorten(_network(config), 300), ""],
        ["inputs", shorten(", ".join(config.input_columns), 300), ""],
        ["labels", ", ".join(config.label_columns), ""],
        ["losses", ", ".join(config.losses), ""],
    ]
    if config.weight_column:
        fixed.append(["weights of the rows", config.weight_column, ""])
    rows = [[name, _text(value), _text(default)] for name, (value, default) in changed.items()]
    rest = [[name, _text(value), ""] for name, (value, _) in others.items()]
    words = frozenset({0, 1, 2})
    return [
        Table(
            ["setting", "value", "default"],
            [*fixed, *rows],
            words=words,
            title="Chosen",
            note="What ranks need not know, such as names of output columns, is not in the run's folder.",
        ),
        Table(["setting", "value"], [row[:2] for row in rest], words=words, title="At their defaults"),
    ]


def _network(config: TrainConfig) -> str:
    if config.model is None:
        return "a module of the user's own"
    spec = json.loads(config.model)
    return ", ".join(f"{key}: {_text(value)}" for key, value in spec.items() if value not in ({}, None, ""))


def _text(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict | list | tuple):
        return shorten(json.dumps(value, default=str), 200)
    return shorten(str(value), 200)


SECTION = Section(name="settings", title="Settings", make=_make)
