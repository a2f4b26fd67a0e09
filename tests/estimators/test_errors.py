"""What a user reads when something is wrong: one sentence, the subject, the remedy, nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators import TorchClassificationModel, TorchClassifier, TorchRegressor, WorkerError
from ringspark.models import ModelSpec
from ringspark.pipelines import write_shards

pytestmark = pytest.mark.spark

SPEC = ModelSpec("linear", {"in_features": 2, "out_features": 1})


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    return spark.range(60).select(
        F.array((F.col("id") / 60).cast("float"), F.lit(1.0).cast("float")).alias("features"),
        (F.col("id") % 2).cast("double").alias("label"),
        F.col("id").cast("string").alias("text"),
        F.when(F.col("id") != 7, F.col("id").cast("double")).alias("holey"),
        F.when(F.col("id") == 7, F.lit(float("nan"))).otherwise(1.0).alias("broken"),
        F.col("id").alias("many"),
        (F.col("id") / 60).alias("half"),
        F.col("id").cast("string").cast("binary").alias("bytes"),
        F.when(F.col("id") == 7, F.array("id")).otherwise(F.array("id", "id")).alias("uneven"),
        F.struct("id").alias("pair"),
        F.col("id").cast("decimal(38,2)").alias("exact"),
    )


def _fit(table: Any, root: Path, **changes: Any) -> Any:
    params: dict[str, Any] = {
        "model": SPEC,
        "epochs": 2,
        "batchSize": 8,
        "storageUri": str(root / "storage"),
        "showProgress": False,
    }
    kind = changes.pop("kind", TorchClassifier)
    return kind(**(params | changes)).fit(table)


CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"featuresCol": "featurez"},
        r"featuresCol or inputCols 'featurez' is not a column .* did you mean 'features'\?",
    ),
    ({"labelCol": "labelz"}, r"labelCol 'labelz' is not a column of the DataFrame; did you mean 'label'\?"),
    ({"inputCols": ["text"]}, r"column 'text' has type string, .*; index it with StringIndexer first"),
    ({"labelCol": "text"}, r"column 'text' has type string, .*; index it with StringIndexer first"),
    ({"inputCols": ["bytes"]}, r"column 'bytes' has type binary, .*; decode it into an array of numbers"),
    (
        {"inputCols": ["holey"]},
        r"column 'holey' has nulls in 1 of 60 rows; fill or drop them first, .* or set handleInvalid='skip'",
    ),
    ({"inputCols": ["uneven"]}, r"column 'uneven' has arrays of 1 to 2 elements; .* pad or cut them first"),
    ({"inputCols": ["pair"]}, r"column 'pair' has type struct.*; select its fields as columns of their own"),
    ({"inputCols": ["exact"]}, r"column 'exact' has type decimal\(38,2\); .* cast it to double first"),
    ({"labelCol": "broken"}, r"column 'broken' has 1 NaN values in the train rows; filter or replace them"),
    ({"labelCol": "many"}, r"labelCol 'many' must lie in 0..1 for the 2 classes of model Linear, got 0..59"),
    ({"labelCol": "half"}, r"labelCol 'half' must hold whole class numbers, 59 train rows do not"),
    ({"numWorkers": 1000, "batchSize": 4096}, r"numWorkers \(1000\) must not exceed the \d+ task slots"),
    (
        {"numWorkers": 9},
        r"batchSize counts rows over all workers and must be at least numWorkers \(9\), got 8",
    ),
    (
        {"model": ModelSpec("linear", {"in_features": 2, "out_features": 3}), "kind": TorchRegressor},
        r"model Linear must return \(batch,\) or \(batch, 1\) for labelCol 'label', got \(2, 3\)",
    ),
    (
        {"model": ModelSpec("linear", {"in_features": 5, "out_features": 1})},
        r"model Linear cannot take the input columns \[features \(2, 2\) float32\]: .*match the model",
    ),
    ({"model": nn.Flatten()}, "model Flatten has no trainable parameters; unfreeze some"),
    ({"gradientCheckpointing": "sqrt"}, "gradientCheckpointing='sqrt' found no chain of blocks in Linear"),
    ({"loss": "cross_entropy"}, "loss 'cross_entropy' needs one logit per class, model Linear gives one"),
    ({"learningRate": -1.0}, "learningRate must be above 0 and finite, got -1.0"),
]


@pytest.mark.parametrize(
    ("changes", "message"), CASES, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_one_sentence_and_nothing_left_behind(
    table: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        _fit(table, tmp_path, **changes)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("storage/*"))


def test_an_empty_frame(table: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the DataFrame has no training rows; nothing was written"):
        _fit(table.where("many < 0"), tmp_path)
    assert not list(tmp_path.glob("storage/*"))


def test_an_unwritable_storage(table: Any, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file, not a folder")
    with pytest.raises(
        ValueError, match=r"cannot be written .* choose a folder that this process may write to"
    ):
        _fit(table, tmp_path, storageUri=str(blocked / "inside"))


class FailsOnRankOne(nn.Module):
    """Raises in its third training step on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import horovod.torch as hvd

        if self.training and hvd.is_initialized():
            self.calls += 1
            if self.calls == 3 and hvd.rank() == 1:
                raise ZeroDivisionError("a bug in the model")
        return self.linear(x)  # type: ignore[no-any-return]


