"""Metrics equal scikit-learn's over all rows, for one rank and for several, one of them without rows."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import run_one, run_ranks
from scipy.optimize import minimize_scalar

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.training.objective.metric_set import MetricSet
from ringspark.estimators.training.objective.metrics import METRICS as ALL_METRICS
from ringspark.estimators.training.objective.metrics import check_metrics, metric_info

sk = pytest.importorskip("sklearn.metrics")
pytest.importorskip("torchmetrics")

CPU = torch.device("cpu")
ROWS, BATCH = 240, 32
# For quantiles see tests/extras/quantiles.
METRICS = {name: info for name, info in ALL_METRICS.items() if name not in ("pinball_loss", "coverage")}

# Task, output shape, number of classes in the data.
DATA = {
    "one logit": ("classification", (ROWS,), 2),
    "one logit column": ("classification", (ROWS, 1), 2),
    "two logits": ("classification", (ROWS, 2), 2),
    "five logits": ("classification", (ROWS, 5), 5),
    "an absent class": ("classification", (ROWS, 5), 4),
    "values": ("regression", (ROWS,), 0),
    "value column": ("regression", (ROWS, 1), 0),
    "three values": ("regression", (ROWS, 3), 0),
    "far from zero": ("regression", (ROWS,), 0),
    "small": ("regression", (ROWS,), 0),
}


def _data(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and label; scores have ties, and labels are doubles as in Spark."""
    task, shape, classes = DATA[name]
    g = torch.Generator().manual_seed(sum(map(ord, name)))
    if task == "classification":
        logits = (torch.randn(shape, generator=g) * 3).round() / 2
        return logits, torch.randint(0, classes, (ROWS,), generator=g).double()
    label = torch.randn(shape if shape[-1] == 3 else (ROWS,), generator=g, dtype=torch.float64) + 2
    output = label.view(shape) + 0.3 * torch.randn(shape, generator=g)
    scale, shift = {"far from zero": (1.0, 1e6), "small": (1e-5, 0.0)}.get(name, (1.0, 0.0))
    return output * scale + shift, label * scale + shift


def _names(data: str) -> list[str]:
    # Deviances need positive numbers; see `test_deviance.py`.
    return [n for n, info in METRICS.items() if info.task == DATA[data][0] and "deviance" not in n]


def _reference(data: str) -> dict[str, float]:
    output, label = (t.numpy() for t in _data(data))
    if DATA[data][0] == "regression":
        output = output.reshape(label.shape)
        return {
            "mse": sk.mean_squared_error(label, output),
            "rmse": math.sqrt(sk.mean_squared_error(label, output)),
            "mae": sk.mean_absolute_error(label, output),
            "mape": sk.mean_absolute_percentage_error(label, output),
            "r2": sk.r2_score(label, output),
        }
    logits = output.reshape(ROWS, -1).astype(np.float64)
    logits = np.hstack([np.zeros_like(logits), logits]) if logits.shape[1] == 1 else logits
    width = logits.shape[1]
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    predicted = logits.argmax(1)
    present = np.unique(label).astype(int)
    binary = width == 2
    average: dict[str, Any] = {"average": "binary" if binary else "macro", "zero_division": 0}
    curves = [1] if binary else present
    # Ties follow the log odds for two classes, and torch's rounded probabilities for more.
    scores = logits - logits[:, :1] if binary else torch.from_numpy(logits).softmax(1).numpy()
    return {
        "accuracy": sk.accuracy_score(label, predicted),
        # scikit-learn's own function warns if a predicted class has no rows.
        "balanced_accuracy": float(np.mean([(predicted[label == c] == c).mean() for c in present])),
        "precision": sk.precision_score(label, predicted, **average),
        "recall": sk.recall_score(label, predicted, **average),
        "f1": sk.f1_score(label, predicted, **average),
        "f1_weighted": sk.f1_score(label, predicted, average="weighted", zero_division=0),
        "auroc": float(np.mean([sk.roc_auc_score(label == c, scores[:, c]) for c in curves])),
        "average_precision": float(
            np.mean([sk.average_precision_score(label == c, scores[:, c]) for c in curves])
        ),
        "log_loss": sk.log_loss(label, chances, labels=range(width)),
        "temperature": _temperature(logits, label),
    }


