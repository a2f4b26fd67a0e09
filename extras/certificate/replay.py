"""Trains an interval of a run again, from one checkpoint to the next, in a new folder.

The replay is an ordinary resumed training: `train_worker` reads the run's shards with the claimed settings,
and writes a checkpoint at the step where the run wrote its next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ringspark.estimators import run_layout, user_code
from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.failures import WorkerError
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.training.checkpoint.folders import checkpoints_uri, copy_checkpoint, step_uri
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult, train_worker
from ringspark.extras.certificate.chain import Link
from ringspark.extras.certificate.claimed_run import ClaimedRun
from ringspark.pipelines import storage

_UNUSED: dict[str, Any] = {
    "timeline_every_steps": None,
    "profile_steps": None,
    "checkpoint_every_seconds": 0.0,
    "checkpoint_every_epochs": None,
    "checkpoint_every_steps": None,
    "certify": False,
}


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An interval to train again.

    Attributes:
        first: Step of the checkpoint to start from; None for the initial weights.
        last: Link of the checkpoint that the replay writes, or of the final weights.
        claims: Claims of the start that trained the interval.
    """

    first: int | None
    last: Link
    claims: dict[str, Any]

    @property
    def name(self) -> str:
        if self.last.kind == "end":
            return "final weights"
        return "initial weights" if self.first is None else f"steps {self.first} to {self.last.step}"


def list_intervals(run: ClaimedRun) -> list[Interval]:
    """Returns the intervals between two checkpoints."""
    links = run.checkpoints
    return [
        Interval(first=left.step, last=right, claims=run.claims(right.step))
        for left, right in pairwise(links)
    ]


def find_final(run: ClaimedRun, end: Link) -> Interval:
    """Returns the end of the training.

    The weights of the best epoch were written at its end, which may be within an earlier interval.
    """
    steps = [link.step for link in run.checkpoints]
    if end.content["folder"].startswith(f"{run_layout.BEST}-"):
        steps = [step for step in steps if step < end.step] or steps[:1]
    return Interval(first=steps[-1], last=end, claims=run.claims(end.step))


def make_config(run: ClaimedRun, interval: Interval, workers: int, folder: str) -> TrainConfig:
    """Returns the claimed settings, changed so that the training ends at the end of the interval."""
    config = replace(run.config(interval.claims, folder), **_UNUSED)
    if workers != config.num_workers:
        mesh = replace(config.parallelism, data=None)
        config = replace(config, num_workers=workers, parallelism=mesh, collective="torch")
    if workers == 1:
        config = replace(config, collective="local")
    if interval.last.kind == "end":
        # Nothing is left to train, except up to the end of the best epoch.
        best = interval.last.content["folder"].removeprefix(f"{run_layout.BEST}-")
        pause = int(best) if best.isdecimal() else None
        return replace(config, keep_training_state=True, pause_after=pause)
    if interval.first is None:
        return replace(config, certify=True, pause_after=0)
    # The interval was trained in the claimed time; a replay may be slower.
    config = replace(config, time_budget_seconds=None)
    position = run.records[interval.last.step].position
    # The next checkpoint after the start of the interval is then the one at this step.
    config = replace(config, checkpoint_every_steps=position.step)
    if position.step_in_epoch:
        return replace(config, pause_after_step=position.step)
    return replace(config, pause_after=position.finished_epochs)


def replay(
    run: ClaimedRun, interval: Interval, workers: int, objects: UserObjects, folder: str, device: str = "cpu"
) -> str:
    """Trains an interval again; returns the folder of its checkpoint or of the final weights.

    Raises RuntimeError if the training fails or ends elsewhere.
    """
    config = make_config(run, interval, workers, folder)
    if interval.first is not None:
        copy_checkpoint(checkpoints_uri(run.uri), checkpoints_uri(folder), interval.first)
    threads = interval.claims["platform"]["threads"]
    try:
        work = partial(_train, config, user_code.dumps(objects), threads)
        if workers == 1:
            text = work(LocalCollective(), device, Status())
        else:
            text = run_spawned(workers, config.collective, work, timeout_seconds=config.timeout_seconds)[0]
    except WorkerError as error:
        raise RuntimeError(str(error)) from error
    except Exception as error:  # the user's code may raise any exception
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    result = TrainResult.from_json(text)
    if interval.last.kind == "end":
        return result.checkpoint_uri
    uri = step_uri(checkpoints_uri(folder), interval.last.step)
    if not storage.exists(uri):
        raise RuntimeError("; ".join([f"it ended at step {result.steps}", *result.checkpoint_errors]))
    return uri


def _train(
    config: TrainConfig, objects: bytes, threads: int, collective: Collective, device: str, status: Status
) -> str:
    # The number of threads decides the order of sums.
    with _use_threads(threads):
        return train_worker(config, collective, user_code.loads(objects), device, status).to_json()


@contextmanager
def _use_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
