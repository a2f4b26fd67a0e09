"""Notebook output without Spark: a summary's plot, and the HTML of stages, shards and plans."""

from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import run_program
from small_training import columns_of, config_of

from ringspark.estimators import TorchClassifier, TorchRegressionModel
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.stages.summary import TrainingSummary
from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.extras.planning.memory.plan import plan_memory
from ringspark.extras.report.page import check_packages
from ringspark.models import ModelSpec
from ringspark.pipelines import plan_epoch

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def summary(make_shards: Any, tmp_path: Path) -> TrainingSummary:
    manifest = make_shards(columns_of(64, 2), validation=np.arange(64) % 4 == 0)
    spec = ModelSpec("linear", {"in_features": 2, "out_features": 1})
    return TrainingSummary.of(train_here(config_of(manifest, tmp_path / "run", model=spec)))


def test_the_plot_has_the_losses_and_leaves_no_figure_behind(summary: TrainingSummary) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    losses, rates = summary.plot().axes
    drawn = {str(line.get_label()): np.asarray(line.get_ydata()).tolist() for line in losses.get_lines()}
    assert drawn["training"] == summary.history["train_loss"].tolist()
    assert drawn["validation"] == summary.history["validation_loss"].tolist()
    assert np.asarray(rates.get_lines()[0].get_ydata()).tolist() == summary.history["learning_rate"].tolist()
    assert plt.get_fignums() == []


def test_a_package_that_is_missing_is_named_with_its_remedy() -> None:
    message = "^a plot needs no_such, and no_such is not installed; pip install"
    with pytest.raises(ImportError, match=message):
        check_packages("a plot", ("no_such",))


def test_a_stage_shows_the_settings_that_are_not_at_their_defaults() -> None:
    stage = TorchClassifier(featuresCol=EVIL, learningRate=0.5, epochs=1)
    html = stage._repr_html_()
    for shown in (">learningRate</td>", ">0.5</td>", "&lt;script&gt;alert(1)&lt;/script&gt;", stage.uid):
        assert shown in html
    # `epochs` has its default value, so it is not shown.
    assert not [hidden for hidden in ("<script", "epochs") if hidden in html]
    assert "All settings are at their defaults." in TorchClassifier()._repr_html_()


def test_a_model_also_shows_what_its_training_came_to(summary: TrainingSummary) -> None:
    model = TorchRegressionModel()
    assert "Trained" not in model._repr_html_()
    model._summary = summary
    loss = summary.epochs[-1].validation_loss
    assert f"Trained 2 epochs, 4 steps, 96 rows in {summary.seconds:,.1f} s" in model._repr_html_()
    assert f"validation loss {loss:.4g}." in model._repr_html_()


def test_shards_show_their_columns_and_sizes(make_shards: Any) -> None:
    html = make_shards({EVIL: np.arange(10.0), "b": np.ones((10, 3))})._repr_html_()
    assert "train: 10 rows in 2 files." in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<script" not in html
    assert ">9.0</td>" in html
    many = make_shards({f"c{i:02}": np.ones(2) for i in range(60)}, name="many")._repr_html_()
    assert "10 more are not shown." in many
    assert "c49" in many
    assert "c50" not in many


def test_plans_show_their_numbers() -> None:
    import torch

    html = plan_epoch([100, 50], num_shards=2, batch_size=32, epoch=3, seed=7)._repr_html_()
    assert "Plan of epoch 3" in html
    assert '<td style="text-align: left">steps</td><td style="text-align: left">5</td>' in html
    batch = torch.zeros(8, 4), torch.zeros(8, 2)
    plan = plan_memory(torch.nn.Linear(4, 2), batch, loss="mse", budget="1 KiB")
    html = plan._repr_html_()
    assert "Memory of a step of 8 rows" in html
    assert f">{show_bytes(plan.peak)}</td>" in html
    assert escape(plan.verdict) in html


@pytest.mark.slow
def test_nothing_of_it_starts_spark() -> None:
    code = """
from ringspark.estimators import TorchRegressor
from pyspark.sql import SparkSession
from pyspark import SparkContext
assert 'TorchRegressor' in TorchRegressor(epochs=7)._repr_html_()
assert SparkSession.getActiveSession() is None and SparkContext._gateway is None
"""
    run_program(code)