def _temperature(logits: Any, label: Any) -> float:
    """Returns the divisor of the logits, from 1/8 to 8, with the smallest log loss."""

    def log_loss(power: float) -> float:
        return float(F.cross_entropy(torch.tensor(logits / 2.0**power), torch.tensor(label).long()))

    return float(2.0 ** minimize_scalar(log_loss, bounds=(-3, 3), method="bounded").x)


def _all_values(collective: Collective) -> Any:
    """Returns every metric for every data set; the second of three ranks has no rows."""
    result: dict[str, Any] = {}
    for data in DATA:
        _, shape, _ = DATA[data]
        output, label = _data(data)
        metrics = MetricSet(_names(data), shape[-1] if len(shape) > 1 else 1, CPU)
        no_rows = metrics.compute(collective)
        assert all(math.isnan(value) for value in no_rows.values())
        dealt = [slice(0, ROWS)] if collective.size == 1 else [slice(0, 50), slice(50, 50), slice(50, ROWS)]
        mine = dealt[collective.rank]
        for some, of_some in zip(output[mine].split(BATCH), label[mine].split(BATCH), strict=True):
            metrics.update(some, of_some)
        result[data] = metrics.compute(collective)
        # Computing keeps the rank's rows and adds none; a reset removes them.
        assert metrics.compute(collective) == result[data]
        metrics.reset()
        assert all(math.isnan(value) for value in metrics.compute(collective).values())
    return result


def _check(found: dict[str, dict[str, float]]) -> None:
    for data, values in found.items():
        assert list(values) == _names(data)
        expected = _reference(data)
        assert set(expected) == set(values), "a metric has no reference"
        for name, value in values.items():
            # Metrics get fp32 outputs.
            rel = 1e-6 if data == "far from zero" else 1e-9
            # A parabola through the losses of three divisors.
            rel = 1e-3 if name == "temperature" else rel
            assert value == pytest.approx(expected[name], rel=rel), (data, name)


def test_every_metric_is_scikit_learns() -> None:
    _check(run_one(_all_values))


@pytest.mark.slow
def test_every_metric_over_ranks_is_that_of_the_joined_rows(collective: str) -> None:
    first, *others = run_ranks(3, collective, _all_values)
    assert others == [first, first]
    _check(first)


def _compute(names: list[str], output: Any, label: Any, width: int = 1, **changes: Any) -> dict[str, float]:
    metrics = MetricSet(names, width, CPU, **changes)
    metrics.update(torch.as_tensor(output), torch.as_tensor(label))
    return metrics.compute(LocalCollective())


@pytest.mark.parametrize("name", METRICS)
def test_higher_is_better_says_where_the_perfect_model_lies(name: str) -> None:
    label = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    is_class, values = METRICS[name].task == "classification", []
    for quality in (1.0, 0.5, -1.0):
        output = (label * 2 - 1) * 4 * quality if is_class else label + (1 - quality)
        shift = 0 if is_class else 1  # a deviance needs positive numbers
        values.append(_compute([name], output + shift, label + shift)[name])
    assert (values[0] > values[2]) == metric_info(name).higher_is_better
    assert (max if metric_info(name).higher_is_better else min)(values) == values[0]


