"""A saved search is data: loading it does not run code that it names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml.evaluation import RegressionEvaluator

from ringspark.extras.search.saved_search import load_part

pytestmark = pytest.mark.spark

CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
class Net:
    load = staticmethod(lambda path: path)
"""


@pytest.mark.parametrize(
    "named",
    [
        "evil.Net",
        "pyspark.ml.pipeline.PipelineModel",
        "org.apache.spark.ml.PipelineModel",
        "ringspark.estimators.stages.persistence.json",
    ],
)
def test_a_part_of_another_class_is_refused_before_it_is_imported(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    (tmp_path / "evil.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    monkeypatch.syspath_prepend(str(tmp_path))
    metadata = tmp_path / "best-model" / "metadata"
    metadata.mkdir(parents=True)
    text = {"class": named, "uid": "x", "sparkVersion": "4.0.0", "paramMap": {}, "defaultParamMap": {}}
    (metadata / "part-00000").write_text(json.dumps(text))
    with pytest.raises(ValueError, match=f"names the class '{named}', .* set RINGSPARK_ALLOW_PICKLE=1"):
        load_part(str(tmp_path), "best-model")
    assert not (tmp_path / "ran").exists()
    if named == "evil.Net":
        monkeypatch.setenv("RINGSPARK_ALLOW_PICKLE", "1")
        assert load_part(str(tmp_path), "best-model").endswith("best-model")
        del sys.modules["evil"]


def test_an_evaluator_of_spark_is_loaded(spark: Any, tmp_path: Path) -> None:
    RegressionEvaluator(metricName="mae").save(str(tmp_path / "evaluator"))
    assert load_part(str(tmp_path), "evaluator").getMetricName() == "mae"
