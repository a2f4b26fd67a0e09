"""Learning rates: schedules, warm-up, and torch's schedulers, replayed to any step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ringspark.estimators.training.optimizers.schedules import (
    SCHEDULES,
    LearningRates,
    add_warmup,
    make_rates,
)

Factory = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
NUM_STEPS = 20

FACTORIES: dict[str, Factory] = {
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "steps": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[1.0, 0.1], total_steps=NUM_STEPS),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda s: 1 / (s + 1), lambda s: 0.5**s]),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[4]
    ),
}


def _optimizer() -> torch.optim.Optimizer:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    return torch.optim.AdamW([{"params": [first], "lr": 0.4}, {"params": [second]}], lr=0.02)


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_steps", [1, 2, 7, 1000])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
def test_factors_stay_between_zero_and_one(name: str, num_steps: int, warmup_steps: int) -> None:
    schedule = add_warmup(SCHEDULES[name], warmup_steps)
    factors = [schedule(step, num_steps) for step in range(num_steps)]
    assert all(0.0 <= f <= 1.0 for f in factors)
    assert factors[0] > 0


def test_one_cycle_agrees_with_torchs() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    steps = 100
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=steps, cycle_momentum=False)
    for step in range(steps):
        # torch ends its rise one step earlier; apart from this, the curves are equal.
        assert SCHEDULES["one_cycle"](step, steps) == pytest.approx(scheduler.get_last_lr()[0], abs=0.04)
        optimizer.step()
        scheduler.step()


def test_groups_keep_their_own_base_rates() -> None:
    optimizer = _optimizer()
    rates = make_rates("linear", optimizer, num_steps=4)
    for step, share in ((0, 1.0), (3, 0.25), (1, 0.75)):
        rates.set(step)
        assert _rates(optimizer) == pytest.approx([0.4 * share, 0.02 * share])


def test_a_callable_of_two_arguments_is_a_factor() -> None:
    optimizer = _optimizer()
    rates = make_rates(lambda step, num_steps: (step + 1) / num_steps, optimizer, num_steps=8)
    rates.set(1)
    assert _rates(optimizer) == pytest.approx([0.1, 0.005])


def test_warm_up_is_linear_and_the_schedule_runs_over_the_rest() -> None:
    schedule = add_warmup(SCHEDULES["linear"], 3)
    assert [schedule(step, 7) for step in range(7)] == pytest.approx([0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25])
    # A schedule that starts below 1 is warmed up to its own start, without a jump.
    one_cycle = add_warmup(SCHEDULES["one_cycle"], 3)
    assert one_cycle(2, 100) < one_cycle(3, 100) == pytest.approx(1 / 25)


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_torchs_schedulers_step_once_per_optimizer_step(name: str, warmup_steps: int) -> None:
    """Compares with the scheduler in torch's documented loop."""
    plain = _optimizer()
    scheduler = FACTORIES[name](plain)
    planned = []
    for _ in range(NUM_STEPS):
        planned.append([(group["lr"], group["betas"]) for group in plain.param_groups])
        plain.step()
        scheduler.step() if len(planned) < NUM_STEPS else None
    optimizer = _optimizer()
    rates = make_rates(FACTORIES[name], optimizer, NUM_STEPS, warmup_steps)
    for step in range(NUM_STEPS):
        rates.set(step)
        wanted = planned[max(0, step - warmup_steps)]
        factor = min(1.0, (step + 1) / (warmup_steps + 1))
        assert _rates(optimizer) == pytest.approx([lr * factor for lr, _ in wanted])
        assert [group["betas"] for group in optimizer.param_groups] == [betas for _, betas in wanted]
        # Loss scaling may skip optimizer.step(); the scheduler must not warn.


@pytest.mark.parametrize("name", [*SCHEDULES, *FACTORIES])
def test_a_resumed_training_continues_at_the_same_rates(name: str) -> None:
    spec = FACTORIES.get(name, name)
    straight, jumping = _optimizer(), _optimizer()
    all_steps = make_rates(spec, straight, NUM_STEPS, 3)
    seen = []
    for step in range(NUM_STEPS):
        all_steps.set(step)
        seen.append(_rates(straight))
    rates = make_rates(spec, jumping, NUM_STEPS, 3)
    # A checkpoint restores the rates of its step, in new dicts.
    jumping.load_state_dict(straight.state_dict())
    rates.resume(all_steps.scales)
    for step in (11, 4, NUM_STEPS - 1):
        rates.set(step)
        assert _rates(jumping) == seen[step]


