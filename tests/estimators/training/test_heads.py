"""A head holds what is asked of one output, from the settings, the user's objects and the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ringspark.estimators.run.identity import differences, identity_of
from ringspark.estimators.training.objective.heads import Head, make_heads, with_outputs
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects

ROWS = 12


def _config(**changes: Any) -> TrainConfig:
    two = {"label_columns": ("kind", "size"), "losses": ("cross_entropy", "auto"), "loss_weights": (1.0, 0.5)}
    settings: dict[str, Any] = {"shards_uri": "", "run_uri": "", "input_columns": ("x",), "reader": "arrow"}
    return with_outputs(TrainConfig(**(settings | two | changes)), (3, 1))


def _relative(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((output[:, 0] - label) / label).square()


def test_each_output_gets_the_metrics_that_suit_its_loss() -> None:
    kind, size = make_heads(_config(metrics=("accuracy", "mae", "f1")), UserObjects())
    assert kind == Head(
        label="kind", loss="cross_entropy", weight=1.0, width=3, metrics=("accuracy", "f1"), ignored=None
    )
    assert size == Head(label="size", loss="mse", weight=0.5, width=1, metrics=("mae",), ignored=None)
    # A callable says nothing of its labels.
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
    with pytest.raises(ValueError, match=r"'accuracy' is of a classification and suits none of the losses"):
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
    (found,) = differences(old, new)
    assert found.startswith('loss: ["cross_entropy", "mse"] -> ["cross_entropy", "')
    assert "_relative" in found


def _of_each_per_member(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output[:, 0] - label).square()


def test_only_a_named_loss_says_that_outputs_are_of_members() -> None:
    """A callable that happens to be called so keeps its metrics of the training rows."""
    assert Head(label="y", loss="bce_with_logits_per_member").is_per_member
    assert not Head(label="y", loss=_of_each_per_member).is_per_member
