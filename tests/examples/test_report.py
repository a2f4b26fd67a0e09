"""The report, on scikit-learn's breast cancer data set."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score
from sklearn.tree import DecisionTreeClassifier

import report

HISTORY: list[report.Epoch] = [
    {"epoch": 0, "train_loss": 0.6, "validation_loss": 0.5, "learning_rate": 1e-3, "seconds": 2.0},
    {"epoch": 1, "train_loss": 0.4, "validation_loss": None, "learning_rate": 1e-4, "seconds": 2.0},
]


@pytest.fixture(scope="module")
def models() -> list[report.Scored]:
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    train, test = slice(0, 300), slice(300, None)
    return [
        report.Scored(
            name=name, labels=y[test], probabilities=net.fit(x[train], y[train]).predict_proba(x[test])[:, 1]
        )
        for name, net in (
            ("logistic", LogisticRegression()),
            ("a decision tree", DecisionTreeClassifier(max_depth=2, random_state=0)),
        )
    ]


def test_metrics_are_those_of_scikit_learn(models: list[report.Scored]) -> None:
    metrics, (labels, probabilities) = report.measure(models[0]), (models[0].labels, models[0].probabilities)
    assert metrics.roc_auc == pytest.approx(roc_auc_score(labels, probabilities))
    assert metrics.log_loss == pytest.approx(log_loss(labels, probabilities))
    assert metrics.average_precision == pytest.approx(average_precision_score(labels, probabilities))


def test_table_is_aligned_and_has_a_line_for_each_model(models: list[report.Scored]) -> None:
    lines = report.format_table(models).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.split()[0] for line in lines] == ["model", "logistic", "a"]
    assert f"{report.measure(models[1]).roc_auc:.4f}" in lines[2]


def test_report_is_one_png_and_leaves_no_figure_behind(models: list[report.Scored], tmp_path: Path) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.image import imread

    uri = tmp_path / "report.png"
    report.save_report(str(uri), models, HISTORY)
    assert imread(io.BytesIO(uri.read_bytes())).shape[:2] == (528, 1650)
    assert plt.get_fignums() == []
    assert [path.name for path in tmp_path.iterdir()] == ["report.png"]


def test_legend_says_which_model_has_which_auc(models: list[report.Scored]) -> None:
    roc = report.draw_report(models, HISTORY).axes[1]
    legend = roc.get_legend()
    assert legend is not None
    assert legend.get_texts()[0].get_text() == f"logistic, AUC {report.measure(models[0]).roc_auc:.4f}"


def test_learning_curve_has_a_point_per_epoch_and_skips_what_was_not_measured(models):
    training, validation = report.draw_report(models, HISTORY).axes[0].get_lines()
    assert np.asarray(training.get_ydata()).tolist() == [0.6, 0.4]
    assert np.asarray(validation.get_ydata()).tolist() == [0.5]


def test_without_a_history_the_panel_says_so(models: list[report.Scored]) -> None:
    assert report.draw_report(models[:1], []).axes[0].texts[0].get_text() == "no history"


def test_history_is_read_back_and_other_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text(json.dumps([{**entry, "more": 1} for entry in HISTORY]))
    assert report.read_history(str(path)) == HISTORY
    for text in ('[{"epoch": 1}]', "{", "[1]"):
        path.write_text(text)
        with pytest.raises(
            ValueError, match="must be a training history, a JSON list of objects with epoch, train_loss"
        ):
            report.read_history(str(path))


@pytest.mark.parametrize(
    ("labels", "probabilities", "message"),
    [
        ([0, 0], [0.1, 0.2], r"must hold both classes, 0 and 1, got \[0\]"),
        ([0, 1], [0.1], r"two columns of the same rows, got \(2,\) and \(1,\)"),
    ],
)
def test_rows_that_cannot_be_measured_are_refused(labels, probabilities, message):
    with pytest.raises(ValueError, match=message):
        report.Scored(name="network", labels=np.array(labels), probabilities=np.array(probabilities))
