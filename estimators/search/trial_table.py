"""The trials of a search as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

SECONDS = "seconds"
EPOCHS = "epochs"
REASON = "reason"
_STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}


def rows_of(study: Any) -> list[dict[str, Any]]:
    """Returns one entry per trial, in JSON's types."""
    return [
        {
            "number": trial.number,
            "state": _STATES.get(trial.state.name, trial.state.name.lower()),
            "value": None if trial.value is None else float(trial.value),
            "params": dict(trial.params),
            SECONDS: float(trial.user_attrs.get(SECONDS, 0.0)),
            EPOCHS: int(trial.user_attrs.get(EPOCHS, 0)),
            REASON: str(trial.user_attrs.get(REASON, "")),
        }
        for trial in study.get_trials(deepcopy=False)
    ]


def table_of(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Returns the table: a line per trial, a column per parameter."""
    names = list(dict.fromkeys(name for row in rows for name in row["params"]))
    lines = [
        {
            "number": row["number"],
            "state": row["state"],
            "value": row["value"],
            **{name: row["params"].get(name) for name in names},
            SECONDS: row[SECONDS],
            EPOCHS: row[EPOCHS],
            REASON: row[REASON],
        }
        for row in rows
    ]
    return pd.DataFrame(lines)
