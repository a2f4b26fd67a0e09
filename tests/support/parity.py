"""Compares trainings that must agree: one worker and several, undisturbed and resumed, saved and loaded."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_callback import Fails
from small_training import state_of, train_gang, weights_of, workers_of
from torch import nn

from ringspark.estimators import user_code
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.models import ModelSpec

# Settings that distribute a training over workers.
SPREADING = ("parallelism", "num_workers", "sync", "collective")
Train = Callable[[TrainConfig, UserObjects | None], TrainResult]
# Results of the reference training and of the training to compare with it.
Pair = tuple[TrainResult, TrainResult]


def difference(first: TrainResult, second: TrainResult, network: nn.Module | TrainConfig) -> float:
    """Returns the largest absolute difference of the weights.

    Args:
        network: A module with the architecture of the trained network, or a config with its ModelSpec.
    """
    spec = network.model if isinstance(network, TrainConfig) else None
    is_module = isinstance(network, nn.Module)
    module = user_code.copy(network) if is_module else ModelSpec.from_json(spec or "").build()
    return float((weights_of(first, module) - weights_of(second, module)).abs().max())


def assert_equal_states(first: TrainResult, second: TrainResult, bound: float = 0.0) -> None:
    """Asserts that all parameters and buffers differ by at most `bound`."""
    one, other = state_of(first), state_of(second)
    assert one.keys() == other.keys()
    off = {k: float((one[k] - other[k]).abs().max()) for k in one if not one[k].equal(other[k])}
    assert not any(not distance <= bound for distance in off.values()), off


def records_of(result: TrainResult) -> list[dict[str, Any]]:
    """Returns the history without seconds and measured costs."""
    return [asdict(replace(record, seconds=0.0, cost=None)) for record in result.history]


def assert_equal_histories(first: TrainResult, second: TrainResult, bound: float = 1e-5) -> None:
    """Asserts that all epochs have equal rows, and losses and metrics within the relative `bound`."""
    for one, other in zip(first.history, second.history, strict=True):
        assert other.rows == one.rows
        assert other.train_loss == pytest.approx(one.train_loss, rel=bound)
        assert (other.validation_loss or 0) == pytest.approx(one.validation_loss or 0, rel=bound)
        assert other.metrics == pytest.approx(one.metrics, rel=bound)


def equal_to_one_worker(
    config: TrainConfig,
    objects: UserObjects | None = None,
    *,
    bound: float = 1e-5,
    alone: Train = train_gang,
    **spread: Any,
) -> Pair:
    """Trains `config` on one worker and with the settings `spread`, and compares weights and histories.

    The training on one worker also has the settings in `spread` that need no second worker, such as
    `gradient_accumulation`. If `spread` has `parallelism` but not `num_workers`, the mesh sets `num_workers`.

    Args:
        alone: Function that trains on one worker, such as `train_here`.
    """
    if "parallelism" in spread:
        spread = {"num_workers": workers_of(spread["parallelism"]), **spread}
    common = {name: value for name, value in spread.items() if name not in SPREADING}
    one = alone(_beside(config, "one-worker", **common, num_workers=1), objects)
    many = train_gang(_beside(config, "workers", **spread), objects)
    assert one.steps == many.steps
    assert difference(one, many, _network(config, objects)) < bound
    assert_equal_histories(one, many, bound)
    return one, many


def equal_to_undisturbed(
    config: TrainConfig,
    objects: UserObjects | None = None,
    *,
    step: int = 7,
    first: Mapping[str, Any] | None = None,
    then: Mapping[str, Any] | None = None,
    bound: float = 0.0,
    train: Train = train_gang,
) -> Pair:
    """Trains once without a failure, and once with a failure after `step` and a resume; compares both.

    Compares the weights, and the rows per epoch.

    Args:
        first: Settings until the failure, and of the undisturbed training.
        then: Settings of the resumed training; None means `first`.
        bound: Largest difference of the weights; 0 for equal bits.
        train: Function that trains, such as `train_here`.
    """
    first = first or {}
    objects = objects or UserObjects()
    straight = train(_beside(config, "undisturbed", **first), objects)
    mark = Path(config.run_uri).with_name(f"{Path(config.run_uri).name}-failed")
    failing = replace(objects, callbacks=(*objects.callbacks, Fails(mark, step=step)))
    with pytest.raises(RuntimeError, match=f"step {step}"):
        train(replace(config, **first), failing)
    resumed = train(replace(config, **(first if then is None else then)), failing)
    assert resumed.resumed_steps, "the training started again instead of resuming"
    assert 0 < resumed.resumed_steps[0] <= step
    found = difference(straight, resumed, _network(config, objects))
    assert found <= bound, f"weights differ by {found}"
    assert [epoch.rows for epoch in resumed.history] == [epoch.rows for epoch in straight.history]
    return straight, resumed


def assert_predicts_the_same(first: Any, second: Any, table: Any, key: str = "id") -> None:
    """Asserts that two fitted models predict bitwise the same; `key` is the column that identifies a row."""
    columns = [key, first.getPredictionCol()]
    one, other = (sorted(m.transform(table).select(*columns).collect()) for m in (first, second))
    assert one == other


def assert_equal_weights(first: Any, second: Any, bound: float = 0.0) -> None:
    """Asserts that the weights of two fitted models differ by at most `bound`, absolutely."""
    states = first.module().state_dict(), second.module().state_dict()
    torch.testing.assert_close(*states, rtol=0, atol=bound)


def _beside(config: TrainConfig, name: str, **changes: Any) -> TrainConfig:
    uri = Path(config.run_uri)
    return replace(config, run_uri=str(uri.with_name(f"{uri.name}-{name}")), **changes)


def _network(config: TrainConfig, objects: UserObjects | None) -> nn.Module | TrainConfig:
    return objects.module if objects is not None and objects.module is not None else config
