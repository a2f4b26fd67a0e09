"""Runs a function on several ranks of this machine, or on one rank in this process."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from ringspark.estimators.collectives import COLLECTIVES, Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.launch import local
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.training.phase import Status

# Many trainings here have metrics, and each rank would import this for 3 s.
local._PRELOADED.append("torchmetrics")

# Names of the collectives that connect several ranks.
GANGS = [name for name in COLLECTIVES if name != "local"]
# For tests that do not depend on the collective: `make test-all` adds the collectives besides torch.
# test_collectives.py and test_strategies.py always compare all collectives.
TORCH_AND_SLOW_OTHERS = [
    name if name == "torch" else pytest.param(name, marks=pytest.mark.slow) for name in GANGS
]

# Work of a rank; returns a JSON value.
RankWork = Callable[[Collective], Any]


def run_ranks(
    size: int,
    collective: str,
    work: RankWork,
    *,
    hosts: Sequence[str] | None = None,
    timeout_seconds: float = 120.0,
) -> list[Any]:
    """Runs `work` on new processes; returns its values by rank."""
    texts = run_spawned(
        size, collective, partial(_as_text, work), hosts=hosts, timeout_seconds=timeout_seconds
    )
    return [json.loads(text) for text in texts]


def run_one(work: RankWork) -> Any:
    return json.loads(json.dumps(work(LocalCollective())))


def _as_text(work: RankWork, collective: Collective, device: str, status: Status) -> str:
    return json.dumps(work(collective))
