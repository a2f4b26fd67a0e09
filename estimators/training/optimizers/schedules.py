"""Learning-rate schedules: pure functions (step, number of steps) -> factor on the learning rate.

So a resumed training needs no scheduler state. `SchedulerRates` replays a torch scheduler, which has state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ringspark.estimators.names import check_name
from ringspark.estimators.training.optimizers.rate_scaling import RateScaling

Schedule = Callable[[int, int], float]
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]

WARM_UP_SHARE = 0.3
START_FACTOR = 1 / 25
END_FACTOR = 1e-4

# Keys of a parameter group that are not copied from a scheduler, because `set` computes the rate itself.
_OWN_KEYS = {"params", "lr", "initial_lr"}


def _constant(step: int, num_steps: int) -> float:
    return 1.0


def _one_cycle(step: int, num_steps: int) -> float:
    """Rises as a cosine over the first 30 % of the steps, then falls to almost zero (Smith 2018)."""
    peak = WARM_UP_SHARE * num_steps
    if step < peak:
        share, low = step / peak, START_FACTOR
        return low + (1 - low) * 0.5 * (1 - math.cos(math.pi * share))
    share = min(1.0, (step - peak) / max(1.0, num_steps - 1 - peak))
    return END_FACTOR + (1 - END_FACTOR) * 0.5 * (1 + math.cos(math.pi * share))


SCHEDULES: dict[str, Schedule] = {
    "constant": _constant,
    "linear": lambda step, num_steps: 1.0 - step / max(1, num_steps),
    "cosine": lambda step, num_steps: 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, num_steps)))),
    "one_cycle": _one_cycle,
}


def takes_optimizer(schedule: Callable[..., Any]) -> bool:
    """Returns True for a callable optimizer -> scheduler, False for (step, num_steps) -> factor."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in signature(schedule).parameters.values() if p.kind in kinds]
    required = sum(p.default is Parameter.empty for p in parameters)
    # A class such as StepLR, which needs a second argument, must not count as (step, num_steps).
    if required not in (1, 2) or (required == 2 and isinstance(schedule, type)):
        raise ValueError(
            f"lrSchedule must be one of {sorted(SCHEDULES)}, a callable (step, num_steps) -> factor, or a "
            f"callable (optimizer) -> torch scheduler, got one with {required} arguments"
        )
    return required == 1


class LearningRates:
    """Sets an optimizer's learning rates before each step; every group keeps its own base.

    If other code changes a group's rate, such as a callback with `ReduceLROnPlateau`, all later rates of the
    group are scaled by the same ratio.

    Attributes:
        scales: Product of these ratios for each group; checkpoints keep them.
        first_step: Steps of earlier trainings; a schedule without an end continues after them.
        pace: (step, share, speed), or () for the plan. From `step` on, the schedule advances from `share` of
            its length by `speed` per step; see `end_at`.
    """

    def __init__(
        self, schedule: Schedule, optimizer: torch.optim.Optimizer, num_steps: int, is_endless: bool = False
    ) -> None:
        self._schedule = schedule
        self._is_endless = is_endless
        self._optimizer = optimizer
        self._num_steps = num_steps
        self._bases = [group["lr"] for group in optimizer.param_groups]
        self.scales = [1.0 for _ in self._bases]
        self.first_step = 0
        self.pace: tuple[float, ...] = ()
        self._last: list[float] | None = [float(base) for base in self._bases]

    def set(self, step: int) -> None:
        """Sets the rates of `step`, from 0; steps may be skipped. Raises like `take_changes`."""
        factor = self._schedule(round(self._at(step)) + self.first_step, self._num_steps)
        self._set_rates([base * factor for base in self._bases])

    def end_at(self, step: int, last: int) -> None:
        """Stretches or shrinks the rest of the schedule, warm-up included, so that it ends before `last`."""
        share = self._at(step) / max(1, self._num_steps)
        self.pace = float(step), share, (1.0 - share) / max(1, last - step)

    def _at(self, step: int) -> float:
        if not self.pace:
            return step
        start, share, speed = self.pace
        return min(1.0, share + (step - start) * speed) * self._num_steps

    def resume(self, scales: Sequence[float], first_step: int = 0, pace: Sequence[float] = ()) -> None:
        """Restores `scales` and `pace`; rates in the optimizer's loaded state do not count as changes.

        A schedule that depends on the number of steps ignores `first_step` and starts at its beginning.
        """
        self.scales = list(scales)
        self.pace = tuple(pace)
        self.first_step = first_step if self._is_endless else 0
        self._last = None

    def take_changes(self) -> None:
        """Adds other code's changes since the last step to `scales`; call it before a checkpoint.

        Raises ValueError if the number of parameter groups changed, or a rate whose base is 0.
        """
        groups = self._optimizer.param_groups
        if len(groups) != len(self.scales):
            raise ValueError(
                f"the optimizer began with {len(self.scales)} parameter groups and now has {len(groups)}; "
                "let optimizer or parameterGroups make all groups before the training, and give groups that "
                "start later a rate near 0"
            )
        if self._last is None:
            return
        for index, (group, last) in enumerate(zip(groups, self._last, strict=True)):
            if float(group["lr"]) != last:
                self._rescale(index, float(group["lr"]), last)
        self._last = [float(group["lr"]) for group in groups]

    def _set_rates(self, planned: list[float]) -> None:
        groups = self._optimizer.param_groups
        self.take_changes()
        for group, rate, scale in zip(groups, planned, self.scales, strict=True):
            group["lr"] = rate * scale
        self._last = [float(group["lr"]) for group in groups]

    def _rescale(self, index: int, rate: float, last: float) -> None:
        base = float(self._bases[index])
        if last:
            self.scales[index] *= rate / last
        elif base:
            # The schedule is at zero, so the changed rate becomes the group's base.
            self.scales[index] = rate / base
        else:
            raise ValueError(
                f"a callback set the learning rate of parameter group {index} to {rate}, but a rate that "
                "starts at 0 cannot be changed; let the optimizer start the group above 0"
            )


