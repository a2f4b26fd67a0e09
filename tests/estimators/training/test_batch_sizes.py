"""Batch size schedules and scaled learning rates: their arithmetic, and trainings against plain loops."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity import assert_equal_states, records_of
from small_training import Runs, columns_of, train_on_one_gang, weights_of
from torch import nn
from torch.optim import lr_scheduler

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.options.scaling import ScaleLearningRate
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.batch_sizes import BatchSizes, Steps
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.history import TrainingProgress, read_progress
from ringspark.estimators.training.optimizers.rate_scaling import RateScaling
from ringspark.estimators.training.optimizers.schedules import make_rates
from ringspark.estimators.training.row_caching import find_cached_rows
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult, train_worker
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest, open_reader

ROWS = 90
# Steps per epoch for 90 rows: 6, 6, 4, 4 and 2.
SCHEDULE = ((3, 24), (5, 50))
STEPS = [6, 6, 4, 4, 2]
SIZES = [16, 16, 24, 24, 50]
SETTINGS = {
    "batch_size": 16,
    "batch_size_schedule": SCHEDULE,
    "epochs": 5,
    "learning_rate": 0.004,
    "optimizer": "momentum",
}
LINEAR = ScaleLearningRate(base_batch_size=8, warmup_epochs=1.5)
SQRT = ScaleLearningRate(base_batch_size=64, rule="sqrt")

pytestmark = pytest.mark.usefixtures("one_thread")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def data(runs: Runs) -> ShardManifest:
    """Writes one file, because several files would have random names and thus a random order."""
    return runs.shards(ROWS, row_group_rows=20, num_files=1)


@given(
    first=st.integers(1, 50),
    changes=st.dictionaries(st.integers(2, 12), st.integers(1, 50), max_size=4),
    epochs=st.integers(1, 10),
    rows=st.integers(1, 200),
    part=st.floats(0, 0.999),
)
def test_steps_are_those_that_one_counts(
    first: int, changes: dict[int, int], epochs: int, rows: int, part: float
) -> None:
    sizes = [first] * epochs
    for epoch in sorted(changes):
        sizes[epoch - 1 :] = [changes[epoch]] * max(0, epochs - epoch + 1)
    batches = BatchSizes.of(first, sorted(changes.items()), epochs)
    steps = Steps(batches, rows)
    counts = [math.ceil(rows / size) for size in sizes]
    assert [batches.size(epoch) for epoch in range(epochs)] == sizes
    assert (batches.largest, batches.smallest) == (max(sizes), min(sizes))
    assert [steps.in_epoch(epoch) for epoch in range(epochs)] == counts
    assert [steps.before(n) for n in range(epochs + 1)] == [sum(counts[:n]) for n in range(epochs + 1)]
    assert steps.total == sum(counts)
    owners = [epoch for epoch, count in enumerate(counts) for _ in range(count)]
    assert [steps.epoch_of(step) for step in range(steps.total)] == owners
    assert steps.after(part) == round(part * counts[0])
    twice = batches.twice_each()
    # Every size occurs, and twice if it has at least two epochs.
    assert {sizes[epoch] for epoch in twice} == set(sizes)
    assert len(twice) == len(set(twice)) >= min(2, epochs)


def _rate_factors(scaling: ScaleLearningRate, course: Callable[[int, int], float]) -> list[float]:
    """Returns the factor on the base rate for every step, written from the papers."""
    rule = {"linear": lambda k: k, "sqrt": lambda k: k**0.5}[scaling.rule]
    warmup = round(scaling.warmup_epochs * STEPS[0])  # the warm-up ends within epochs of equal batch size
    found, total = [], sum(STEPS)
    owners = [epoch for epoch, count in enumerate(STEPS) for _ in range(count)]
    for step, epoch in enumerate(owners):
        full = rule(SIZES[epoch] / scaling.base_batch_size)
        share = min(1.0, step / warmup) if warmup else 1.0
        found.append((1 + (full - 1) * share) * course(max(0, step - warmup), total - warmup))
    return found


def _constant(step: int, num_steps: int) -> float:
    return 1.0


def _falls(step: int, num_steps: int) -> float:
    return 1 - step / (2 * num_steps)


COURSES: dict[str, tuple[Any, Callable[[int, int], float]]] = {
    "constant": ("constant", _constant),
    "cosine": ("cosine", lambda step, num_steps: 0.5 * (1 + math.cos(math.pi * step / num_steps))),
    "callable": (_falls, _falls),
    "torch scheduler": (partial(lr_scheduler.ExponentialLR, gamma=0.9), lambda step, num_steps: 0.9**step),
}

STEADY = Steps(BatchSizes.of(32, (), 3), 160)


def test_the_first_steps_rise_from_the_rate_itself_to_the_scaled_one() -> None:
    """Goyal et al. 2017: rises linearly from the rate of the small batch."""
    scaling = RateScaling.of(ScaleLearningRate(base_batch_size=8, warmup_epochs=0.6), STEADY)
    assert scaling is not None
    assert [scaling.factor(step) for step in range(5)] == pytest.approx([1, 2, 3, 4, 4])
    assert str(scaling) == (
        "learning rates are scaled (linear from a batch of 8): times 4 from epoch 1 on (batches of 32), "
        "after a rise from 1 over 3 steps"
    )


def test_warmup_steps_rise_from_zero_to_the_scaled_rate() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scaling = RateScaling.of(ScaleLearningRate(base_batch_size=8, warmup_epochs=0.0), STEADY)
    rates, seen = make_rates("constant", optimizer, STEADY.total, 3, scaling), []
    for step in range(5):
        rates.set(step)
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([1, 2, 3, 4, 4])


class Watches(Callback):
    """Records the rates and the number of steps; raises after step `at`."""

    belongs_to_rank = True  # is not copied for a training in this process

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.rates: list[list[float]] = []
        self.num_steps = 0

    def on_step_end(self, state: TrainingState) -> None:
        self.rates.append([group["lr"] for group in state.optimizer.param_groups])
        self.num_steps = state.num_steps
        if state.step == self.at:
            raise RuntimeError("stopped")


def by_hand(factors: list[float]) -> torch.Tensor:
    """Trains in a plain loop over the rows in order, a factor on the rates per step; returns the weights."""
    x, y = map(torch.from_numpy, columns_of(ROWS).values())
    network, bases, steps = net(), [0.002, 0.004], iter(factors)
    groups = [{"params": network[i].parameters()} for i in (0, 2)]  # type: ignore[index]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    for size in SIZES:
        for rows, labels in zip(x.split(size), y.split(size), strict=True):
            factor = next(steps)
            for group, base in zip(optimizer.param_groups, bases, strict=True):
                group["lr"] = base * factor
            optimizer.zero_grad()
            nn.functional.mse_loss(network(rows).squeeze(1), labels).backward()
            optimizer.step()
    assert next(steps, None) is None
    return torch.cat([p.detach().flatten() for p in network.parameters()])


@pytest.mark.parametrize("scaling", [None, LINEAR, SQRT], ids=["unscaled", "linear", "sqrt"])
@pytest.mark.parametrize("name", COURSES)
def test_a_training_is_the_loop_by_hand(runs: Runs, name: str, scaling: ScaleLearningRate | None) -> None:
    spec, course = COURSES[name]
    is_named, watches, total = isinstance(spec, str), Watches(), sum(STEPS)
    result = runs.here(
        data(runs),
        UserObjects(module=net(), lr_schedule=None if is_named else spec, callbacks=(watches,)),
        shuffle=False,
        parameter_groups=({"params": ["0.*"], "learningRate": 0.002},),
        gradient_accumulation=3,
        lr_schedule=spec if is_named else "constant",
        scale_learning_rate=scaling,
    )
    weights = weights_of(result, net())
    plain = [course(step, total) for step in range(total)]
    factors = _rate_factors(scaling, course) if scaling else plain
    assert watches.rates == [pytest.approx([0.002 * f, 0.004 * f]) for f in factors]
    torch.testing.assert_close(weights, by_hand(factors), rtol=0, atol=1e-6)
    assert not torch.allclose(weights, by_hand([1.0] * total), atol=1e-5) or name == "constant"
    # The history reports the sizes and steps that were used.
    assert [record.batch_size for record in result.history] == SIZES
    assert [record.steps for record in result.history] == STEPS
    assert [record.rows for record in result.history] == [ROWS] * 5
    assert (result.steps, result.rows, watches.num_steps) == (total, 5 * ROWS, total)
    last_steps = np.cumsum(STEPS) - 1
    assert [r.learning_rate for r in result.history] == [watches.rates[step][0] for step in last_steps]
    progress = read_progress(result.run_uri)
    assert progress == TrainingProgress(**vars(progress))
    assert progress.num_steps == total


def test_an_own_optimizer_has_the_rates_of_its_groups_scaled(runs: Runs) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        groups = [{"params": parameters[:2], "lr": 0.001}, {"params": parameters[2:], "lr": 0.003}]
        return torch.optim.SGD(groups)

    objects = UserObjects(module=net(), optimizer=optimizer, callbacks=(watches := Watches(),))
    runs.here(data(runs), objects, scale_learning_rate=LINEAR)
    expected = _rate_factors(LINEAR, _constant)
    assert watches.rates == [pytest.approx([0.001 * f, 0.003 * f]) for f in expected]


def _objects(at: int | None = None) -> UserObjects:
    return UserObjects(module=net(), callbacks=(Watches(at),))


def _stopped(config: TrainConfig, at: int) -> None:
    with pytest.raises(RuntimeError, match="stopped"):
        train_here(config, _objects(at))


def _assert_same(result: TrainResult, expected: TrainResult) -> None:
    assert_equal_states(result, expected)
    assert records_of(result) == records_of(expected)
    assert result.steps == expected.steps


def test_a_run_goes_on_from_any_step_of_any_size(runs: Runs) -> None:
    changes = {"scale_learning_rate": LINEAR, "lr_schedule": "cosine", "optimizer": "adamw"}
    expected = runs.here(manifest := data(runs), _objects(), **changes)
    # Failures in the first size; in its last step; at the end of its last epoch; in the second; in the third.
    for steps, attempts in (
        (2, {5: 4, 11: 10, 13: 12, 15: 14, 22: 20}),
        (1, {4: 3, 12: 11, 14: 13, 21: 20}),
    ):
        each = {"checkpoint_every_steps": steps, "checkpoint_every_epochs": 1}
        config = runs.config(manifest, **each, **changes)
        for at in attempts:
            _stopped(config, at)
        result = train_here(config, _objects())
        assert result.resumed_steps == tuple(attempts.values())
        _assert_same(result, expected)


def test_pauses_where_the_size_changes_are_one_training(runs: Runs) -> None:
    """Population-based training pauses this way: each round ends with a checkpoint."""
    changes = {"scale_learning_rate": SQRT, "lr_schedule": "linear"}
    expected = runs.here(manifest := data(runs), _objects(), **changes)
    for pause in (2, 4, None):
        config = runs.config(manifest, run="paused", pause_after=pause, collective="local", **changes)
        result = train_worker(config, LocalCollective(), _objects())
    assert result.resumed_steps == (12, 20)
    _assert_same(result, expected)


def test_a_bad_step_of_a_later_size_is_rolled_back(runs: Runs) -> None:
    class Spoils(Callback):
        """Makes the next step infinite, once, in the third epoch."""

        done = False

        def on_step_end(self, state: TrainingState) -> None:
            if state.step == 14 and not self.done:
                self.done = True
                with torch.no_grad():
                    next(state.module.parameters()).fill_(math.inf)

    changes = {"on_non_finite": "rollback", "checkpoint_every_steps": 4, "learning_rate": 0.001}
    result = runs.here(data(runs), UserObjects(module=net(), callbacks=(Spoils(),)), **changes)
    assert [found.action for found in result.non_finite] == ["rolled back"]
    assert (result.steps, [record.batch_size for record in result.history]) == (sum(STEPS), SIZES)


def test_a_checkpoint_of_another_schedule_is_refused(runs: Runs) -> None:
    config = runs.config(data(runs), checkpoint_every_steps=1)
    _stopped(config, 14)
    for schedule, message in (
        ((3, 30), "with 4 steps per epoch, this training has 3; give the same data"),
        # This epoch keeps its number of steps; an earlier epoch does not.
        ((2, 24), "12 steps before epoch 3, this training has 10; give the same batchS"),
    ):
        with pytest.raises(ValueError, match=message):
            train_here(replace(config, batch_size_schedule=(schedule,)), _objects())
    # Later changes do not affect finished steps; only the run's identity checks them.
    assert train_here(replace(config, batch_size_schedule=((3, 24), (5, 90))), _objects()).steps == 21


def test_two_ranks_are_one_and_either_goes_on_with_the_other_s(runs: Runs, collective: str) -> None:
    manifest, gang = data(runs), {"num_workers": 2, "collective": collective}
    cases: dict[str, dict[str, Any]] = {
        "shuffled": {},
        "in order": {"shuffle": False, "cache": "memory"},
        "accumulated": {"gradient_accumulation": 3},
        "zero": {"sync": Zero(stage=2)},
    }
    shared = {"scale_learning_rate": LINEAR, "lr_schedule": "cosine"}
    alone = {name: runs.here(manifest, _objects(), **shared, **case) for name, case in cases.items()}
    trainings = {
        name: (runs.config(manifest, **shared, **gang, **case), _objects()) for name, case in cases.items()
    }
    # Stops in the third epoch, the first one with the second batch size.
    every = {"checkpoint_every_steps": 2}
    begun, to_begin = (runs.config(manifest, **every, **shared, **gang) for _ in range(2))
    _stopped(begun, 15)
    trainings |= {"begun": (begun, _objects()), "to begin": (to_begin, _objects(15))}
    results = train_on_one_gang(trainings)[0]
    assert results["to begin"] == "RuntimeError: stopped"
    results["to begin"] = train_here(to_begin, _objects())
    assert results["begun"].resumed_steps == results["to begin"].resumed_steps == (14,)
    for name, result in results.items():
        assert_equal_states(result, alone.get(name, alone["shuffled"]), bound=1e-6)
        assert [record.batch_size for record in result.history] == SIZES


@pytest.mark.parametrize("shuffle", [True, False])
def test_kept_row_groups_are_those_that_a_shard_reads_twice(runs: Runs, shuffle: bool) -> None:
    """Without shuffling, the rows of a shard depend on the batch size, and so do its row groups."""
    manifest = runs.shards(ROWS, row_group_rows=4, num_files=1)
    config = runs.config(manifest, shuffle=shuffle, batch_size_schedule=((2, 40), (4, 80)))
    constant = replace(config, batch_size_schedule=())
    for rank in range(3):
        reader = open_reader(
            manifest, ["x"], rank, 3, config.batch_sizes.size, shuffle=shuffle, engine="arrow"
        )
        times = np.zeros(len(manifest.row_groups), dtype=int)
        for epoch in range(config.epochs):
            times[np.unique(reader.plan(epoch).shard(rank).reads().row_groups)] += 1
        expected = set(np.flatnonzero(times >= 2).tolist())
        assert find_cached_rows(config, manifest, "train", rank, 3).row_groups == expected
        assert expected
        if not shuffle:
            assert find_cached_rows(constant, manifest, "train", rank, 3).row_groups != expected


@pytest.mark.extras
def test_a_budget_counts_the_largest_batch(runs: Runs) -> None:
    from ringspark.extras.planning.memory.plan import check_budget

    manifest = data(runs)
    model = ModelSpec("mlp", {"in_features": 4, "hidden": [64] * 4, "out_features": 1})

    def check(**changes: Any) -> None:
        check_budget(runs.check(manifest, model=model, **changes), UserObjects(), manifest, 1 << 20)

    check()
    with pytest.raises(ValueError, match=r"training needs .* memoryBudget is 1.0 MiB; gradientAccumulation="):
        check(batch_size_schedule=((5, 4096),))
    # The schedule never reaches that epoch.
    check(batch_size_schedule=((6, 4096),))
