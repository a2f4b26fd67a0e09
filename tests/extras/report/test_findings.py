"""Scores on held-out rows in a report, compared with scikit-learn; features of known importance."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from small_networks import Net
from torch import nn

from ringspark.extras.report.held_out.attributions import (
    Feature,
    features_of,
    integrated_gradients,
    permutation_importance,
)
from ringspark.extras.report.held_out.findings import class_findings, number_findings

sklearn_metrics = pytest.importorskip("sklearn.metrics")

Array = np.ndarray[Any, Any]


def _classified(classes: int, rows: int = 500) -> tuple[Array, Array]:
    """Returns probabilities with many ties, and labels that depend on them."""
    drawn = np.random.default_rng(5)
    logits = np.round(drawn.normal(size=(rows, classes)), 1)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = np.array([drawn.choice(classes, p=row) for row in probabilities])
    return probabilities, labels


@pytest.mark.parametrize("classes", [2, 4])
def test_classes_are_counted_as_scikit_learn_counts(classes: int) -> None:
    probabilities, labels = _classified(classes)
    predicted = probabilities.argmax(axis=1)
    found = class_findings(probabilities, predicted, labels)
    matrix = sklearn_metrics.confusion_matrix(labels, predicted)
    assert found.confusion == {(t, p): n for (t, p), n in np.ndenumerate(matrix) if n}
    assert found.accuracy == pytest.approx(sklearn_metrics.accuracy_score(labels, predicted))
    assert found.log_loss == pytest.approx(sklearn_metrics.log_loss(labels, probabilities))
    if classes == 2:
        assert found.roc_auc == pytest.approx(sklearn_metrics.roc_auc_score(labels, probabilities[:, 1]))
    else:
        assert found.roc is None


def test_calibration_is_the_share_of_class_1_in_each_bin() -> None:
    from sklearn.calibration import calibration_curve

    probabilities, labels = _classified(2)
    rows, confidence, right = class_findings(probabilities, labels, labels).confidence.T
    share, mean = calibration_curve(labels, probabilities[:, 1], n_bins=15)
    used = rows > 0
    assert right[used] / rows[used] == pytest.approx(share)
    assert confidence[used] / rows[used] == pytest.approx(mean)


def test_certain_predictions_are_in_the_last_bin_and_have_a_finite_loss() -> None:
    probabilities, labels = np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([1, 0])
    found = class_findings(probabilities, np.ones(2, int), labels)
    assert found.confidence.shape == (15, 3)
    assert found.confidence[-1].tolist() == [2, 2, 1]
    assert found.log_loss == pytest.approx(sklearn_metrics.log_loss(labels, probabilities), rel=0.1)


def test_rows_of_one_class_have_no_roc_curve() -> None:
    found = class_findings(np.array([[0.2, 0.8]] * 3), np.ones(3, int), np.ones(3, int))
    assert found.roc is None
    assert np.isnan(found.roc_auc)
    assert found.accuracy == 1


def test_numbers_are_compared_as_scikit_learn_compares_them() -> None:
    drawn = np.random.default_rng(1)
    labels = drawn.normal(3, 2, 5000)
    predicted = np.round(labels + drawn.normal(0.5, 1, 5000), 1)
    found = number_findings(predicted, labels)
    assert found.r2 == pytest.approx(sklearn_metrics.r2_score(labels, predicted))
    assert found.rmse == pytest.approx(sklearn_metrics.root_mean_squared_error(labels, predicted))
    assert found.mae == pytest.approx(sklearn_metrics.mean_absolute_error(labels, predicted))
    assert found.bias == pytest.approx((predicted - labels).mean())
    assert found.residual_counts.sum() == 5000
    assert (np.diff(found.bin_predicted) > 0).all()
    assert len(found.sample) == 1000
    assert {tuple(pair) for pair in found.sample} <= set(zip(predicted, labels, strict=True))


def _table(rows: int = 400) -> Array:
    """Returns the label, noise that the network reads, and noise that it does not read."""
    return np.random.default_rng(2).normal(size=(rows, 3)).astype(np.float32)


@pytest.mark.parametrize("distance", [0.0, 0.1, 1e17])
def test_residuals_that_differ_by_rounding_alone_have_a_histogram(distance: float) -> None:
    predicted = np.repeat([0.0, 1.0, 3.0], 500)
    found = number_findings(predicted, predicted + distance)
    assert found.residual_counts.sum() == 1500
    assert found.residual_edges[0] <= -distance <= found.residual_edges[-1]
    assert found.mae == pytest.approx(distance)


def test_permutation_finds_the_label_among_noise() -> None:
    table = _table()
    label = table[:, 0]

    def rmse(inputs: Any) -> float:
        x = inputs[0]
        return float(np.sqrt(((x[:, 0] + 0.01 * x[:, 1] - label) ** 2).mean()))

    features = features_of(["f"], [table], [["copy", "noise", "unread"]])
    draw = partial(permutation_importance, rmse, [table], features, unit="RMSE")
    found, again, other = (draw(seed=seed) for seed in (4, 4, 5))
    values = dict(zip(found.features, found.values, strict=True))
    # The difference of independent values with deviation 1 has deviation sqrt(2).
    assert values["copy"] == pytest.approx(2**0.5, rel=0.1)
    assert abs(values["noise"]) < 0.01
    assert values["unread"] == 0
    assert again == found
    assert other.values[0] != found.values[0]


def _first_shuffle(inputs: list[Array], features: list[Feature]) -> list[Array]:
    """Returns the inputs with the first feature's values shuffled."""
    seen: list[Any] = []
    permutation_importance(lambda inputs: seen.append(inputs) or 0.0, inputs, features, unit="loss")
    return seen[1]


