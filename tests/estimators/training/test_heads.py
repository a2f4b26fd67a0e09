"""A head combines the settings, the user's objects and the data of one output."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.run.identity import identity_of, list_data_differences, list_differences
from ringspark.estimators.training.make_heads import make_heads, set_outputs
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects

ROWS = 12


def _config(**changes: Any) -> TrainConfig:
    two = {"label_columns": ("kind", "size"), "losses": ("cross_entropy", "auto"), "loss_weights": (1.0, 0.5)}
    settings: dict[str, Any] = {"shards_uri": "", "run_uri": "", "input_columns": ("x",), "reader": "arrow"}
    return set_outputs(TrainConfig(**(settings | two | changes)), (3, 1))


def _relative(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output[:, 0] - label) / label).square()


def test_each_output_gets_the_metrics_that_suit_its_loss() -> None:
    kind, size = make_heads(_config(metrics=("accuracy", "mae", "f1")), UserObjects())
    assert kind == Head(
        label="kind", loss="cross_entropy", weight=1.0, width=3, metrics=("accuracy", "f1"), ignored=None
    )
    assert size == Head(label="size", loss="mse", weight=0.5, width=1, metrics=("mae",), ignored=None)
    # A callable loss does not reveal the type of its labels.
    _, size = make_heads(_config(metrics=("accuracy", "mae")), UserObjects(losses=(None, _relative)))
    assert (size.loss, size.loss_name, size.metrics) == (_relative, "_relative", ("accuracy", "mae"))


def test_a_loss_module_of_ones_own_takes_values_whatever_its_name() -> None:
    class cross_entropy_soft(nn.Module):  # noqa: N801
        def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return (output[:, 0] - label).square()

    _, size = make_heads(
        _config(metrics=("accuracy", "mae")), UserObjects(losses=(None, cross_entropy_soft()))
    )
    assert (size.takes_classes, size.metrics) == (False, ("mae",))


def test_a_metric_that_suits_no_output_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'accuracy' is for classification and fits none of the losses"):
        make_heads(_config(losses=("huber", "mse"), metrics=("accuracy",)), UserObjects())


@pytest.mark.parametrize(("lowest", "ignored"), [(-1, -1), (0, None)])
def test_a_label_is_ignored_where_the_data_have_it(
    make_shards: Any, lowest: int, ignored: int | None
) -> None:
    labels = np.arange(ROWS) % 3
    labels[0] = lowest
    columns = {"x": np.zeros(ROWS, np.float32), "kind": labels, "size": np.ones(ROWS, np.float32)}
    objects = UserObjects(losses=(nn.CrossEntropyLoss(ignore_index=-1), None))
    kind, size = make_heads(_config(), objects, make_shards(columns))
    assert (kind.ignored, size.ignored) == (ignored, None)


def test_a_run_with_another_function_as_its_loss_is_another_run(make_shards: Any) -> None:
    columns = {name: np.ones(ROWS, np.float32) for name in ("x", "kind", "size")}
    manifest, module = make_shards(columns), nn.Linear(1, 1)
    old, new = (
        identity_of(_config(), UserObjects(module=module, losses=losses), manifest)
        for losses in ((), (None, _relative))
    )
    (found,) = list_differences(old, new)
    assert found.startswith('loss: ["cross_entropy", "mse"] -> ["cross_entropy", "')
    assert "_relative" in found


def test_a_run_with_another_metric_of_the_same_name_is_another_run(make_shards: Any, tmp_path: Path) -> None:
    columns = {name: np.ones(ROWS, np.float32) for name in ("x", "kind", "size")}
    manifest, module = make_shards(columns), nn.Linear(1, 1)

    def given(metric: Any) -> Any:
        return identity_of(_config(), UserObjects(module=module, metrics={"own": metric}), manifest)

    first = given(partial(_relative, scale=1.0))
    assert list_differences(first, given(partial(_relative, scale=1.0))) == []
    (found,) = list_differences(first, given(partial(_relative, scale=2.0)))
    assert found.startswith("own metrics: ")
    # Numbers that JSON lacks can be read back too.
    unbounded = given(partial(_relative, scale=math.inf))
    run = RunFolder.given(str(tmp_path / "run"), resume=False)
    run.begin(_config(), unbounded)
    run.begin(_config(), given(partial(_relative, scale=math.inf)))
    with pytest.raises(ValueError, match="because these changed: own metrics"):
        run.begin(_config(), first)
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.classification.BinaryF1Score
    same = metric()
    same.update(torch.ones(3), torch.ones(3).long())
    assert list_differences(given(metric()), given(same)) == []
    assert len(list_differences(given(metric()), given(metric(threshold=0.7)))) == 1


class _Noise:
    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.table = {"not": object()}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.randn_like(x)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("transform_batch", _Noise),
        ("transform_in_prediction", lambda p: nn.Sequential(nn.Flatten(), nn.Dropout(p))),
        ("losses", lambda p: (nn.CrossEntropyLoss(label_smoothing=p), None)),
        ("losses", lambda p: (None, partial(_relative, scale=p))),
        # Class weights are a tensor.
        ("losses", lambda p: (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, p])), None)),
        ("losses", lambda p: (partial(nn.functional.cross_entropy, weight=torch.tensor([1, 2, p])), None)),
        ("transform_batch", lambda p: partial(_relative, np.array([1.0, p])[::-1])),
        ("optimizer", lambda p: partial(torch.optim.SGD, lr=p)),
        ("lr_schedule", lambda p: partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=p)),
    ],
)
def test_a_run_with_another_setting_of_a_transform_or_loss_is_another_run(
    make_shards: Any, name: str, make: Any
) -> None:
    columns = {name: np.ones(ROWS, np.float32) for name in ("x", "kind", "size")}
    manifest, module = make_shards(columns), nn.Linear(1, 1)

    def given(value: Any) -> Any:
        return identity_of(_config(), UserObjects(module=module, **{name: value}), manifest)

    used = make(0.5)
    for layer in used if isinstance(used, tuple) else (used,):
        if isinstance(layer, nn.Module):
            layer.eval()
    assert list_differences(given(make(0.5)), given(used)) == []
    assert len(list_differences(given(make(0.5)), given(make(0.1)))) == 1


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e15])
def test_other_rows_are_told_from_another_order_at_every_size(make_shards: Any, size: float) -> None:
    rows = np.random.default_rng(0).normal(size=997) * size
    first, other_order, other_rows = (
        make_shards({"x": values}, name=f"rows-{number}", num_files=3)
        for number, values in enumerate((rows, rows[::-1], np.sign(rows) * np.sqrt(np.abs(rows) * size)))
    )
    assert list_data_differences(first, other_order) == []
    assert list_data_differences(first, other_rows)


def _of_each_per_member(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output[:, 0] - label).square()


def test_only_a_named_loss_says_that_outputs_are_of_members() -> None:
    """A callable with such a name keeps its metrics of the training rows."""
    assert Head(label="y", loss="bce_with_logits_per_member").is_per_member
    assert not Head(label="y", loss=_of_each_per_member).is_per_member