@pytest.mark.parametrize("name", ["constant", "linear", *FACTORIES])
def test_a_rate_that_a_callback_sets_scales_the_rest_of_the_plan(name: str) -> None:
    spec = FACTORIES.get(name, name)
    planned, changed = _optimizer(), _optimizer()
    plan, rates = make_rates(spec, planned, NUM_STEPS, 3), make_rates(spec, changed, NUM_STEPS, 3)
    # Changes before the first step, as in on_train_start, and twice later: one group, then both.
    changed.param_groups[0]["lr"] *= 0.5
    scales = [0.5, 1.0]
    for step in range(NUM_STEPS):
        plan.set(step)
        rates.set(step)
        assert _rates(changed) == pytest.approx([r * s for r, s in zip(_rates(planned), scales, strict=True)])
        if step == 4:
            changed.param_groups[1]["lr"] *= 0.1
            scales = [0.5, 0.1]
        if step == 9:
            for group in changed.param_groups:
                group["lr"] *= 0.25
            scales = [0.125, 0.025]
    assert rates.scales == pytest.approx(scales)
    resumed = _optimizer()
    again = make_rates(spec, resumed, NUM_STEPS, 3)
    resumed.load_state_dict(changed.state_dict())
    again.resume(rates.scales)
    for optimizer, some in ((changed, rates), (resumed, again)):
        some.set(12)
        plan.set(12)
        assert _rates(optimizer) == pytest.approx(
            [r * s for r, s in zip(_rates(planned), scales, strict=True)]
        )


def test_a_plateau_scheduler_in_a_callback_lowers_the_rate_for_good() -> None:
    optimizer = _optimizer()
    rates = make_rates("constant", optimizer, NUM_STEPS)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=1)
    seen = []
    for step in range(8):
        rates.set(step)
        seen.append(_rates(optimizer)[0])
        plateau.step(1.0)  # the loss never falls
    assert seen == pytest.approx([0.4] * 3 + [0.04] * 2 + [0.004] * 2 + [0.0004])


def test_a_group_that_a_callback_adds_is_refused() -> None:
    optimizer = _optimizer()
    rates = make_rates("constant", optimizer, NUM_STEPS)
    rates.set(0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match=r"began with \d parameter groups and now has \d; let optimizer or"):
        rates.set(1)


def test_a_rate_set_where_the_schedule_is_at_zero_is_the_new_base() -> None:
    optimizer = _optimizer()
    rates = make_rates(lambda step, num_steps: float(step != 1), optimizer, NUM_STEPS)
    rates.set(0)
    optimizer.param_groups[0]["lr"] /= 4  # the next change replaces this one
    rates.set(1)
    optimizer.param_groups[0]["lr"] = 0.1
    rates.set(2)
    assert _rates(optimizer) == pytest.approx([0.1, 0.02])


def test_a_rate_that_starts_at_zero_and_is_changed_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    rates = make_rates("constant", optimizer, NUM_STEPS)
    rates.set(0)
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(ValueError, match=r"rate of parameter group 0 to 0.1, .* starts at 0 .*; let the"):
        rates.set(1)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_scheduler_overwrites_only_what_it_moves(name: str) -> None:
    planned, changed = _optimizer(), _optimizer()
    plan, rates = (make_rates(FACTORIES[name], o, NUM_STEPS) for o in (planned, changed))
    changed.param_groups[0]["weight_decay"] = 0.75
    changed.param_groups[1]["betas"] = (0.5, 0.6)
    for step in range(NUM_STEPS):
        plan.set(step)
        rates.set(step)
        assert changed.param_groups[0]["weight_decay"] == 0.75
        moves_betas = name == "one cycle"
        expected = planned.param_groups[1]["betas"] if moves_betas else (0.5, 0.6)
        assert changed.param_groups[1]["betas"] == expected


