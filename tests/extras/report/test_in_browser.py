"""Reports of three data sets in a browser: flights by class, a table of numbers, and images of digits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from browser import Browser, chromium
from pyspark.ml.feature import VectorAssembler

from flights import find_raw_tables
from ringspark.estimators import TorchClassifier, TorchRegressor
from ringspark.models import ModelSpec

pytestmark = [pytest.mark.spark, pytest.mark.slow]

COMMON = {"batchSize": 64, "learningRate": 0.01, "validationFraction": 0.2}
FLIGHTS = ("month", "hour", "minute", "distance", "origin_number", "carrier_number", "weekday")


def _flights(spark: Any, path: Path) -> None:
    import pandas as pd

    table = pd.read_csv(find_raw_tables()["flights"]).dropna(subset=["arr_delay"])
    table = table.sample(20_000, random_state=1)
    for name in ("origin", "carrier"):
        table[f"{name}_number"] = table[name].astype("category").cat.codes
    table["weekday"] = pd.to_datetime(table["time_hour"]).dt.day_of_week
    table["arrival"] = np.where(table["arr_delay"] > 15, "late", "on time")
    for name in FLIGHTS:
        table[name] = (table[name] - table[name].mean()) / table[name].std()
    frame = spark.createDataFrame(table[[*FLIGHTS, "arrival"]])
    frame = VectorAssembler(inputCols=list(FLIGHTS), outputCol="features").transform(frame)
    train, test = frame.randomSplit([0.8, 0.2], seed=1)
    network = ModelSpec("mlp", {"in_features": len(FLIGHTS), "hidden": [64, 32], "out_features": 2})
    sizes = {"epochs": 8, "batchSize": 256, "numWorkers": 2, "validationFraction": 0.15}
    records = {"metrics": ["accuracy", "auroc"], "keep": "best", "logEverySteps": 5, "timelineEverySteps": 10}
    model = TorchClassifier(model=network, labelCol="arrival", **sizes, **records).fit(train)
    model.report(path, test)


def _numbers(spark: Any, path: Path) -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    data = sklearn.load_diabetes(as_frame=True)
    table = data.frame.assign(target=data.frame["target"] / 100)
    names = [name for name in table.columns if name != "target"]
    table[names] *= 20
    frame = VectorAssembler(inputCols=names, outputCol="features").transform(spark.createDataFrame(table))
    train, test = frame.randomSplit([0.7, 0.3], seed=2)
    network = ModelSpec("mlp", {"in_features": len(names), "hidden": [16], "out_features": 1})
    records = {"metrics": ["mae", "r2"], "logEverySteps": 2}
    stage = TorchRegressor(model=network, labelCol="target", epochs=40, **COMMON, **records)
    stage.fit(train).report(path, test)


def _digits(spark: Any, path: Path) -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    pixels, digits = sklearn.load_digits(return_X_y=True)
    images = (pixels / 16).reshape(-1, 1, 8, 8).tolist()
    rows = list(zip(images, digits.tolist(), strict=True))
    frame = spark.createDataFrame(rows, "image array<array<array<float>>>, digit int")
    train, test = frame.randomSplit([0.7, 0.3], seed=3)
    network = ModelSpec("resnet", {"in_channels": 1, "out_features": 10, "depths": [1, 1], "width": 8})
    columns = {"featuresCol": "image", "labelCol": "digit"}
    stage = TorchClassifier(model=network, epochs=3, metrics=["accuracy"], **columns, **COMMON)
    stage.fit(train).report(path, test)


@pytest.fixture
def program() -> str:
    found = chromium()
    if found is None:
        pytest.skip("Chromium is not installed, so nobody looks at the page")
    return found


@pytest.mark.parametrize("make", [_flights, _numbers, _digits])
def test_the_page_fits_a_browser_and_asks_it_for_nothing(
    spark: Any, program: str, tmp_path: Path, make: Any
) -> None:
    page = tmp_path / "page.html"
    make(spark, page)
    assert page.stat().st_size < 1_000_000
    assert Browser(program).console(page) == []
    for width in (1200, 700, 500):
        measured = Browser(program, width).measured(page)
        assert measured["wide"] == []
        assert measured["width"] <= measured["window"]
    height = Browser(program).measured(page)["height"]
    Browser(program).picture(page, tmp_path / "page.png", height)
    assert (tmp_path / "page.png").stat().st_size > 50_000


def test_the_browser_would_say_what_is_wrong(program: str, tmp_path: Path) -> None:
    """For a page that loads a script and is too wide, the checks above give other answers."""
    page = tmp_path / "page.html"
    page.write_text(
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
        '<body><script src="no.js"></script><div style="width: 3000px">wide</div></body>'
    )
    assert "Content Security Policy" in " ".join(Browser(program).console(page))
    measured = Browser(program).measured(page)
    assert measured["width"] > measured["window"]
    assert measured["wide"]
