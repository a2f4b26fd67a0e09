"""A head combines the settings, the user's objects and the data of one output."""

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
    metrics = ("accuracy", "f1")
    assert kind == Head(label="kind", loss="cross_entropy", weight=1.0, width=3, metrics=metrics)
    assert size == Head(label="size", loss="mse", weight=0.5, width=1, metrics=("mae",))
    # A callable loss does not reveal the type of its labels.
    _, size = make_heads(_config(metrics=("accuracy", "mae")), UserObjects(losses=(None, _relative)))
    assert (size.loss, size.loss_name, size.metrics) == (_relative, "_relative", ("accuracy", "mae"))


def test_a_loss_module_of_ones_own_takes_values_whatever_its_name() -> None:
    class cross_entropy_soft(nn.Module):  # noqa: N801
        def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return (output[:, 0] - label).square()

    config = _config(metrics=("accuracy", "mae"))
    _, size = make_heads(config, UserObjects(losses=(None, cross_entropy_soft())))
    assert (size.takes_classes, size.metrics) == (False, ("mae",))


def test_a_metric_that_suits_no_output_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'accuracy' is for classification and fits none of the losses"):
        make_heads(_config(losses=("huber", "mse"), metrics=("accuracy",)), UserObjects())


@pytest.mark.parametrize(("lowest", "ignored"), [(-1, -1), (0, None)])
def test_a_label_is_ignored_where_data_have_it(make_shards: Any, lowest: int, ignored: int | None) -> None:
    labels = np.arange(ROWS) % 3
    labels[0] = lowest
    columns = {"x": np.zeros(ROWS, np.float32), "kind": labels, "size": np.ones(ROWS, np.float32)}
    objects = UserObjects(losses=(nn.CrossEntropyLoss(ignore_index=-1), None))
    kind, size = make_heads(_config(), objects, make_shards(columns))
    assert (kind.ignored, size.ignored) == (ignored, None)


@pytest.fixture
def given(make_shards: Any) -> Any:
    """Returns a function that returns the identity of a run with these objects."""
    manifest = make_shards({name: np.ones(ROWS, np.float32) for name in ("x", "kind", "size")})
    module = nn.Linear(1, 1)
    return lambda **objects: identity_of(_config(), UserObjects(module=module, **objects), manifest)


def test_a_run_with_another_function_as_its_loss_is_another_run(given: Any) -> None:
    old, new = (given(losses=losses) for losses in ((), (None, _relative)))
    (found,) = list_differences(old, new)
    assert found.startswith('loss: ["cross_entropy", "mse"] -> ["cross_entropy", "')
    assert "_relative" in found


def test_a_run_with_another_metric_of_the_same_name_is_another_run(given: Any, tmp_path: Path) -> None:
    def measured(metric: Any) -> Any:
        return given(metrics={"own": metric})

    first, same, other = (measured(partial(_relative, scale=scale)) for scale in (1.0, 1.0, 2.0))
    assert list_differences(first, same) == []
    (found,) = list_differences(first, other)
    assert found.startswith("own metrics: ")
    # Numbers that JSON lacks can be read back too.
    run = RunFolder.given(str(tmp_path / "run"), resume=False)
    for _ in range(2):
        run.begin(_config(), measured(partial(_relative, scale=math.inf)))
    with pytest.raises(ValueError, match="because these changed: own metrics"):
        run.begin(_config(), first)
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.classification.BinaryF1Score
    used = metric()
    used.update(torch.ones(3), torch.ones(3).long())
    assert list_differences(measured(metric()), measured(used)) == []
    assert len(list_differences(measured(metric()), measured(metric(threshold=0.7)))) == 1


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
def test_another_setting_of_a_transform_or_loss_is_another_run(given: Any, name: str, make: Any) -> None:
    used = make(0.5)
    for layer in used if isinstance(used, tuple) else (used,):
        if isinstance(layer, nn.Module):
            layer.eval()
    first, same, other = (given(**{name: value}) for value in (make(0.5), used, make(0.1)))
    assert list_differences(first, same) == []
    assert len(list_differences(first, other)) == 1


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e15])
def test_other_rows_are_told_from_another_order_at_every_size(make_shards: Any, size: float) -> None:
    rows = np.random.default_rng(0).normal(size=997) * size
    first, other_order, other_rows = (
        make_shards({"x": values}, name=f"rows-{number}", num_files=3)
        for number, values in enumerate((rows, rows[::-1], np.sign(rows) * np.sqrt(np.abs(rows) * size)))
    )
    assert list_data_differences(first, other_order) == []
    assert list_data_differences(first, other_rows)


def test_only_a_named_loss_says_that_outputs_are_of_members() -> None:
    """A callable with such a name keeps its metrics of the training rows."""

    def of_each_per_member(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output[:, 0] - label).square()

    assert Head(label="y", loss="bce_with_logits_per_member").is_per_member
    assert not Head(label="y", loss=of_each_per_member).is_per_member
