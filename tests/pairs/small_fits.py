"""Fits a combination of choices by Spark on a tiny table, and compares it with the plain training."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_callback import Fails
from own_parts import CountSteps
from pyspark.ml.linalg import SparseVector, VectorUDT
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from setting_choices import (
    LENGTH,
    ROWS,
    VOCABULARY,
    WORDS,
    Combination,
    default,
    params_of,
    picture,
    plain,
    promise,
)

from ringspark.estimators import TorchClassifier, WorkerError
from ringspark.pipelines import ShardManifest, write_shards

TOLERANCE = 1e-5
# A training is killed, or stopped and resumed, in this step of about 8.
STEP_OF_LOSS = 5
# These optimizers divide a gradient by its size. A weight whose gradient is zero except for rounding, such as
# the bias of a key, therefore moves by the learning rate in any direction, so only losses are compared.
NORMALIZING = ("adamw", "adafactor", "lamb")
LOSS_TOLERANCE = 1e-4
_CLASS = T.StructType().add("d", T.BooleanType())
COLUMNS: dict[str, T.DataType] = {
    "number": T.LongType(),
    "label": T.DoubleType(),
    "weight": T.DoubleType(),
    "held_out": T.BooleanType(),
    "numbers": T.ArrayType(T.FloatType()),
    "ids": T.ArrayType(T.LongType()),
    "ragged": T.ArrayType(T.LongType()),
    "text": T.StringType(),
    "image": T.BinaryType(),
    "struct": T.StructType().add("a", T.DoubleType()).add("b", T.FloatType()).add("c", _CLASS),
    "value": T.DoubleType(),
    "series": T.ArrayType(T.ArrayType(T.FloatType())),
    "sparse": VectorUDT(),
}


class Place:
    """The table, the folder of the fits, and the plain trainings that have run."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark, self._folder = spark, folder
        self._plain: dict[tuple[tuple[str, str], ...], Any] = {}
        self._shards: dict[str, ShardManifest] = {}
        self._counter = 0
        write_table(spark, str(folder / "table"))
        self._table = spark.read.parquet(str(folder / "table"))

    def table(self, columns: str) -> DataFrame:
        """Returns the rows for a network; windows are computed by their stage."""
        if columns != "windows":
            return self._table
        from ringspark.estimators import SequenceWindows

        stage = SequenceWindows(
            keyCols=["half"],
            timeCol="number",
            valueCols=["value", "weight"],
            steps=4,
            targetCol="label",
            labelCol="next",
            outputCol="features",
        )
        rows = stage.transform(self._table.withColumn("half", F.col("number") % 2))
        return rows.drop("label").withColumnRenamed("next", "label")

    def check(self, combination: Combination) -> None:
        """Fits; raises AssertionError if the training breaks its promise."""
        model = self.fit(combination)
        if combination["privacy"] != default("privacy"):  # its losses are secret
            spent = model.summary.privacy
            assert sum(steps for *_, steps in spent.charged) >= model.summary.steps
            assert all(bool(tensor.isfinite().all()) for tensor in model.module().state_dict().values())
            return
        if promise(combination) == "learns":
            losses = [record.train_loss for record in model.summary.epochs]
            assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
            return
        expected = self.plain(combination)
        is_normalizing = combination["optimizer"] in NORMALIZING
        if not is_normalizing:
            found = model.module().state_dict()
            differences = {
                name: float((found[name].double() - tensor.double()).abs().max())
                for name, tensor in expected.module().state_dict().items()
            }
            worst = max(differences, key=lambda name: differences[name])
            assert differences[worst] <= TOLERANCE, f"{worst} differs by {differences[worst]:.2e}"
        tolerance = LOSS_TOLERANCE if is_normalizing else TOLERANCE
        for left, right in zip(model.summary.epochs, expected.summary.epochs, strict=True):
            assert left.train_loss == pytest.approx(right.train_loss, abs=tolerance)
            assert left.validation_loss == pytest.approx(right.validation_loss, abs=tolerance)

    def plain(self, combination: Combination) -> Any:
        key = tuple(sorted(plain(combination).items()))
        if key not in self._plain:
            self._plain[key] = self._fit(plain(combination), numWorkers=1)
        return self._plain[key]

    def fit(self, combination: Combination) -> Any:
        folder = self._new_folder()
        own: dict[str, Any] = {"callbacks": []}
        if combination["callbacks"] != "none":
            own["callbacks"] = [CountSteps(str(folder / "steps"))]
        continuing = combination["continuing"]
        if continuing != "none":
            own["callbacks"] += [Fails(folder / "once", STEP_OF_LOSS, is_killed=continuing != "resume")]
            own |= {"runUri": str(folder / "run"), "storageUri": None}
        if continuing == "resume":
            with pytest.raises(WorkerError, match=f"step {STEP_OF_LOSS}"):
                self._fit(combination, **own)
            own["resume"] = True
        model = self._fit(combination, **own)
        if continuing != "none":
            assert (folder / "once").exists()
            assert (len(model.summary.resumed_steps), model.summary.restarts) == (1, continuing != "resume")
        if combination["callbacks"] != "none":
            assert (folder / "steps").read_text().split()[-1] == str(model.summary.steps)
        self._predict(combination, model, folder)
        shutil.rmtree(folder)
        return model

    def refuse(self, combination: Combination) -> None:
        """Calls fit, which the driver's check must refuse; uses shards if possible, to run no Spark job."""
        estimator, columns = self.estimator(combination), combination["columns"]
        if combination["rows"] == default("rows"):
            uri = self._shards_of(estimator, columns).uri
            for param in (estimator.columns, estimator.data):  # without effect on shards
                estimator.clear(param)
            estimator.fitOnShards(uri)
        else:
            estimator.fit(self.table(columns))

    def estimator(self, combination: Combination, **changes: Any) -> TorchClassifier:
        settings = {"storageUri": str(self._folder / "storage"), "timeoutSeconds": 60.0, "epochs": 2}
        settings |= {"showProgress": False, "seed": 3, "batchSize": 12}
        return TorchClassifier(**(settings | params_of(combination) | changes))

    def _fit(self, combination: Combination, **changes: Any) -> Any:
        return self.estimator(combination, **changes).fit(self.table(combination["columns"]))

    def _shards_of(self, estimator: TorchClassifier, columns: str) -> ShardManifest:
        if columns not in self._shards:
            uri = str(self._folder / "shards" / str(len(self._shards)))
            rows = self.table(columns).select(estimator.getFeaturesCol(), "label", "weight")
            self._shards[columns] = write_shards(rows, uri, columns=estimator.getColumns())
        return self._shards[columns]

    def _predict(self, combination: Combination, model: Any, folder: Path) -> None:
        how = combination["transform"]
        if how == "module":
            return
        table = self.table(combination["columns"])
        batch = {
            row.number: row.prediction
            for row in model.transform(table).select("number", "prediction").collect()
        }
        assert set(batch.values()) <= {0.0, 1.0}
        if how == "batch":
            return
        arriving = str(folder / "arriving")
        table.write.parquet(arriving)
        stream = self.spark.readStream.schema(table.schema).parquet(arriving)
        query = (
            model.transform(stream)
            .select("number", "prediction")
            .writeStream.format("parquet")
            .option("checkpointLocation", str(folder / "progress"))
            .trigger(availableNow=True)
            .start(str(folder / "scored"))
        )
        assert query.awaitTermination(120)
        assert query.exception() is None
        rows = self.spark.read.parquet(str(folder / "scored")).collect()
        assert {row.number: row.prediction for row in rows} == batch

    def _new_folder(self) -> Path:
        self._counter += 1
        folder = self._folder / f"fit-{self._counter}"
        folder.mkdir()
        return folder


