"""The record of a finished run, as `result.json` holds it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ringspark.estimators.training.worker import TrainResult


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The record of a finished run.

    Attributes:
        result: The result of rank 0.
        restarts: Why the workers were started again, one line each.
        parallelism: How the workers shared the network: see `settings.parallelism`.
    """

    result: TrainResult
    restarts: tuple[str, ...] = ()
    parallelism: dict[str, Any] = field(default_factory=dict, metadata={"added": True})

    def to_json(self) -> str:
        return json.dumps(asdict(self))
