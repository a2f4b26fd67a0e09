"""Learning rates: schedules, warm-up, and torch's schedulers, replayed to any step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ringspark.estimators.training.optimizers.schedules import SCHEDULES, make_rates

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


class Planned:
    """An optimizer with two groups, of rates 0.4 and 0.02, and the rates of its schedule."""

    def __init__(self, schedule: Any, num_steps: int = NUM_STEPS, warmup_steps: int = 0) -> None:
        self.optimizer = _optimizer()
        self.rates = make_rates(schedule, self.optimizer, num_steps, warmup_steps)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def at(self, step: int) -> list[float]:
        self.rates.set(step)
        return [group["lr"] for group in self.groups]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("num_steps", "warmup_steps"), [(1, 0), (2, 1), (7, 0), (7, 5), (1000, 0), (1000, 5)]
)
def test_factors_stay_between_zero_and_one(name: str, num_steps: int, warmup_steps: int) -> None:
    planned = Planned(name, num_steps, warmup_steps)
    factors = [planned.at(step)[0] / 0.4 for step in range(num_steps)]
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


def test_warm_up_is_linear_and_the_schedule_runs_over_the_rest() -> None:
    planned = Planned("linear", 7, 3)
    rates = [planned.at(step)[0] for step in range(7)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.1])
    # A schedule that starts below 1 is warmed up to its own start, without a jump.
    one_cycle = Planned("one_cycle", 100, 3)
    assert one_cycle.at(2)[0] < one_cycle.at(3)[0] == pytest.approx(0.4 / 25)


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_torchs_schedulers_step_once_per_optimizer_step(name: str, warmup_steps: int) -> None:
    """Compares with the scheduler in torch's documented loop."""
    plain, planned = _optimizer(), Planned(FACTORIES[name], NUM_STEPS, warmup_steps)
    scheduler = FACTORIES[name](plain)
    wanted = []
    for _ in range(NUM_STEPS):
        wanted.append([(group["lr"], group["betas"]) for group in plain.param_groups])
        plain.step()
        scheduler.step() if len(wanted) < NUM_STEPS else None
    for step in range(NUM_STEPS):
        rates, betas = zip(*wanted[max(0, step - warmup_steps)], strict=True)
        factor = min(1.0, (step + 1) / (warmup_steps + 1))
        assert planned.at(step) == pytest.approx([rate * factor for rate in rates])
        assert tuple(group["betas"] for group in planned.groups) == betas
        # Loss scaling may skip optimizer.step(); the scheduler must not warn.


@pytest.mark.parametrize("name", [*SCHEDULES, *FACTORIES])
def test_a_resumed_training_continues_at_the_same_rates(name: str) -> None:
    straight, jumping = (Planned(FACTORIES.get(name, name), NUM_STEPS, 3) for _ in range(2))
    seen = [straight.at(step) for step in range(NUM_STEPS)]
    # A checkpoint restores the rates of its step, in new dicts.
    jumping.optimizer.load_state_dict(straight.optimizer.state_dict())
    jumping.rates.resume(straight.rates.scales)
    for step in (11, 4, NUM_STEPS - 1):
        assert jumping.at(step) == seen[step]


@pytest.mark.parametrize("name", ["constant", "linear", *FACTORIES])
def test_a_rate_that_a_callback_sets_scales_the_rest_of_the_plan(name: str) -> None:
    plan, changed, resumed = (Planned(FACTORIES.get(name, name), NUM_STEPS, 3) for _ in range(3))

    def expected(step: int) -> Any:
        return pytest.approx([rate * scale for rate, scale in zip(plan.at(step), scales, strict=True)])

    # Changes before the first step, as in on_train_start, and twice later: one group, then both.
    changed.groups[0]["lr"] *= 0.5
    scales = [0.5, 1.0]
    for step in range(NUM_STEPS):
        assert changed.at(step) == expected(step)
        if step == 4:
            changed.groups[1]["lr"] *= 0.1
            scales = [0.5, 0.1]
        if step == 9:
            for group in changed.groups:
                group["lr"] *= 0.25
            scales = [0.125, 0.025]
    assert changed.rates.scales == pytest.approx(scales)
    resumed.optimizer.load_state_dict(changed.optimizer.state_dict())
    resumed.rates.resume(changed.rates.scales)
    assert changed.at(12) == expected(12)
    assert resumed.at(12) == expected(12)