def test_arrays_of_one_column_are_shuffled_together() -> None:
    values, lengths, other = _table()[:, :2], np.arange(400), np.arange(400)
    features = features_of(["text", "text", "n"], [values, lengths, other], [[], [], []])
    assert features == [Feature("text", {0: ..., 1: ...}), Feature("n", {2: ...})]
    first = _first_shuffle([values, lengths, other], features)
    assert not np.array_equal(first[1], lengths)
    assert np.array_equal(first[0], values[first[1]])
    assert np.array_equal(first[2], other)


@pytest.mark.parametrize("is_classifier", [False, True])
def test_gradients_of_a_linear_network_are_weight_times_distance(is_classifier: bool) -> None:
    pytest.importorskip("captum")
    table = _table()
    network, features = nn.Linear(3, 1).eval(), features_of(["f"], [table], [[]])
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[2.0, -0.5, 0.0]]))
    found = integrated_gradients(network, [table], features, is_classifier=is_classifier)
    expected = np.abs((table - table.mean(axis=0)) * [2.0, -0.5, 0.0]).mean(axis=0)
    assert found.features == ["f[0]", "f[1]", "f[2]"]
    assert found.values == pytest.approx(expected, abs=1e-4)


def test_gradients_leave_whole_numbers_out_and_say_so() -> None:
    pytest.importorskip("captum")
    table, category = _table(60), np.arange(60) % 5
    features = features_of(["category", "x"], [category, table], [[], []])
    network = Net(lambda self, ids, x: self.embedding(ids) * x, embedding=nn.Embedding(5, 3)).eval()
    found = integrated_gradients(network, [category, table], features, is_classifier=True)
    assert "category" in found.note
    weight = network.embedding.weight.detach().numpy()[category]
    chosen = np.eye(3)[(weight * table).argmax(axis=1)]
    expected = np.abs((table - table.mean(axis=0)) * weight * chosen).mean(axis=0)
    assert found.values == pytest.approx(expected, abs=1e-4)


def test_the_numbers_and_ids_of_a_tables_column_are_one_feature() -> None:
    numbers, ids = _table()[:, :3], np.arange(800).reshape(400, 2)
    features = features_of(["t", "t"], [numbers, ids], [["day", "price", "day"], ["price", "city"]])
    assert features == [
        Feature("day", {0: [0, 2]}),
        Feature("price", {0: [1], 1: [0]}),
        Feature("city", {1: [1]}),
    ]
    first = _first_shuffle([numbers, ids], features[1:2])
    order = first[1][:, 0] // 2
    assert not np.array_equal(order, np.arange(400))
    assert np.array_equal(first[0][:, 1], numbers[order, 1])
    assert np.array_equal(first[0][:, [0, 2]], numbers[:, [0, 2]])
    assert np.array_equal(first[1][:, 1], ids[:, 1])
