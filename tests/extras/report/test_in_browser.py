"""Reports of three trainings in a browser: of two classes, of numbers, and of images of ten classes."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from browser import Browser, chromium
from pyspark.ml.feature import VectorAssembler

from ringspark.estimators import TorchClassifier, TorchRegressor
from ringspark.models import ModelSpec

pytestmark = [pytest.mark.spark, pytest.mark.slow]

NAMES = ["month", "hour", "minute", "distance", "origin_number", "carrier_number", "weekday"]
COMMON = {"batchSize": 64, "learningRate": 0.01, "validationFraction": 0.2, "logEverySteps": 5}


def _table(spark: Any, label: str) -> Any:
    """Returns rows to train on and to report: named numbers, and a label in SQL."""
    numbers = [f"randn({seed}) AS {name}" for seed, name in enumerate(NAMES)]
    frame = spark.range(0, 5_000, 1, 2).selectExpr(*numbers).selectExpr("*", f"{label} AS label")
    assembler = VectorAssembler(inputCols=NAMES, outputCol="features")
    return assembler.transform(frame).randomSplit([0.8, 0.2], seed=1)


def _classes(spark: Any, path: Path) -> None:
    train, test = _table(spark, "if(month + distance + randn(9) > 1, 'late', 'on time')")
    network = ModelSpec("mlp", {"in_features": len(NAMES), "hidden": [64, 32], "out_features": 2})
    records = {"metrics": ["accuracy", "auroc"], "keep": "best", "timelineEverySteps": 10}
    stage = TorchClassifier(model=network, epochs=8, numWorkers=2, **COMMON, **records)
    stage.fit(train).report(path, test)


def _numbers(spark: Any, path: Path) -> None:
    train, test = _table(spark, "1000 * (month - 2 * hour + randn(9))")
    network = ModelSpec("mlp", {"in_features": len(NAMES), "hidden": [16], "out_features": 1})
    stage = TorchRegressor(model=network, epochs=40, metrics=["mae", "r2"], **COMMON)
    stage.fit(train).report(path, test)


def _images(spark: Any, path: Path) -> None:
    pixels = "transform(sequence(1, 8), i -> transform(sequence(1, 8), j -> float(sin(id % 10 * i * j))))"
    frame = spark.range(0, 1_800, 1, 2).selectExpr(f"array({pixels}) AS image", "int(id % 10) AS label")
    train, test = frame.randomSplit([0.7, 0.3], seed=3)
    network = ModelSpec("resnet", {"in_channels": 1, "out_features": 10, "depths": [1, 1], "width": 8})
    stage = TorchClassifier(model=network, featuresCol="image", epochs=3, metrics=["accuracy"], **COMMON)
    stage.fit(train).report(path, test)


@pytest.fixture
def program() -> str:
    found = chromium()
    if found is None:
        pytest.skip("Chromium is not installed, so nobody looks at the page")
    return found


@pytest.mark.parametrize("make", [_classes, _numbers, _images])
def test_a_page_fits_a_browser_and_loads_nothing(spark: Any, program: str, tmp_path: Path, make: Any) -> None:
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
