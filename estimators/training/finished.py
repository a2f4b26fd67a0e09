"""The record of a finished run, as `result.json` holds it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ringspark.estimators.training.worker import TrainResult


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The record of a finished run: the result of rank 0, and why its workers were started again."""

    result: TrainResult
    restarts: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))