class _WeightlessOptimizer(torch.optim.Optimizer):
    """Copies an optimizer's groups without its weights.

    A scheduler on the real optimizer would see the warm-up's rates, and would warn about skipped steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [
            {**group, "params": [nn.Parameter(torch.zeros(()))]}  # a scheduler never reads it
            for group in optimizer.param_groups
        ]
        super().__init__(groups, dict(optimizer.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return


def _differs(value: Any, start: Any) -> bool:
    if value is start:
        return False
    return not torch.equal(value, start) if torch.is_tensor(value) else bool(value != start)


class SchedulerRates(LearningRates):
    """Sets the rates of a torch scheduler that starts after the warm-up, multiplied by `rise(step)`."""

    def __init__(
        self,
        factory: SchedulerFactory,
        optimizer: torch.optim.Optimizer,
        warmup_steps: int,
        rise: Callable[[int], float],
    ) -> None:
        super().__init__(_constant, optimizer, 0, is_endless=True)
        self._factory = factory
        self._warmup_steps = warmup_steps
        self._rise = rise
        self._start = _WeightlessOptimizer(optimizer)
        # (group, key) of values besides rates that the scheduler changes; other values are not touched.
        self._moved: set[tuple[int, str]] = set()
        self._restart()

    def _restart(self) -> None:
        self._replica = _WeightlessOptimizer(self._start)
        self._scheduler = self._factory(self._replica)
        self._position = 0
        is_scheduler = isinstance(self._scheduler, LRScheduler)
        if not is_scheduler or isinstance(self._scheduler, ReduceLROnPlateau):
            raise ValueError(
                "lrSchedule with one argument must return a torch.optim.lr_scheduler.LRScheduler that "
                f"steps without a metric, got {type(self._scheduler).__name__}"
            )
        self._record_moved()

    def _record_moved(self) -> None:
        pairs = zip(self._start.param_groups, self._replica.param_groups, strict=True)
        for index, (start, now) in enumerate(pairs):
            known = start.keys() - _OWN_KEYS
            self._moved |= {(index, key) for key in known if _differs(now[key], start[key])}

    def set(self, step: int) -> None:
        step += self.first_step
        wanted = max(0, step - self._warmup_steps)
        if wanted < self._position:
            self._restart()
        for _ in range(wanted - self._position):
            self._replica.step()
            self._scheduler.step()
            self._record_moved()
        self._position = wanted
        planned = self._replica.param_groups
        for index, key in self._moved:
            self._optimizer.param_groups[index][key] = planned[index][key]
        self._set_rates([group["lr"] * self._rise(step) for group in planned])


def make_rates(
    spec: str | Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    warmup_steps: int = 0,
    scaling: RateScaling | None = None,
) -> LearningRates:
    """Makes the learning rates of a training; raises ValueError for a wrong `spec` or a too long warm-up.

    Args:
        spec: A name of `SCHEDULES`, a callable (step, num_steps) -> factor on each group's rate, or a
            callable optimizer -> torch scheduler.
        scaling: Multiplies all rates; its own warm-up applies if `warmup_steps` is 0.
    """
    if warmup_steps and warmup_steps >= num_steps:
        raise ValueError(
            f"warmupSteps must be below the training's number of steps ({num_steps}), got {warmup_steps}; "
            "lower it, or train for more epochs"
        )
    delay = warmup_steps
    if scaling is not None:
        if scaling.warmup_steps and scaling.warmup_steps >= num_steps:
            raise ValueError(
                "scaleLearningRate's warmup_epochs must end before the last of the training's steps "
                f"({num_steps}), got {scaling.warmup_steps} steps; lower it, or train for more epochs"
            )
        delay = warmup_steps or scaling.warmup_steps

    def rise(step: int) -> float:
        # Above 0 in step 0, and 1 from step `warmup_steps` on.
        warm_up = min(1.0, (step + 1) / (warmup_steps + 1))
        return warm_up * (1.0 if scaling is None else scaling.factor(step))

    if isinstance(spec, str):
        check_name("lrSchedule", spec, SCHEDULES)
    elif takes_optimizer(spec):
        return SchedulerRates(spec, optimizer, delay, rise)
    schedule: Schedule = SCHEDULES[spec] if isinstance(spec, str) else spec

    def planned(step: int, num_steps: int) -> float:
        # The schedule runs over the steps after the warm-up to its own end.
        return rise(step) * schedule(max(0, step - delay), max(1, num_steps - delay))

    return LearningRates(planned, optimizer, num_steps, is_endless=schedule is _constant)
