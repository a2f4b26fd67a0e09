"""The trials of a search as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from ringspark.extras.search.objective import Objective

SECONDS = "seconds"
EPOCHS = "epochs"
REASON = "reason"


def rows_of(study: Any, objective: Objective) -> list[dict[str, Any]]:
    def value_of(trial: Any) -> float | None:
        if trial.value is None:
            return None
        return objective.turn(trial.value) if trial.state.name == "PRUNED" else float(trial.value)

    return [
        {
            "number": trial.number,
            "state": "failed" if trial.state.name == "FAIL" else trial.state.name.lower(),
            "value": value_of(trial),
            "params": dict(trial.params),
            SECONDS: float(trial.user_attrs.get(SECONDS, 0.0)),
            EPOCHS: int(trial.user_attrs.get(EPOCHS, 0)),
            REASON: str(trial.user_attrs.get(REASON, "")),
        }
        for trial in study.get_trials(deepcopy=False)
    ]


def table_of(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Returns a table with a line per row; "params" becomes one column per parameter."""
    names = list(dict.fromkeys(name for row in rows for name in row["params"]))
    lines = []
    for row in rows:
        line: dict[str, Any] = {}
        for key, value in row.items():
            line |= {name: value.get(name) for name in names} if key == "params" else {key: value}
        lines.append(line)
    return pd.DataFrame(lines)


def in_words(values: dict[str, Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, list, dict, type(None))
    return {name: value if isinstance(value, plain) else repr(value) for name, value in values.items()}