def test_a_model_that_raises_on_rank_one_at_step_three(table: Any, tmp_path: Path) -> None:

    with pytest.raises(WorkerError) as caught:
        _fit(table, tmp_path, model=FailsOnRankOne(), numWorkers=2, collective="horovod")
    first_line = str(caught.value).splitlines()[0]
    assert first_line.startswith("rank 1 on host ")
    assert first_line.endswith(
        "failed in phase 'training, epoch 1, step 3': ZeroDivisionError: a bug in the model"
    )
    assert "py4j" not in str(caught.value)
    assert not list(tmp_path.glob("storage/*"))


@pytest.mark.parametrize("damage", ["delete", "cut"])
def test_a_damaged_shard_is_named_before_training(table: Any, tmp_path: Path, damage: str) -> None:
    uri = str(tmp_path / "shards")
    manifest = write_shards(table.select("features", "label"), uri)
    victim = Path(uri, manifest.files[0].path)
    if damage == "delete":
        victim.unlink()
        message = "is missing; write the shards again"
    else:
        victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
        message = "bytes where the manifest says .*; write the shards again"
    estimator = TorchClassifier(model=SPEC, storageUri=str(tmp_path / "storage"), showProgress=False)
    with pytest.raises(ValueError, match=message) as caught:
        estimator.fitOnShards(uri)
    assert victim.name in str(caught.value)
    assert not list(tmp_path.glob("storage/*"))


def test_loading_from_a_folder_that_is_none(spark: Any, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(
            ValueError, match=r"holds no saved TorchClassificationModel .* give the folder that save"
        ):
            TorchClassificationModel.load(str(path))


def test_an_unknown_optimizer() -> None:
    with pytest.raises(ValueError, match=r"optimizer must be one of .* got 'adamm'; did you mean 'adam"):
        TorchClassifier(model=SPEC, optimizer="adamm")


def test_a_keyword_that_is_no_param_names_the_nearest() -> None:
    with pytest.raises(
        TypeError, match=r"TorchClassifier has no Param 'bachSize'; did you mean 'batchSize'\?"
    ):
        TorchClassifier(model=SPEC, bachSize=3)


def test_a_model_is_required(table: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="TorchClassifier needs a model; pass model=ModelSpec"):
        TorchClassifier(storageUri=str(tmp_path)).fit(table)


def test_a_missing_column_in_transform(spark: Any, table: Any, tmp_path: Path) -> None:
    model = _fit(table, tmp_path, epochs=1)
    with pytest.raises(ValueError, match="'features' is not a column of the DataFrame"):
        model.transform(table.drop("features"))


def test_storage_is_required_where_executors_are_elsewhere() -> None:
    from ringspark.estimators.session import _session_folder

    with pytest.raises(ValueError, match="storageUri is not set; on master 'yarn' give a folder"):
        _session_folder("yarn")
    assert os.path.isdir(_session_folder("local[2]"))