class _Tightens(lr_scheduler.LRScheduler):
    """Changes a value that none of torch's schedulers changes."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["eps"] = 10.0 ** -(2 + self.last_epoch)
        return [group["lr"] for group in self.optimizer.param_groups]


def test_a_scheduler_of_a_user_moves_every_value_of_a_group() -> None:
    optimizer = _optimizer()
    rates = make_rates(_Tightens, optimizer, NUM_STEPS)
    rates.set(3)
    assert [group["eps"] for group in optimizer.param_groups] == [1e-5, 1e-5]


def test_a_schedulers_factory_leaves_the_optimizer_itself_alone() -> None:
    optimizer = _optimizer()
    make_rates(FACTORIES["steps"], optimizer, NUM_STEPS)
    assert "initial_lr" not in optimizer.param_groups[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_unknown_and_unfit_schedules_are_refused() -> None:
    optimizer = _optimizer()
    with pytest.raises(ValueError, match=r"lrSchedule must be one of .*got 'cosin'; did you mean 'cosine'"):
        make_rates("cosin", optimizer, 10)
    with pytest.raises(ValueError, match="got one with 3 arguments"):
        make_rates(lambda a, b, c: 1.0, optimizer, 10)
    with pytest.raises(ValueError, match="got one with 2 arguments"):
        make_rates(lr_scheduler.StepLR, optimizer, 10)
    with pytest.raises(ValueError, match=r"must return a .*LRScheduler .* got float"):
        make_rates(lambda optimizer: 0.1, optimizer, 10)
    with pytest.raises(ValueError, match="steps without a metric, got ReduceLROnPlateau"):
        make_rates(lr_scheduler.ReduceLROnPlateau, optimizer, 10)


def test_a_warm_up_that_never_ends_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"warmupSteps must be below the training's number of steps \(10\), got 10"
    ):
        make_rates("constant", _optimizer(), 10, warmup_steps=10)


def test_a_schedule_that_ends_earlier_has_its_whole_warm_up_and_decay() -> None:
    optimizer = _optimizer()
    rates = make_rates("cosine", optimizer, 1_000, warmup_steps=100)
    whole = [_set(rates, optimizer, step) for step in range(1_000)]
    assert [_set(rates, optimizer, step) for step in range(3)] == whole[:3]
    rates.end_at(3, 53)
    early = [_set(rates, optimizer, step) for step in range(3, 53)]
    assert early[0] == whole[3]
    assert max(early) == pytest.approx(0.4, rel=0.05)
    assert early[-1] < 0.01 * 0.4
    optimizer = _optimizer()
    resumed = make_rates("cosine", optimizer, 1_000, warmup_steps=100)
    resumed.resume(rates.scales, pace=rates.pace)
    assert [_set(resumed, optimizer, step) for step in range(3, 53)] == early
    # More time than it seemed: the rest takes longer.
    resumed.end_at(28, 78)
    assert _set(resumed, optimizer, 28) == early[25]
    assert _set(resumed, optimizer, 77) < 0.01 * 0.4


@pytest.mark.parametrize("name", ["linear", "cosine", "one_cycle"])
def test_rates_of_a_changed_pace_are_never_negative(name: str) -> None:
    first = _optimizer()
    rates = make_rates(name, first, 2_000)
    rates.end_at(10, 200)
    expected = _set(rates, first, 160)
    for steps in (2_000, 240):
        optimizer = _optimizer()
        resumed = make_rates(name, optimizer, steps)
        resumed.resume(rates.scales, pace=rates.pace)
        # The same share of the schedule is left, and nothing is left after its end.
        assert _set(resumed, optimizer, 160) == pytest.approx(expected, rel=0.05)
        assert all(0 <= _set(resumed, optimizer, step) <= 0.4 for step in range(190, 400, 7))
        resumed.end_at(160, 160)
        resumed.end_at(240, 200)
        assert 0 <= _set(resumed, optimizer, 241) <= 0.4


def _set(rates: LearningRates, optimizer: torch.optim.Optimizer, step: int) -> float:
    rates.set(step)
    return _rates(optimizer)[0]