def test_a_plateau_scheduler_in_a_callback_lowers_the_rate_for_good() -> None:
    planned, seen = Planned("constant"), []
    plateau = lr_scheduler.ReduceLROnPlateau(planned.optimizer, factor=0.1, patience=1)
    for step in range(8):
        seen.append(planned.at(step)[0])
        plateau.step(1.0)  # the loss never falls
    assert seen == pytest.approx([0.4] * 3 + [0.04] * 2 + [0.004] * 2 + [0.0004])


def test_a_rate_set_where_the_schedule_is_at_zero_is_the_new_base() -> None:
    planned = Planned(lambda step, num_steps: float(step != 1))
    planned.at(0)
    planned.groups[0]["lr"] /= 4  # the next change replaces this one
    planned.at(1)
    planned.groups[0]["lr"] = 0.1
    assert planned.at(2) == pytest.approx([0.1, 0.02])


def test_a_change_of_a_rate_that_starts_at_zero_and_a_new_group_are_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    rates = make_rates("constant", optimizer, NUM_STEPS)
    rates.set(0)
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(ValueError, match=r"rate of parameter group 0 to 0.1, .* starts at 0 .*; let the"):
        rates.set(1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match=r"began with \d parameter groups and now has \d; let optimizer or"):
        rates.set(1)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_scheduler_overwrites_only_what_it_moves(name: str) -> None:
    plan, changed = Planned(FACTORIES[name]), Planned(FACTORIES[name])
    changed.groups[0]["weight_decay"] = 0.75
    changed.groups[1]["betas"] = (0.5, 0.6)
    for step in range(NUM_STEPS):
        plan.at(step)
        changed.at(step)
        assert changed.groups[0]["weight_decay"] == 0.75
        moved = plan.groups[1]["betas"] if name == "one cycle" else (0.5, 0.6)
        assert changed.groups[1]["betas"] == moved


class _Tightens(lr_scheduler.LRScheduler):
    """Changes a value that none of torch's schedulers changes."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["eps"] = 10.0 ** -(2 + self.last_epoch)
        return [group["lr"] for group in self.optimizer.param_groups]


def test_a_scheduler_of_a_user_moves_every_value_of_a_group() -> None:
    planned = Planned(_Tightens)
    planned.at(3)
    assert [group["eps"] for group in planned.groups] == [1e-5, 1e-5]


def test_a_schedulers_factory_leaves_the_optimizer_itself_alone() -> None:
    planned = Planned(FACTORIES["steps"])
    assert "initial_lr" not in planned.groups[0]
    planned.optimizer.step()  # a warning fails the test


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda a, b, c: 1.0, "got one with 3 arguments"),
        (lr_scheduler.StepLR, "got one with 2 arguments"),
        (lambda optimizer: 0.1, r"must return a .*LRScheduler .* got float"),
        (lr_scheduler.ReduceLROnPlateau, "steps without a metric, got ReduceLROnPlateau"),
    ],
)
def test_unfit_schedules_are_refused(schedule: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_rates(schedule, _optimizer(), 10)


def test_a_schedule_that_ends_earlier_has_its_whole_warm_up_and_decay() -> None:
    planned, resumed = Planned("cosine", 1_000, 100), Planned("cosine", 1_000, 100)
    whole = [planned.at(step)[0] for step in range(1_000)]
    assert [planned.at(step)[0] for step in range(3)] == whole[:3]
    planned.rates.end_at(3, 53)
    early = [planned.at(step)[0] for step in range(3, 53)]
    assert early[0] == whole[3]
    assert max(early) == pytest.approx(0.4, rel=0.05)
    assert early[-1] < 0.01 * 0.4
    resumed.rates.resume(planned.rates.scales, pace=planned.rates.pace)
    assert [resumed.at(step)[0] for step in range(3, 53)] == early
    # More time than it seemed: the rest takes longer.
    resumed.rates.end_at(28, 78)
    assert resumed.at(28)[0] == early[25]
    assert resumed.at(77)[0] < 0.01 * 0.4


@pytest.mark.parametrize("name", ["linear", "cosine", "one_cycle"])
def test_rates_of_a_changed_pace_are_never_negative(name: str) -> None:
    first = Planned(name, 2_000)
    first.rates.end_at(10, 200)
    expected = first.at(160)
    for steps in (2_000, 240):
        resumed = Planned(name, steps)
        resumed.rates.resume(first.rates.scales, pace=first.rates.pace)
        # The same share of the schedule is left, and nothing is left after its end.
        assert resumed.at(160) == pytest.approx(expected, rel=0.05)
        assert all(0 <= resumed.at(step)[0] <= 0.4 for step in range(190, 400, 7))
        resumed.rates.end_at(160, 160)
        resumed.rates.end_at(240, 200)
        assert 0 <= resumed.at(241)[0] <= 0.4
