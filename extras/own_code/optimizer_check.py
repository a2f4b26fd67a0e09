"""Checks on the driver that a user's optimizer can be trained, resumed and sharded as the config needs.

Its first steps run on random gradients of small parameters, whose weights are restored afterwards.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.parallel.base import MakeOptimizer
from ringspark.estimators.parallel.optimizer_state import common_state, load_by_name, state_by_name
from ringspark.estimators.parallel.sharded.parameter_shards import hide_empty_groups
from ringspark.estimators.training.average import has_modes
from ringspark.estimators.training.checkpoint.reading import set_group_values
from ringspark.estimators.training.checkpoint.snapshot import group_values
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models.process_state import ignore_warnings

_log = logging.getLogger(__name__)

# Elements per group that are tried, but at least two parameters.
_MAX_ELEMENTS = 1 << 20
# Attributes that every optimizer has; a checkpoint holds their values.
_KEPT = ("state", "param_groups", "defaults")
_STEPS = 2
# Number of steps if a step changes another attribute: it may be a counter that has an effect only later.
_MANY_STEPS = 1_000
# These steps may update so many elements, so that a large network does not wait.
_MANY_ELEMENTS = 1 << 26


@ignore_warnings()  # the user's optimizer has already warned once
def check_own_optimizer(config: TrainConfig, make: MakeOptimizer, module: nn.Module) -> None:
    """Raises ValueError if the training cannot run, resume or shard the optimizer that `make` returns."""
    optimizer: Any = make(module)
    name, is_modal = f"optimizer {type(optimizer).__name__}", has_modes(optimizer)
    if is_modal and (config.sync != AllReduce() or config.ema_decay is not None):
        raise ValueError(
            f"{name} swaps the weights in its modes train() and eval(), which needs whole weights on each "
            f"worker and no average of them, but sync={config.sync!r} and emaDecay={config.ema_decay}; set "
            "sync=AllReduce() and leave emaDecay unset"
        )
    if type(optimizer).__module__.startswith("torch.optim."):
        return
    groups = [group["params"] for group in optimizer.param_groups]
    tried = [p for own in groups for p in (own if is_modal else _smallest(own)) if not is_lazy(p)]
    start = [p.detach().clone() for p in tried]
    try:
        own = _numbers(optimizer)
        try:
            _run(optimizer, tried)
        except Exception as error:  # of any kind, depending on the optimizer
            if "closure" not in str(error):
                _log.info("%s fails on random gradients: %s", name, error)
                return
            raise ValueError(
                f"{name} evaluates the loss several times per step, which the training loop does not offer "
                f"({error}); use one whose step() needs no closure"
            ) from error
        steps = _STEPS
        if not _equal(own, _numbers(optimizer)):
            elements = max(1, sum(parameter.numel() for parameter in tried))
            steps = max(steps, min(_MANY_STEPS, _MANY_ELEMENTS // elements))
        if (config.writes_checkpoints or config.keeps_state) and not _resumes(
            optimizer, make, module, tried, start, steps
        ):
            raise ValueError(
                f"{name} takes a different step after its state was saved and loaded, so a resumed training "
                "would differ; keep everything that step() changes in `state`, in numbers and tensors of "
                "`param_groups`, or in the result of state_dict(), or write no checkpoints "
                "(checkpointEverySeconds=0)"
            )
        if config.num_workers > 1 and config.sync.sharding != "none":
            ends = []
            for held in (tried, tried[:1]):
                _put(tried, start)
                optimizer = make(module)
                for group in optimizer.param_groups:
                    group["params"][:] = [p for p in group["params"] if p in set(held)]
                _run(optimizer, tried)
                ends.append(copy.deepcopy((held[0].detach(), common_state(optimizer), _groups(optimizer))))
            if not _equal(*ends):
                raise ValueError(
                    f"{name} computes a different step if it holds only some of the parameters, and with "
                    f"sync={config.sync!r} each worker's optimizer holds only some; set sync=AllReduce()"
                )
    finally:
        _put(tried, start)


def _resumes(
    optimizer: Any,
    make: MakeOptimizer,
    module: nn.Module,
    tried: Sequence[nn.Parameter],
    start: Sequence[torch.Tensor],
    steps: int,
) -> bool:
    """Returns whether `steps` further steps are bitwise equal after the state is saved and loaded."""

    def values(of: Any) -> tuple[Any, ...]:
        return copy.deepcopy(([p.detach() for p in tried], state_by_name(module, of), _groups(of)))

    weights, state, groups = values(optimizer)
    _run(optimizer, tried, _STEPS, steps)
    expected = values(optimizer)
    _put(tried, start)  # a resumed training makes the optimizer of the initial weights, too
    loaded = make(module)
    if has_modes(loaded):
        loaded.train()  # type: ignore[attr-defined]
    _put(tried, weights)
    try:
        load_by_name(module, loaded, state)
        for group, own in zip(loaded.param_groups, groups, strict=True):
            set_group_values(group, own)
        _run(loaded, tried, _STEPS, steps)
    except Exception as error:  # user code may raise anything
        _log.info("the loaded optimizer fails: %s", error)
        return False
    return _equal(expected, values(loaded))


def _smallest(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    ordered = sorted(parameters, key=torch.Tensor.numel)
    ends = accumulate(parameter.numel() for parameter in ordered)
    return ordered[: max(2, sum(end <= _MAX_ELEMENTS for end in ends))]


def _run(optimizer: Any, parameters: Sequence[nn.Parameter], first: int = 0, steps: int = _STEPS) -> None:
    """Takes `steps` steps with the gradients of the steps from `first` on."""
    if not first and has_modes(optimizer):
        optimizer.train()
    for step in range(first, first + steps):
        torch.manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        with hide_empty_groups(optimizer):
            optimizer.step()


@torch.no_grad()
def _put(parameters: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
        parameter.grad = None


def _numbers(optimizer: Any) -> list[Any]:
    """Returns copies of the numbers, texts and tensors that the attributes of an optimizer hold."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _KEPT}
    return copy.deepcopy([v for v in tree_leaves(own) if isinstance(v, int | float | str | torch.Tensor)])


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [group_values(group) for group in optimizer.param_groups]


def _equal(one: Any, two: Any) -> bool:
    ones, twos = tree_leaves(one), tree_leaves(two)
    return len(ones) == len(twos) and all(map(_is_same, ones, twos))


def _is_same(one: Any, two: Any) -> bool:
    """Whether two values are equal; NaN equals NaN, because many random steps may diverge."""
    if torch.is_tensor(one) and torch.is_tensor(two):
        return one.shape == two.shape and bool(((one == two) | (one.isnan() & two.isnan())).all())
    return bool(one == two or (one != one and two != two))
