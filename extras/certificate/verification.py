"""Checks a run's certificate, and replays random intervals of its training."""

from __future__ import annotations

import math
import os
import random
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

from ringspark.estimators.stages.model_params import _EstimatorParams
from ringspark.estimators.stages.to_config import config_of
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.certificate.chain import read_chain
from ringspark.extras.certificate.claimed_run import Check, ClaimedRun, check_claims, describe_unknown_start
from ringspark.extras.certificate.claims import describe_platform
from ringspark.extras.certificate.compare import (
    Difference,
    compare_bitwise,
    compare_roughly,
    compare_weights,
    draws_random_numbers,
)
from ringspark.extras.certificate.recorder import digest_weights
from ringspark.extras.certificate.replay import Interval, find_final, list_intervals, replay
from ringspark.models import ModelSpec
from ringspark.pipelines import storage

# Largest distance of the weights on other versions or numbers of workers, as a share of their change.
TOLERANCE = 0.01
_SHOWN_FORGED = (1, 2, 5)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of `verify_run`.

    Attributes:
        checks: Checks of signature, chain, files, data and code.
        replays: The replays; they are empty if a check failed, because they would read wrong files.
        num_intervals: Number of intervals between two checkpoints of the chain.
        num_drawn: Number of intervals that were drawn and replayed.
    """

    run_uri: str
    checks: tuple[Check, ...]
    replays: tuple[Check, ...]
    num_intervals: int
    num_drawn: int

    @property
    def problems(self) -> list[str]:
        """One sentence per claim that does not hold."""
        return [check.problem for check in (*self.checks, *self.replays) if check.problem]

    @property
    def holds(self) -> bool:
        return not self.problems

    def probability(self, forged: int = 1) -> float:
        """Returns the probability that the drawn intervals hit one of `forged` forged intervals."""
        return find_probability(self.num_intervals, forged, self.num_drawn)

    def table(self) -> str:
        """Returns the checks, the replays and the probabilities as text."""
        rows = [*self.checks, *self.replays]
        width = max(len(check.name) for check in rows)
        lines = []
        for check in rows:
            state = "does not hold" if check.problem else "holds" if check.is_done else "not checked"
            lines.append(f"{check.name:{width}}  {state:13}  {check.note}".rstrip())
        lines.append(f"intervals replayed: {self.num_drawn} of {self.num_intervals}")
        for forged in _SHOWN_FORGED:
            if forged <= self.num_intervals:
                what = f"{forged} forged interval{'s' if forged > 1 else ''} of {self.num_intervals}"
                lines.append(f"probability of finding {what}: {self.probability(forged):.3f}")
        return "\n".join([*lines, *self.problems])


def find_probability(intervals: int, forged: int, replayed: int) -> float:
    """Returns the probability that `replayed` of `intervals`, drawn without repetition, hit a forged one.

    It is hypergeometric: 1 - C(n - f, m) / C(n, m). For one forged interval it is m / n.
    """
    if not 0 <= forged <= intervals or not 0 <= replayed <= intervals:
        raise ValueError(
            f"forged ({forged}) and replayed ({replayed}) must be from 0 to the number of intervals "
            f"({intervals}); lower them"
        )
    return 1.0 - math.comb(intervals - forged, replayed) / math.comb(intervals, replayed)


def verify_run(
    run: str | os.PathLike[str],
    model: Any = None,
    intervals: int | None = 20,
    *,
    workers: int | None = None,
    key: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    tolerance: float = TOLERANCE,
    device: str = "cpu",
) -> Verification:
    """Checks the certificate of a run, and replays random intervals of its training on this machine.

    Args:
        run: Local folder of a run that was trained with `certify=True`.
        model: The network with the user's functions, if the run's settings do not name them: an `nn.Module`,
            an estimator with all settings, `UserObjects`, or a function that returns one of them.
        intervals: Number of intervals to replay; None for all.
        workers: Number of ranks; by default the number of the training.
        key: Public EC key as a PEM file; None leaves the signature unchecked.
        seed: Seed of the draw, for tests; by default the operating system draws.
        tolerance: Largest distance of the weights, as a share of their change in the interval, if the replay
            has another number of workers or other versions than the training.
        device: Device of the replay.

    Raises:
        ValueError: The run has no certificate, or the replay needs another `model` or number of workers.
    """
    uri = storage.normalize(run)
    if not storage.is_local(uri):
        raise ValueError(f"a run is verified on local files, got {uri}; copy the run to a local folder")
    for name, number in (("intervals", intervals), ("workers", workers)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}; raise it")
    claimed = ClaimedRun(uri, read_chain(uri))
    if not claimed.checkpoints:
        raise ValueError(f"the hash chain of {uri} has no checkpoint; verify the run after its first one")
    objects = _find_objects(model, claimed.config(claimed.claims(claimed.checkpoints[-1].step)))
    checks = tuple(check_claims(claimed, objects, key))
    all_intervals = list_intervals(claimed)
    count = len(all_intervals) if intervals is None else min(intervals, len(all_intervals))
    replays: list[Check] = []
    if not any(check.problem for check in checks):
        draw = random.SystemRandom() if seed is None else random.Random(seed)
        drawn = draw.sample(all_intervals, count)
        for interval in drawn:
            _check_workers(claimed, interval, workers)
        unknown = describe_unknown_start(claimed, objects)
        if not unknown:
            first = Interval(first=None, last=claimed.checkpoints[0], claims=claimed.claims(0))
            drawn.insert(0, first)
        else:
            replays.append(Check(name="initial weights", is_done=False, note=unknown))
        if claimed.end is not None:
            drawn.append(find_final(claimed, claimed.end))
        replays += [
            check_interval(claimed, interval, objects, workers, tolerance, device) for interval in drawn
        ]
    return Verification(
        run_uri=uri,
        checks=checks,
        replays=tuple(replays),
        num_intervals=len(all_intervals),
        num_drawn=count if replays else 0,
    )


def _find_objects(model: Any, config: TrainConfig) -> UserObjects:
    """Returns the objects in `model`. A run does not store them, because loading them would run its code."""
    if callable(model) and not isinstance(model, torch.nn.Module | _EstimatorParams):
        model = model()
    if isinstance(model, _EstimatorParams):
        return config_of(model, config.task, config.label_columns)[1]
    if isinstance(model, ModelSpec):
        model = None
    objects = model if isinstance(model, UserObjects) else UserObjects(module=model)
    if config.model is None and objects.module is None:
        raise ValueError(
            "the run trained a module of the user, and a run holds no code; give model=, or --model "
            "package.module:name, a module, an estimator, or a function that returns one"
        )
    return objects


def check_interval(
    run: ClaimedRun,
    interval: Interval,
    objects: UserObjects,
    workers: int | None = None,
    tolerance: float = TOLERANCE,
    device: str = "cpu",
) -> Check:
    """Replays an interval and compares the result with the claimed one."""
    claimed_workers = interval.claims["config"]["num_workers"]
    workers = workers or claimed_workers
    claimed_platform = interval.claims["platform"]
    platform = describe_platform(torch.device(device)) | {"threads": claimed_platform["threads"]}
    # The kernels of a GPU may add numbers in any order.
    is_exact = workers == claimed_workers and platform == claimed_platform and platform["device"] == "cpu"
    is_end = interval.last.kind == "end"
    with tempfile.TemporaryDirectory(prefix="ringspark-verify-") as folder:
        try:
            found = replay(run, interval, workers, objects, folder, device)
        except RuntimeError as error:
            problem = f"The claim of {interval.name} cannot be checked: training again failed: {error}."
            return Check(name=interval.name, problem=problem)
        if is_end and is_exact:
            same = digest_weights(found) == interval.last.content["files"]
            difference = Difference(text="" if same else "other weights")
        elif is_end:
            assert interval.first is not None
            own = storage.join(run.uri, interval.last.content["folder"])
            difference = compare_weights(run.checkpoint_uri(interval.first), own, found, tolerance)
        else:
            claimed = run.checkpoint_uri(interval.last.step)
            start = claimed if interval.first is None else run.checkpoint_uri(interval.first)
            if is_exact:
                difference = compare_bitwise(start, claimed, found, run.config(interval.claims))
            else:
                difference = compare_roughly(start, claimed, found, tolerance)
    note = "equal to the bit" if is_exact else f"distance {difference.distance:.2g} of the change"
    problem = ""
    if difference.text:
        problem = f"The claim of {interval.name} does not hold: training again gives {difference.text}."
    return Check(name=interval.name, problem=problem, note="" if problem else note)


def _check_workers(run: ClaimedRun, interval: Interval, workers: int | None) -> None:
    claimed = interval.claims["config"]["num_workers"]
    if workers in (None, claimed):
        return
    assert interval.first is not None
    uris = [run.checkpoint_uri(step) for step in (interval.first, interval.last.step)]
    if draws_random_numbers(*uris):
        raise ValueError(
            f"the training draws random numbers, as dropout does, and each of its {claimed} workers has its "
            f"own, so {workers} workers cannot repeat it; leave workers unset"
        )
