"""The report, on scikit-learn's breast cancer data set."""

import io
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
from ringspark.estimators.training.history import EpochRecord

HISTORY = [
    EpochRecord(
        epoch=epoch, steps=1, rows=1, seconds=2.0, learning_rate=1e-3, train_loss=train, validation_loss=held
    )
    for epoch, train, held in ((1, 0.6, 0.5), (2, 0.4, None))
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


def test_table_is_aligned_and_has_a_line_for_each_model(models: list[report.Scored]) -> None:
    lines = report.format_table(models).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.split()[0] for line in lines] == ["model", "logistic", "a"]
    rows = models[0].labels, models[0].probabilities
    metrics = (roc_auc_score(*rows), average_precision_score(*rows), log_loss(*rows))
    assert lines[1].split()[1:] == [f"{metric:.4f}" for metric in metrics]


def test_report_is_one_png_and_leaves_no_figure_behind(models: list[report.Scored], tmp_path: Path) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.image import imread

    uri = tmp_path / "report.png"
    report.save_report(str(uri), models, HISTORY)
    assert imread(io.BytesIO(uri.read_bytes())).shape[:2] == (528, 1650)
    assert plt.get_fignums() == []
    assert [path.name for path in tmp_path.iterdir()] == ["report.png"]


def test_legend_says_which_model_has_which_auc(models: list[report.Scored]) -> None:
    roc, calibration, _ = report.draw_report(models, HISTORY).axes[1:]
    texts = [text.get_text() for text in roc.get_legend().get_texts()]
    auc = roc_auc_score(models[0].labels, models[0].probabilities)
    assert texts[0] == f"logistic (AUC = {auc:.2f})"
    assert texts[-1] == "chance"
    assert {"logistic", "a decision tree"} <= {t.get_text() for t in calibration.get_legend().get_texts()}


def test_learning_curve_has_a_point_per_epoch_and_skips_what_was_not_measured(models):
    training, validation = report.draw_report(models, HISTORY).axes[0].get_lines()
    assert np.asarray(training.get_ydata()).tolist() == [0.6, 0.4]
    assert np.asarray(validation.get_ydata()).tolist() == [0.5]


def test_without_a_history_the_panel_says_so(models: list[report.Scored]) -> None:
    assert report.draw_report(models[:1], []).axes[0].texts[0].get_text() == "no history"


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
