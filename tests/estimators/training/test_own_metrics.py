"""User-defined metrics over several ranks equal the metric over all rows."""

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_one, run_ranks
from small_training import Runs
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.inference.evaluate import Evaluation
from ringspark.estimators.training.objective.metric_set import MetricSet
from ringspark.estimators.training.objective.own_metrics import (
    find_metric,
    is_higher_better,
    name_metrics,
    try_metric,
)
from ringspark.estimators.training.settings.config import UserObjects

torchmetrics = pytest.importorskip("torchmetrics")
classification = pytest.importorskip("torchmetrics.classification")
regression = pytest.importorskip("torchmetrics.regression")

CPU = torch.device("cpu")
ROWS, BATCH = 240, 32


class Spread(torchmetrics.Metric):  # type: ignore[misc,name-defined]
    """Largest minus smallest error; its states use every other reduction too."""

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("most", torch.tensor(-math.inf), dist_reduce_fx="max")
        self.add_state("least", torch.tensor(math.inf), dist_reduce_fx="min")
        self.add_state("average", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")
        # Root of the sum of squares, which is no built-in reduction.
        self.add_state("norm", torch.tensor(0.0), dist_reduce_fx=lambda norms: norms.square().sum(0).sqrt())
        self.add_state("all", [], dist_reduce_fx="cat")

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        errors = outputs - labels
        self.most = torch.max(self.most, errors.max())
        self.least = torch.min(self.least, errors.min())
        self.average = (self.average * self.rows + errors.sum()) / (self.rows + len(errors))
        self.rows = self.rows + len(errors)
        self.norm = (self.norm**2 + (errors**2).sum()).sqrt()
        self.all.append(errors)

    def compute(self) -> torch.Tensor:
        median = torch.cat(self.all).median() if isinstance(self.all, list) else self.all.median()
        return self.most - self.least + 10 * self.average + 100 * self.norm + 1000 * median + self.rows


def absolute(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns one number per row."""
    return (outputs - labels).abs()


def rank_correlation(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns one number for all rows, which is no mean over batches."""
    places = torch.stack([values.argsort().argsort().double() for values in (outputs, labels)])
    return float(torch.corrcoef(places)[0, 1])


CASES: dict[str, tuple[Any, str]] = {
    "BinaryAUROC": (classification.BinaryAUROC(), "one logit"),
    "binned BinaryAUROC": (classification.BinaryAUROC(thresholds=20), "two logits"),
    "BinaryF1Score": (classification.BinaryF1Score(), "two logits"),
    "MulticlassF1Score": (classification.MulticlassF1Score(num_classes=5), "five logits"),
    "MulticlassAccuracy, top 2": (classification.MulticlassAccuracy(num_classes=5, top_k=2), "five logits"),
    "MulticlassAccuracy of two": (classification.MulticlassAccuracy(num_classes=2), "one logit"),
    "MultilabelAUROC": (classification.MultilabelAUROC(num_labels=3), "three labels"),
    "MeanSquaredError": (regression.MeanSquaredError(), "values"),
    # No reduction joins its states: it needs the stacked states of all ranks.
    "PearsonCorrCoef": (regression.PearsonCorrCoef(), "values"),
    "ExplainedVariance": (regression.ExplainedVariance(), "values"),
    "every rule": (Spread(), "values"),
    "one number per row": (absolute, "values"),
    "one number": (rank_correlation, "values"),
    "an nn loss by row": (nn.L1Loss(reduction="none"), "values"),
}

WIDTHS = {"two logits": 2, "five logits": 5, "three labels": 3}


def _data(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns outputs like a network's, and labels like a column's."""
    g = torch.Generator().manual_seed(sum(map(ord, name)))
    logits = torch.randn(ROWS, WIDTHS.get(name, 1), generator=g)
    if name == "values":
        return logits, logits[:, 0] * 0.5 + torch.randn(ROWS, generator=g)
    shape = (ROWS, 3) if name == "three labels" else (ROWS,)
    return logits, torch.randint(0, 5 if name == "five logits" else 2, shape, generator=g).float()


def _reference(name: str) -> float:
    """Computes the metric in one process, over all rows at once."""
    metric, data = CASES[name]
    outputs, labels = _data(data)
    if data == "values":
        outputs = outputs[:, 0]
    elif data == "one logit" and "Multiclass" in type(metric).__name__:
        outputs = torch.cat([torch.zeros(ROWS, 1), outputs], 1).softmax(1)
    elif data == "one logit":
        outputs = outputs[:, 0].sigmoid()
    elif data == "two logits":
        outputs = outputs.softmax(1)[:, 1]
    else:
        outputs = outputs.softmax(1) if data == "five logits" else outputs.sigmoid()
    if not isinstance(metric, torchmetrics.Metric):
        value = metric(outputs, labels)
        return float(value.mean() if isinstance(value, torch.Tensor) else value)
    metric = metric.clone()
    metric.update(outputs, labels if data == "values" else labels.long())
    return float(metric.compute())


def _set(name: str) -> MetricSet:
    metric, data = CASES[name]
    outputs, labels = _data(data)
    found = try_metric("own", metric, [outputs[:10]], [labels[:10]])
    width = outputs.shape[-1]
    return MetricSet(["own"], width, CPU, own={"own": (metric, found.per_row)})


def _values(collective: Collective) -> Any:
    """Computes every case with a save and a load in the middle; the second of three ranks has no rows."""
    result = {}
    for name, (_, data) in CASES.items():
        outputs, labels = _data(data)
        dealt = [slice(0, ROWS)] if collective.size == 1 else [slice(0, 50), slice(50, 50), slice(50, ROWS)]
        mine = dealt[collective.rank]
        batches = list(zip(outputs[mine].split(BATCH), labels[mine].split(BATCH), strict=True))
        metrics, straight = _set(name), _set(name)
        assert math.isnan(metrics.compute(collective)["own"])
        for number, batch in enumerate(batches):
            straight.update(*batch)
            metrics.update(*batch)
            if number == len(batches) // 2:
                states, metrics = metrics.states(), _set(name)
                metrics.load_states(states)
        result[name] = metrics.compute(collective)["own"]
        # Saved states continue bit for bit, and computing changes nothing.
        assert straight.compute(collective)["own"] == metrics.compute(collective)["own"] == result[name]
        metrics.reset()
        assert math.isnan(metrics.compute(collective)["own"])
    return result


def _check(values: dict[str, float]) -> None:
    assert values == {name: pytest.approx(_reference(name), rel=2e-5) for name in CASES}


def test_a_metric_over_batches_is_that_of_all_rows() -> None:
    _check(run_one(_values))


@pytest.mark.parametrize("name", CASES)
def test_states_of_ranks_that_are_gone_count_beside_new_rows(name: str) -> None:
    """Three ranks, one without rows, stop within an epoch; one rank continues with the other rows."""
    outputs, labels = _data(CASES[name][1])
    gone = [_set(name) for _ in range(3)]
    gone[0].update(outputs[:90], labels[:90])
    gone[2].update(outputs[90:130], labels[90:130])
    heir = _set(name)
    heir.load_states([state for metrics in gone for state in metrics.states()], carried=True)
    heir.update(outputs[130:], labels[130:])
    assert heir.compute(LocalCollective())["own"] == pytest.approx(_reference(name), rel=2e-5)


@pytest.mark.slow
def test_a_metric_over_ranks_is_that_of_the_joined_rows(collective: str) -> None:
    first, *others = run_ranks(3, collective, _values)
    assert others == [first, first]
    _check(first)


def test_the_object_that_was_given_stays_as_it_is() -> None:
    metric = regression.MeanSquaredError()
    metric.update(torch.ones(2), torch.zeros(2))
    try_metric("own", metric, [torch.zeros(4)], [torch.ones(4)])
    metrics = MetricSet(["own"], 1, CPU, own={"own": (metric, False)})
    metrics.update(torch.zeros(3), torch.full((3,), 2.0))
    assert metrics.compute(LocalCollective()) == {"own": 4.0}
    assert (metric.compute(), metric.total) == (1.0, 2)


def test_rows_of_an_ignored_label_count_in_no_metric_of_ones_own() -> None:
    own = {"hits": (lambda o, n: (o.argmax(1) == n).float(), True)}
    metrics = MetricSet(["hits"], 2, CPU, ignored=-1, own=own)
    metrics.update(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, -1]))
    assert metrics.compute(LocalCollective()) == {"hits": 1.0}


def test_metrics_get_names_of_their_own() -> None:
    found = name_metrics(
        [
            "f1",
            regression.MeanSquaredError,
            absolute,
            functools.partial(rank_correlation),
            {"top 2": classification.MulticlassAccuracy(num_classes=5, top_k=2), "half": lambda o, n: o / 2},
            torchmetrics.MetricCollection({"mae": regression.MeanAbsoluteError()}),
        ]
    )
    assert list(found) == ["f1", "MeanSquaredError", "absolute", "rank_correlation", "top 2", "half", "mae"]
    assert isinstance(found["MeanSquaredError"], regression.MeanSquaredError)


class Picky:
    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> float:
        raise ArithmeticError("never")


BAD: list[tuple[Any, str]] = [
    ([lambda o, n: 0], r"a lambda, which has no name for the history; name it, as in metrics="),
    ([absolute, absolute], "must differ from each other, got 'absolute' more than once; drop one, or"),
    ([Picky], r"holds the class Picky; give an object of it, Picky\(...\)"),
    ([classification.MulticlassF1Score], r"needs arguments .*; give MulticlassF1Score\(...\)"),
    ([3], "must hold names, torchmetrics objects or functions .*, got int"),
    ([{"a/b": absolute}], "has the name 'a/b', which .*; use a text without '/'"),
    ([{"loss": absolute}], "has the name 'loss', which .*; use a text without '/'"),
    ([{"score": "f1"}], "renames 'f1' to 'score'; give 'f1' without a name"),
    (
        [torchmetrics.MinMaxMetric(regression.MeanSquaredError())],
        "made of other metrics, .* MeanSquaredError itself",
    ),
    ([{"both": Spread() + Spread()}], "'both' is made of other metrics"),
]


@pytest.mark.parametrize(("given", "sentence"), BAD)
def test_what_is_no_metric_is_refused_as_it_is_given(given: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        name_metrics(given)


class Joined(torchmetrics.Metric):  # type: ignore[misc,name-defined]
    """Metric with several numbers if several workers measured it."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx=None)

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.total = self.total + outputs.sum()

    def compute(self) -> torch.Tensor:
        return self.total  # type: ignore[no-any-return]


NO_NUMBER = "'own' must give one number per row or one number, got a"
TRIALS: list[tuple[Any, str]] = [
    (Picky(), r"'own' cannot take outputs and labels of shapes \(4, 2\) and \(4,\): ArithmeticError: never"),
    (classification.MulticlassConfusionMatrix(num_classes=2), NO_NUMBER + r" tensor \(2, 2\); aver"),
    (lambda o, n: "good", f"{NO_NUMBER} str"),
    (classification.MulticlassF1Score(num_classes=7), "cannot take .* should be equal to number of classes"),
    (lambda o, n: o[:3, 0], NO_NUMBER + r" tensor \(3,\)"),
    (Joined(), NO_NUMBER + r" tensor \(3,\)"),
]


@pytest.mark.parametrize(("metric", "sentence"), TRIALS)
def test_what_gives_no_number_is_refused_after_a_trial(metric: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        try_metric("own", metric, [torch.zeros(4, 2)], [torch.tensor([0, 1, 1, 0])])


def by_class(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns one number per class; a test batch may have as many rows as classes."""
    hits = (outputs.argmax(1) == labels).float()
    return torch.stack([hits[labels == k].sum() for k in range(outputs.shape[1])])


@pytest.mark.parametrize("classes", [2, 5])
def test_one_number_per_class_is_not_taken_for_one_per_row(runs: Runs, classes: int) -> None:
    columns = {"x": np.ones((40, 3), np.float32), "y": np.arange(40) % classes}
    objects = UserObjects(module=nn.Linear(3, classes), metrics={"by_class": by_class})
    changes = {"task": "classification", "losses": ("cross_entropy",), "metrics": ("by_class",)}
    message = rf"'by_class' must give one number .* \({classes},\)"
    with pytest.raises(ValueError, match=message):
        runs.check(columns, objects, **changes)
    width = {"width": classes, "num_classes": classes, "output_shape": (classes,)}
    with pytest.raises(ValueError, match=message):
        Evaluation(names=("by_class",), label="y", **width).with_own({"by_class": by_class})


def test_a_metric_that_fails_later_is_named_with_its_rows() -> None:
    metrics = MetricSet(["own"], 1, CPU, own={"own": (Picky(), False)})
    metrics.update(torch.zeros(5), torch.zeros(5))
    with pytest.raises(ValueError, match="metric 'own' failed on 5 rows: ArithmeticError: never; return NaN"):
        metrics.compute(LocalCollective())


def test_what_is_better_is_said_by_the_object() -> None:
    outputs, labels = [torch.zeros(4)], [torch.ones(4)]
    own = [try_metric(n, m, outputs, labels) for n, m in {"spread": Spread(), "absolute": absolute}.items()]
    assert is_higher_better("spread", own) is False
    assert is_higher_better("absolute", own) is None
    assert is_higher_better("auroc", own) is True
    # With several labels, the longest matching name is the metric.
    assert find_metric("f1_weighted_kind", ["f1", "f1_weighted"]) == "f1_weighted"
    assert find_metric("loss_kind", ["f1"]) is None
