"""Outputs of inner modules as columns: the setting `innerCols`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import functions as F
from spark_tables import run_stream
from torch import nn

from ringspark.estimators import TorchClassifier, TorchEstimator
from ringspark.extras.export.recording import record_program
from ringspark.extras.inner_columns import keep_outputs, measure
from ringspark.models.program import Program

pytestmark = pytest.mark.spark


class Coder(nn.Module):
    """A network of a user's class, which is saved as a program."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.one, self.decoder = nn.Linear(4, 3), nn.Linear(3, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = self.encoder(x)
        return self.decoder(torch.cat([code, self.one(code)], 1))


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    rows = np.random.default_rng(0).normal(size=(64, 4))
    made = [(row.tolist(), int(row[0] > 0)) for row in rows]
    return spark.createDataFrame(made, "features array<double>, label int").coalesce(1).cache()


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"storageUri": str(tmp_path_factory.mktemp("inner")), "showProgress": False, "epochs": 1}


@pytest.fixture(scope="module")
def pipeline(frame: Any, common: dict[str, Any]) -> Any:
    stage = TorchEstimator(model=Coder(), innerCols={"encoder": "code", "one": "single"}, **common)
    return Pipeline(stages=[stage]).fit(frame)


def vectors(frame: Any, column: str = "code") -> Any:
    return np.array([row[0].toArray() for row in frame.select(column).collect()])


def test_a_column_holds_the_output_of_the_module(pipeline: Any, frame: Any) -> None:
    module, scored = pipeline.stages[0].module(), pipeline.transform(frame)
    inputs = torch.tensor([row.features for row in frame.collect()], dtype=torch.float32)
    with torch.no_grad():
        code = module.encoder(inputs)
        assert np.allclose(vectors(scored), code, atol=1e-6)
        # One number per row is a vector too.
        assert np.allclose(vectors(scored, "single"), module.one(code), atol=1e-6)
    assert pipeline.stages[0].transformSchema(frame.schema) == scored.schema


def test_saved_stages_and_streams_have_columns(pipeline: Any, frame: Any, spark: Any, tmp_path: Path) -> None:
    pipeline.write().overwrite().save(f"file:{tmp_path}/model")
    loaded = PipelineModel.load(f"file:{tmp_path}/model")
    assert isinstance(loaded.stages[0].module(), Program)
    expected = vectors(pipeline.transform(frame))
    assert np.allclose(vectors(loaded.transform(frame)), expected, atol=1e-6)
    # A program has only the modules of innerCols at the time of the save.
    with pytest.raises(ValueError, match="no module of Program"):
        loaded.stages[0].copy().setInnerCols({"decoder": "out"}).transform(frame)
    frame.write.parquet(f"file:{tmp_path}/rows")
    stream = loaded.transform(spark.readStream.schema(frame.schema).parquet(f"file:{tmp_path}/rows"))
    found = vectors(run_stream(stream, tmp_path))
    assert np.allclose(np.sort(found[:, 0]), np.sort(expected[:, 0]), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_lower_precisions_have_the_columns(pipeline: Any, frame: Any, precision: str) -> None:
    model = pipeline.stages[0].copy().setInferencePrecision(precision)
    assert np.abs(vectors(model.transform(frame)) - vectors(pipeline.transform(frame))).max() < 0.1


@pytest.mark.slow
def test_evaluation_export_and_invalid_rows_work_as_before(frame: Any, common: Any, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    stage = TorchClassifier(model=network, innerCols={"1": "hidden"}, metrics=["accuracy"], **common)
    model = stage.fit(frame)
    plain = model.copy().setInnerCols(None)
    assert model.evaluate(frame) == plain.evaluate(frame)
    model.export(str(tmp_path / "network.pt2"))
    holes = frame.select(F.when(F.col("label") == 0, F.col("features")).alias("features"))
    there = frame.where("label = 0").count()
    kept = model.copy().setHandleInvalid("keep").transform(holes)
    nulls = "features IS NULL AND hidden IS NULL AND prediction IS NULL"
    assert kept.where(nulls).count() == 64 - there
    skipped = model.copy().setHandleInvalid("skip").transform(holes)
    assert skipped.where("hidden IS NOT NULL").count() == there
    shown = [row.probability.toArray() for row in model.transform(frame).select("probability").collect()]
    assert np.allclose(shown, vectors(plain.transform(frame), "probability"))


class Shapes(nn.Module):
    """Returns an output with the rows in the second dimension, one without rows, and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.pooled, self.pair = nn.Identity(), nn.Identity(), nn.LSTM(4, 2, batch_first=True)
        self.unused = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turned(x[None].expand(3, -1, -1))
        self.pooled(x.mean(0))
        return self.pair(x[:, None])[0][:, 0]


def test_the_dimension_that_counts_rows_is_found() -> None:
    (turned, pair) = measure(Shapes(), ["turned", "pair"], lambda rows: [torch.zeros(rows, 4)])
    assert (turned.rows_dim, turned.width) == (1, 12)
    assert (pair.rows_dim, pair.width) == (0, 2)


def test_a_layer_that_changes_its_input_in_place_does_not_change_the_column() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 1)).eval()
    rows = torch.randn(5, 4)

    def sample(count: int, _: int | None = None) -> tuple[torch.Tensor]:
        return (torch.randn(count, 4),)

    program = record_program(network, sample, [{0: torch.export.Dim("rows")}], inner=("0",))
    expected = network[0](rows)
    assert expected.min() < 0
    for module in (network, program):
        with keep_outputs(module, ["0"]) as found, torch.inference_mode():
            module(rows)
        assert torch.allclose(found["0"], expected, rtol=0, atol=1e-6), type(module)


@pytest.mark.parametrize("name", ["pooled", "unused"])
def test_a_module_without_an_entry_per_row_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"one entry per row, but '{name}' returns"):
        measure(Shapes(), [name], lambda rows: [torch.zeros(rows, 4)])