NAN = float("nan")
VALUES: dict[str, tuple[Any, Any, dict[str, float]]] = {
    # Not defined, and without a warning.
    "one class": ([1.0, -1.0], [0.0, 0.0], {"auroc": NAN, "average_precision": NAN, "accuracy": 0.5}),
    "one row": ([1.0], [3.0], {"r2": NAN, "mse": 4.0}),
    "constant target": ([2.0, 2.0], [2.0, 2.0], {"r2": sk.r2_score([2.0, 2.0], [2.0, 2.0])}),
    "constant target, missed": ([2.0, 2.5], [2.0, 2.0], {"r2": sk.r2_score([2.0, 2.0], [2.0, 2.5])}),
    # These logits are no probabilities.
    "between 0 and 1": (
        [0.1, 0.9, 0.2, 0.3],
        [0.0, 1.0, 1.0, 0.0],
        {
            "accuracy": 0.5,
            "log_loss": sk.log_loss([0, 1, 1, 0], torch.tensor([0.1, 0.9, 0.2, 0.3]).double().sigmoid()),
        },
    ),
    # As fp32 probabilities, all of these are 1. The count of rows needs more than 16 bits.
    "large": (torch.arange(20.0, 24.0).bfloat16(), [0, 0, 1, 1], {"auroc": 1.0, "accuracy": 0.5}),
    "of both tasks": ([1.0, 1.0], [0.0, 1.0], {"accuracy": 0.5, "mae": 0.5}),
}


@pytest.mark.parametrize("name", VALUES)
def test_special_rows_have_the_values_of_the_definition(name: str) -> None:
    output, label, expected = VALUES[name]
    assert _compute(list(expected), output, label) == pytest.approx(expected, nan_ok=True)


def test_no_metrics_make_no_collective_call() -> None:
    metrics = MetricSet([], 1, CPU)
    metrics.update(torch.zeros(3), torch.zeros(3))
    assert metrics.compute(None) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "width", "label", "message"),
    [
        ("mse", 2, (4,), r"one shape, got \(4, 2\) and \(4,\)"),
        ("f1", 3, (4,), r"logits \(batch, 3\) and one class number per row, got \(4, 2\)"),
        ("f1", 2, (4, 5), r"got \(4, 2\) and labels \(4, 5\)"),
    ],
)
def test_shapes_that_differ_are_refused(name: str, width: int, label: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MetricSet([name], width, CPU).update(torch.zeros(4, 2), torch.zeros(label))


CLASS_METRICS = [name for name, info in METRICS.items() if info.task == "classification"]


@pytest.mark.parametrize("ignored", [-100, -1, 0, 4])
@pytest.mark.parametrize("column", [False, True])
def test_rows_with_the_ignored_label_do_not_count(ignored: int, column: bool) -> None:
    output, label = _data("five logits")
    label[::3] = ignored
    kept = label != ignored
    assert 0 < kept.sum() < ROWS
    others = _compute(CLASS_METRICS, output[kept], label[kept], width=5)
    some = _compute(CLASS_METRICS, output, label[:, None] if column else label, width=5, ignored=ignored)
    assert some == others


def test_only_ignored_rows_are_as_no_rows() -> None:
    metrics = MetricSet(["accuracy", "log_loss", "auroc"], 1, CPU, ignored=-100)
    metrics.update(torch.zeros(4, 1), torch.full((4,), -100.0))
    assert all(math.isnan(value) for value in metrics.compute(LocalCollective()).values())
    metrics.update(torch.tensor([2.0, -2.0, 2.0]), torch.tensor([1.0, -100.0, 0.0]))
    assert metrics.compute(LocalCollective())["accuracy"] == 0.5


def test_names_are_checked_on_the_driver() -> None:
    check_metrics(["accuracy", "auroc"], "classification")
    check_metrics(["accuracy", "r2"], "any")
    with pytest.raises(ValueError, match="got 'mse' more than once"):
        check_metrics(["mse", "mse"], "regression")
    with pytest.raises(ValueError, match="did you mean 'auroc'"):
        metric_info("auroc_")


def test_a_missing_torchmetrics_is_named_with_the_remedy(monkeypatch: Any) -> None:
    monkeypatch.setattr("ringspark.estimators.training.objective.metrics.find_spec", lambda name: None)
    check_metrics([], "any")
    with pytest.raises(ValueError, match="pip install torchmetrics, or leave metrics empty"):
        check_metrics(["mse"], "any")