def write_table(spark: Any, uri: str) -> None:
    """Writes the rows as Parquet; every column says something about the label."""
    draw = torch.Generator().manual_seed(7)
    schema = T.StructType([T.StructField(name, kind) for name, kind in COLUMNS.items()])
    rows: list[Any] = []
    for number in range(ROWS):
        label = number // 2 % 2
        half = VOCABULARY // 2
        ids = (torch.randint(1, half, (LENGTH,), generator=draw) + half * label).tolist()
        noise = torch.randn(8, generator=draw).double().tolist()
        shift = 1.0 if label else -1.0
        length = 1 + number % LENGTH
        chosen = sorted(set(ids[:3]))
        rows.append(
            (
                number,
                float(label),
                1.0 + number % 3,
                number % 5 == 0,
                [shift + value for value in noise[:6]],
                ids,
                ids[:length],
                " ".join(WORDS[i] for i in ids[:length]),
                picture(number, bool(label)),
                (shift + noise[0], shift + noise[1], (label == 1,)),
                shift + noise[2] / 4,
                [[shift + noise[time], noise[time]] for time in range(4)],
                SparseVector(VOCABULARY, chosen, [1.0 + abs(value) for value in noise[: len(chosen)]]),
            )
        )
    spark.createDataFrame(rows, schema).repartition(2).write.parquet(uri)


def describe(combination: Combination) -> str:
    """Returns the choices that differ from the defaults, and the Params of the fit."""
    changed = {group: name for group, name in combination.items() if name != default(group)}
    params = {name: value for name, value in params_of(combination).items() if name != "model"}
    return f"{changed}\nParams: {params}"
