"""Batch size schedules and scaled learning rates: their arithmetic, and trainings against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_training
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn
from torch.optim import lr_scheduler

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.options.scaling import ScaleLearningRate
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.batch_sizes import BatchSizes, Steps
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.history import TrainingProgress, read_progress
from ringspark.estimators.training.optimizers.rate_scaling import RULES, RateScaling
from ringspark.estimators.training.optimizers.schedules import make_rates
from ringspark.estimators.training.row_caching import find_cached_rows
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult, train_worker
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest, open_reader

MakeShards = Callable[..., ShardManifest]
ROWS = 90
# Steps per epoch for 90 rows: 6, 6, 4, 4 and 2.
SCHEDULE = ((3, 24), (5, 50))
STEPS = [6, 6, 4, 4, 2]
SIZES = [16, 16, 24, 24, 50]
LINEAR = ScaleLearningRate(base_batch_size=8, warmup_epochs=1.5)
SQRT = ScaleLearningRate(base_batch_size=64, rule="sqrt")


pytestmark = pytest.mark.usefixtures("one_thread")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


config_of = partial(
    small_training.config_of,
    batch_size=16,
    batch_size_schedule=SCHEDULE,
    epochs=5,
    learning_rate=0.004,
    optimizer="momentum",
)


def columns() -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(1), "id": np.arange(ROWS, dtype=np.float32)}


def data(make_shards: MakeShards) -> ShardManifest:
    """Writes one file, because several files would have random names and thus a random order."""
    return make_shards(columns(), row_group_rows=20, num_files=1)


# ------------------------------------------------------------------------------- arithmetic


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
    assert [steps.before(epoch) for epoch in range(epochs + 1)] == [
        sum(counts[:n]) for n in range(epochs + 1)
    ]
    assert steps.total == sum(counts)
    owners = [epoch for epoch, count in enumerate(counts) for _ in range(count)]
    assert [steps.epoch_of(step) for step in range(steps.total)] == owners
    assert steps.after(part) == round(part * counts[0])
    twice = batches.twice_each()
    # Every size occurs, and twice if it has at least two epochs.
    assert {sizes[epoch] for epoch in twice} == set(sizes)
    assert len(twice) == len(set(twice)) >= min(2, epochs)


# ------------------------------------------------------------------------------------- rates


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


def _cosine(step: int, num_steps: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / num_steps))


def _falls(step: int, num_steps: int) -> float:
    return 1 - step / (2 * num_steps)


def _decays(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ExponentialLR(optimizer, 0.9)


COURSES: dict[str, tuple[Any, Callable[[int, int], float]]] = {
    "constant": ("constant", _constant),
    "cosine": ("cosine", _cosine),
    "callable": (_falls, _falls),
    "torch scheduler": (_decays, lambda step, num_steps: 0.9**step),
}


@pytest.mark.parametrize("scaling", [LINEAR, SQRT], ids=lambda scaling: scaling.rule)
@pytest.mark.parametrize("name", COURSES)
def test_rates_of_all_groups_are_the_closed_form(name: str, scaling: ScaleLearningRate) -> None:
    spec, course = COURSES[name]
    one, two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 0.5}, {"params": [two]}], lr=0.02)
    steps = Steps(BatchSizes.of(16, SCHEDULE, 5), ROWS)
    rates = make_rates(spec, optimizer, steps.total, 0, RateScaling.of(scaling, steps))
    expected = _rate_factors(scaling, course)
    # A resumed training jumps to a step.
    for step in (*range(steps.total), 3, 17):
        rates.set(step)
        found = [group["lr"] for group in optimizer.param_groups]
        assert found == pytest.approx([0.5 * expected[step], 0.02 * expected[step]])


def test_the_first_steps_rise_from_the_rate_itself_to_the_scaled_one() -> None:
    """Goyal et al. 2017: rises linearly from the rate of the small batch."""
    steps = Steps(BatchSizes.of(32, (), 3), 160)
    scaling = RateScaling.of(ScaleLearningRate(base_batch_size=8, warmup_epochs=0.6), steps)
    assert scaling is not None
    assert [scaling.factor(step) for step in range(5)] == pytest.approx([1, 2, 3, 4, 4])
    assert str(scaling) == (
        "learning rates are scaled (linear from a batch of 8): times 4 from epoch 1 on (batches of 32), "
        "after a rise from 1 over 3 steps"
    )


def test_warmup_steps_rise_from_zero_to_the_scaled_rate() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    steps = Steps(BatchSizes.of(32, (), 3), 160)
    scaling = RateScaling.of(ScaleLearningRate(base_batch_size=8, warmup_epochs=0.0), steps)
    rates, seen = make_rates("constant", optimizer, steps.total, 3, scaling), []
    for step in range(5):
        rates.set(step)
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([1, 2, 3, 4, 4])


def test_a_rise_that_leaves_no_step_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    steps = Steps(BatchSizes.of(50, (), 1), 100)
    scaling = RateScaling.of(ScaleLearningRate(base_batch_size=8, warmup_epochs=0.9), steps)
    with pytest.raises(ValueError, match=r"warmup_epochs must end before .* steps \(2\), got 2 steps; lower"):
        make_rates("constant", optimizer, steps.total, 0, scaling)


def test_every_rule_leaves_the_rate_of_its_own_batch_alone() -> None:
    assert [rule(1.0) for rule in RULES.values()] == [1.0] * len(RULES)


# --------------------------------------------------------------------------------- trainings


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


def by_hand(
    scaling: ScaleLearningRate | None, course: Callable[[int, int], float], accumulation: int = 1
) -> torch.Tensor:
    """Trains in a plain loop over the rows in order; returns the weights."""
    table = columns()
    x, y = torch.from_numpy(table["x"]), torch.from_numpy(table["y"])
    network = net()
    first = [*network[0].parameters()]  # type: ignore[index]
    rest = [*network[2].parameters()]  # type: ignore[index]
    optimizer = torch.optim.SGD(
        [{"params": first, "lr": 0.002}, {"params": rest, "lr": 0.004}], lr=1.0, momentum=0.9
    )
    bases = [0.002, 0.004]
    total = sum(STEPS)
    plain = [course(step, total) for step in range(total)]
    factors = iter(plain if scaling is None else _rate_factors(scaling, course))
    for size in SIZES:
        for rows, labels in zip(x.split(size), y.split(size), strict=True):
            factor = next(factors)
            for group, base in zip(optimizer.param_groups, bases, strict=True):
                group["lr"] = base * factor
            optimizer.zero_grad()
            nn.functional.mse_loss(network(rows).squeeze(1), labels).backward()
            optimizer.step()
    assert next(factors, None) is None
    return torch.cat([p.detach().flatten() for p in network.parameters()])


@pytest.mark.parametrize("scaling", [None, LINEAR, SQRT], ids=["unscaled", "linear", "sqrt"])
@pytest.mark.parametrize("name", COURSES)
def test_a_training_is_the_loop_by_hand(
    make_shards: MakeShards, tmp_path: Path, name: str, scaling: ScaleLearningRate | None
) -> None:
    spec, course = COURSES[name]
    watches = Watches()
    config = config_of(
        data(make_shards),
        tmp_path / "run",
        shuffle=False,
        parameter_groups=({"params": ["0.*"], "learningRate": 0.002},),
        gradient_accumulation=3,
        lr_schedule=spec if isinstance(spec, str) else "constant",
        scale_learning_rate=scaling,
    )
    objects = UserObjects(
        module=net(), lr_schedule=None if isinstance(spec, str) else spec, callbacks=(watches,)
    )
    result = train_here(config, objects)
    weights = small_training.weights_of(result, net())
    factors = (
        _rate_factors(scaling, course) if scaling else [course(s, sum(STEPS)) for s in range(sum(STEPS))]
    )
    assert watches.rates == [pytest.approx([0.002 * f, 0.004 * f]) for f in factors]
    torch.testing.assert_close(weights, by_hand(scaling, course), rtol=0, atol=1e-6)
    assert not torch.allclose(weights, by_hand(None, _constant), atol=1e-5) or name == "constant"
    # The history reports the sizes and steps that were used.
    assert [record.batch_size for record in result.history] == SIZES
    assert [record.steps for record in result.history] == STEPS
    assert [record.rows for record in result.history] == [ROWS] * 5
    assert (result.steps, result.rows, watches.num_steps) == (sum(STEPS), 5 * ROWS, sum(STEPS))
    last_steps = np.cumsum(STEPS) - 1
    assert [r.learning_rate for r in result.history] == [watches.rates[step][0] for step in last_steps]
    progress = read_progress(str(tmp_path / "run"))
    assert progress == TrainingProgress(**vars(progress))
    assert progress.num_steps == sum(STEPS)


def test_an_own_optimizer_has_the_rates_of_its_groups_scaled(make_shards: MakeShards, tmp_path: Path) -> None:
    watches = Watches()
    config = config_of(data(make_shards), tmp_path / "run", scale_learning_rate=LINEAR)
    train_here(
        config,
        UserObjects(
            module=net(),
            optimizer=lambda parameters: torch.optim.SGD(
                [{"params": parameters[:2], "lr": 0.001}, {"params": parameters[2:], "lr": 0.003}]
            ),
            callbacks=(watches,),
        ),
    )
    expected = _rate_factors(LINEAR, _constant)
    assert watches.rates == [pytest.approx([0.001 * f, 0.003 * f]) for f in expected]


def _stopped(config: TrainConfig, at: int) -> None:
    with pytest.raises(RuntimeError, match="stopped"):
        train_here(config, UserObjects(module=net(), callbacks=(Watches(at),)))


def _objects() -> UserObjects:
    return UserObjects(module=net(), callbacks=(Watches(),))


def _is_same(result: TrainResult, expected: TrainResult) -> bool:
    first, second = (small_training.weights_of(r, net()) for r in (result, expected))
    histories = [
        [replace(record, seconds=0.0, cost=None) for record in r.history] for r in (result, expected)
    ]
    return first.equal(second) and histories[0] == histories[1] and result.steps == expected.steps


def test_a_run_goes_on_from_any_step_of_any_size(make_shards: MakeShards, tmp_path: Path) -> None:
    manifest = data(make_shards)
    changes: dict[str, Any] = {"scale_learning_rate": LINEAR, "lr_schedule": "cosine", "optimizer": "adamw"}
    expected = train_here(config_of(manifest, tmp_path / "plain", **changes), _objects())
    # Failures in the first size; in its last step; at the end of its last epoch; in the second; in the third.
    for at, last in ((5, 4), (11, 10), (13, 12), (15, 14), (22, 20)):
        config = config_of(
            manifest,
            tmp_path / f"at-{at}",
            checkpoint_every_steps=2,
            checkpoint_every_epochs=1,
            **changes,
        )
        _stopped(config, at)
        result = train_here(config, _objects())
        assert result.resumed_steps == (last,)
        assert _is_same(result, expected), at
    # Every attempt resumes where the last one ended.
    config = config_of(manifest, tmp_path / "often", checkpoint_every_steps=1, **changes)
    for at in (4, 12, 14, 21):
        _stopped(config, at)
    result = train_here(config, _objects())
    assert result.resumed_steps == (3, 11, 13, 20)
    assert _is_same(result, expected)


def test_pauses_where_the_size_changes_are_one_training(make_shards: MakeShards, tmp_path: Path) -> None:
    """Population-based training pauses this way: each round ends with a checkpoint."""
    manifest = data(make_shards)
    changes: dict[str, Any] = {"scale_learning_rate": SQRT, "lr_schedule": "linear"}
    expected = train_here(config_of(manifest, tmp_path / "plain", **changes), _objects())
    for pause in (2, 4, None):
        config = config_of(manifest, tmp_path / "paused", pause_after=pause, collective="local", **changes)
        result = train_worker(config, LocalCollective(), _objects())
    assert result.resumed_steps == (12, 20)
    assert _is_same(result, expected)


def test_a_bad_step_of_a_later_size_is_rolled_back(make_shards: MakeShards, tmp_path: Path) -> None:
    manifest = data(make_shards)

    class Spoils(Callback):
        """Makes the next step infinite, once, in the third epoch."""

        done = False

        def on_step_end(self, state: TrainingState) -> None:
            if state.step == 14 and not self.done:
                self.done = True
                with torch.no_grad():
                    next(state.module.parameters()).fill_(math.inf)

    config = config_of(
        manifest, tmp_path / "run", on_non_finite="rollback", checkpoint_every_steps=4, learning_rate=0.001
    )
    result = train_here(config, UserObjects(module=net(), callbacks=(Spoils(),)))
    assert [found.action for found in result.non_finite] == ["rolled back"]
    assert (result.steps, [record.batch_size for record in result.history]) == (sum(STEPS), SIZES)


def test_a_checkpoint_of_another_schedule_is_refused(make_shards: MakeShards, tmp_path: Path) -> None:
    manifest = data(make_shards)
    config = config_of(manifest, tmp_path / "run", checkpoint_every_steps=1)
    _stopped(config, 14)
    with pytest.raises(ValueError, match=r"with 4 steps per epoch, this training has 3; give the same data"):
        train_here(replace(config, batch_size_schedule=((3, 30),)), _objects())
    # This epoch keeps its number of steps; an earlier epoch does not.
    with pytest.raises(
        ValueError, match=r"12 steps before epoch 3, this training has 10; give the same batchS"
    ):
        train_here(replace(config, batch_size_schedule=((2, 24),)), _objects())
    # Later changes do not affect finished steps; only the run's identity checks them.
    assert train_here(replace(config, batch_size_schedule=((3, 24), (5, 90))), _objects()).steps == 21


def _gang(
    configs: dict[str, TrainConfig],
    begun: TrainConfig,
    to_begin: TrainConfig,
    collective: Collective,
) -> Any:
    """Trains on two ranks; resumes a run of one rank, and starts a run for one rank to resume."""
    found = {
        name: train_worker(config, collective, deepcopy(_objects())).to_json()
        for name, config in configs.items()
    }
    found["begun"] = train_worker(begun, collective, _objects()).to_json()
    stops = UserObjects(module=net(), callbacks=(Watches(15),))
    with pytest.raises(RuntimeError, match="stopped"):
        train_worker(to_begin, collective, stops)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("collective", ["torch", pytest.param("horovod", marks=pytest.mark.slow)])
def test_two_ranks_are_one_and_either_goes_on_with_the_other_s(
    make_shards: MakeShards, tmp_path: Path, collective: str
) -> None:
    manifest = data(make_shards)
    gang: dict[str, Any] = {"num_workers": 2, "collective": collective}
    cases: dict[str, dict[str, Any]] = {
        "shuffled": {},
        "in order": {"shuffle": False, "cache": "memory"},
        "accumulated": {"gradient_accumulation": 3, "noise_scale": True},
        "zero": {"sync": Zero(stage=2)},
    }
    shared: dict[str, Any] = {"scale_learning_rate": LINEAR, "lr_schedule": "cosine"}
    alone = {
        name: train_here(config_of(manifest, tmp_path / f"{name}-1", **shared, **changes), _objects())
        for name, changes in cases.items()
    }
    configs = {
        name: _checked(config_of(manifest, tmp_path / f"{name}-2", **shared, **gang, **changes))
        for name, changes in cases.items()
    }
    # Stops in the third epoch, the first one with the second batch size.
    begun = config_of(manifest, tmp_path / "begun", checkpoint_every_steps=2, **shared)
    _stopped(begun, 15)
    to_begin = replace(begun, run_uri=str(tmp_path / "to_begin"))
    work = partial(_gang, configs, _checked(replace(begun, **gang)), _checked(replace(to_begin, **gang)))
    texts = run_ranks(2, collective, work)[0]
    results = {name: TrainResult.from_json(text) for name, text in texts.items()}
    results["to begin"] = train_here(to_begin, _objects())
    assert results["begun"].resumed_steps == results["to begin"].resumed_steps == (14,)
    for name, result in results.items():
        expected = small_training.weights_of(alone.get(name, alone["shuffled"]), net())
        found = small_training.weights_of(result, net())
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=name)
        assert [record.batch_size for record in result.history] == SIZES
    noise = [record.noise for record in results["accumulated"].history]
    assert all(found is not None for found in noise)


def _checked(config: TrainConfig) -> TrainConfig:
    return check_training(config, _objects(), ShardManifest.load(config.shards_uri)).config


# ------------------------------------------------------------------------ reading and memory


@pytest.mark.parametrize("shuffle", [True, False])
def test_kept_row_groups_are_those_that_a_shard_reads_twice(
    make_shards: MakeShards, tmp_path: Path, shuffle: bool
) -> None:
    """Without shuffling, the rows of a shard depend on the batch size, and so do its row groups."""
    manifest = make_shards(columns(), row_group_rows=4, num_files=1)
    config = config_of(manifest, tmp_path, shuffle=shuffle, batch_size_schedule=((2, 40), (4, 80)))
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
            constant = replace(config, batch_size_schedule=())
            assert find_cached_rows(constant, manifest, "train", rank, 3).row_groups != expected


@pytest.mark.extras
def test_a_budget_counts_the_largest_batch(make_shards: MakeShards, tmp_path: Path) -> None:
    from ringspark.extras.planning.memory.budget import check_budget

    manifest = data(make_shards)
    model = ModelSpec("mlp", {"in_features": 4, "hidden": [64] * 4, "out_features": 1}).to_json()

    def budgeted(**changes: Any) -> None:
        config = config_of(manifest, tmp_path, model=model, **changes)
        config = check_training(config, UserObjects(), manifest).config
        check_budget(config, UserObjects(), manifest, 1 << 20)

    budgeted()
    with pytest.raises(ValueError, match=r"training needs .* memoryBudget is 1.0 MiB; gradientAccumulation="):
        budgeted(batch_size_schedule=((5, 4096),))
    # The schedule never reaches that epoch.
    budgeted(batch_size_schedule=((6, 4096),))
