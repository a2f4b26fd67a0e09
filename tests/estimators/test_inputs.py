"""`fit` and `transform` pass a network the same numbers for every column type."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from py4j.protocol import MEMORY_COMMAND_NAME
from pyspark.sql import functions as F
from ready_models import ready_model
from small_networks import Net, shows
from spark_tables import quiet, time_zone, values_of
from torch import nn

from ringspark.estimators import TorchClassificationModel, TorchRegressionModel, TorchRegressor, trained_model
from ringspark.estimators.columns.expressions import to_column
from ringspark.estimators.columns.feeds import Feed, make_inputs, to_input
from ringspark.estimators.columns.inputs import ModelInput, bind
from ringspark.estimators.training.checkpoint.weights import save_checkpoint
from ringspark.estimators.training.feed import to_tensor
from ringspark.models import ModelSpec
from ringspark.pipelines import (
    Array,
    Binary,
    Column,
    Image,
    Ragged,
    Scalar,
    Vocabulary,
    open_reader,
    write_shards,
)

pytestmark = pytest.mark.spark

CLOCK = "timestamp_ntz'2024-03-10 00:30:15.123457' + make_interval(0, 0, 0, 0, 0, 17 * cast(id as int))"
# Dates and times are from before 1970, across daylight-saving changes, to beyond the nanosecond range.
COLUMNS = {
    "flag": "id % 3 = 0",
    "byte": "cast(id - 20 as tinyint)",
    "key": "id + 16777216",
    "number": "id / 7",
    "day": "if(id = 0, date'0001-01-01', date_add(date'1969-12-20', cast(id as int)))",
    "clock": "CASE id WHEN 1 THEN timestamp_ntz'1969-12-31 23:59:59.999999' "
    f"WHEN 2 THEN timestamp_ntz'3000-01-01 00:00:00.000001' ELSE {CLOCK} END",
    "moment": "cast(concat(cast(clock as string), 'Z') as timestamp)",
    "price": "cast(id / 8 as decimal(12, 3))",
    "flat": "array(cast(id / 3 as float), cast(id as float))",
    "ids": "array(key, id, -id)",
    "flags": "array(array(id % 2 = 0, true), array(id % 5 = 0, false))",
    "cube": "array(array(array(id / 3, 1D), array(2D, -id / 9)), array(array(0D, 4D), array(5D, number)))",
    "whole": "named_struct('moment', moment, 'in', named_struct('clock', clock, 'key', key))",
    "mixed": "named_struct('number', number, 'day', day, 'in', named_struct('flag', flag, 'price', price))",
}


def _seen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Returns each input in a Python worker of `transform` as text: dtype, shape and bytes per row."""
    for batch in batches:
        columns = [batch.column(0)]
        for name, column in zip(batch.schema.names[1:], batch.columns[1:], strict=True):
            values = to_input(name, column)
            text = f"{values.dtype} {values.shape[1:]} "
            columns.append(pa.array([text + row.tobytes().hex() for row in values]))
        yield pa.RecordBatch.from_arrays(columns, batch.schema.names)


def test_fit_and_transform_see_the_same_numbers(spark, tmp_path):
    from pyspark.ml.linalg import Vectors

    with time_zone(spark, "America/New_York"):
        frame = spark.range(40)
        for column, sql in COLUMNS.items():
            frame = frame.withColumn(column, F.expr(sql))
        vectors = [
            (row, Vectors.sparse(3, [1], [row / 3]) if row % 2 else Vectors.dense([row, 0.1, 2.0]))
            for row in range(2**24, 2**24 + 40)
        ]
        vectors = spark.createDataFrame(vectors, ["key", "vector"])
        frame = frame.drop("id").join(vectors, "key").coalesce(1).sort("key")
        manifest = write_shards(frame, str(tmp_path / "s"))

        fields = frame.schema.fields
        values = [to_column(bind(ModelInput(), field).values).alias(field.name) for field in fields]
        names = [f"{name}_seen" for name in frame.columns]
        given = frame.select("key", *values).toDF("key", *names)
        schema = ", ".join(["key long", *(f"{name} string" for name in names)])
        rows = given.mapInArrow(_seen, schema).sort("key").collect()
    (batch,) = open_reader(manifest, batch_size=100, engine="arrow").batches(0)
    order = np.argsort(batch["key"])
    for name in frame.columns:
        tensor = to_tensor(batch[name][order], torch.device("cpu")).numpy()
        text = f"{tensor.dtype} {tensor.shape[1:]} "
        assert [row[f"{name}_seen"] for row in rows] == [text + row.tobytes().hex() for row in tensor], name


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([1.0, None], "column 'x' has a null or NaN in transform; fill or drop them first"),
        ([[1.0, float("nan")]], "has a null or NaN"),
        ([[True, None]], "has a null or NaN"),
        ([[1.0], None], "has a null or NaN"),
        ([[1.0], [1.0, 2.0]], "arrays of 1 to 2 elements in transform; .* pad or cut"),
        ([[[1.0], [1.0, 2.0]]], "arrays of 1 to 2 elements in dimension 1 in transform"),
    ],
)
def test_what_fit_refuses_transform_refuses(rows, message):
    with pytest.raises(ValueError, match=message):
        to_input("x", pa.array(rows))


def test_a_kept_null_of_bytes_becomes_zeros_if_the_training_had_none():
    feed = Feed(name="x", kind=Binary("raw", shape=(2,)), fills_nulls=True)
    assert make_inputs([feed], [pa.array([b"ab", None], pa.binary())])[0].tolist() == [[97, 98], [0, 0]]


def test_a_network_gets_the_starts_of_ragged_rows():
    kind = Ragged("int64")
    feeds = [Feed(name="x", kind=kind, part=part) for part in (".values", ".offsets")]
    column = pa.array([[1, 2], [], [3]])
    assert [array.tolist() for array in make_inputs(feeds, [column] * 2)] == [[1, 2, 3], [0, 2, 2]]


def test_the_mask_of_an_image_struct_without_pixels_is_that_of_the_shards(spark, tmp_path):
    frame = spark.range(3).selectExpr(
        "id",
        "if(id = 2, null, named_struct('origin', 'a', 'height', 1, 'width', 1, 'nChannels', 1, 'mode', 0, "
        "'data', if(id = 1, null, X'07'))) as image",
    )
    kind = Image(1, 1, channels=1)
    shards = write_shards(
        frame, str(tmp_path / "s"), columns={"image": kind}, handle_invalid={"image": "keep"}
    )
    (batch,) = open_reader(shards, batch_size=3, engine="arrow").batches(0)
    item = ModelInput(column=Column(name="image", kind=kind), part=".isnull", fills_nulls=True)
    mask = bind(item, frame.schema["image"]).values
    assert {row[0]: row[1] for row in frame.select("id", mask).collect()} == dict(
        zip(batch["id"].tolist(), batch["image.isnull"].tolist(), strict=True)
    )


def _digits() -> Net:
    """Returns a network that encodes a struct of three numbers in one number."""
    return shows(lambda x: x.float() @ torch.tensor([1.0, 100.0, 10_000.0]))


def _struct_model(tmp_path: Path, frame: Any, **settings: Any) -> TorchRegressionModel:
    params = {"model": _digits(), "inputCols": ["x"], "epochs": 1, "batchSize": 8}
    return quiet(TorchRegressor, tmp_path / "runs", **params, **settings).fit(frame)


@pytest.mark.extras
def test_the_fields_of_a_struct_are_taken_by_their_names(spark, tmp_path):
    frame = spark.range(30).selectExpr(
        "id",
        "named_struct('a', id / 4, 'in', named_struct('b', id % 2 = 0, 'c', int(id))) as x",
        "1D as label",
    )
    model = _struct_model(tmp_path, frame)
    model.save(str(tmp_path / "model"))
    inner = "named_struct('city', 'Bern', 'c', x.in.c, 'b', x.in.b)"
    other = f"named_struct('in', {inner}, 'z', '', 'a', x.a) as x"
    loaded = TorchRegressionModel.load(str(tmp_path / "model"))
    for known, table in ((model, frame), (loaded, frame.selectExpr("id", other))):
        rows = known.transform(table).collect()
        wanted = [r.id / 4 + 100 * (r.id % 2 == 0) + 10_000 * r.id for r in rows]
        assert [r.prediction for r in rows] == wanted
    for wrong, sentence in (
        (
            "named_struct('a', x.a, 'in', named_struct('b', x.in.b))",
            r"'x' lacks the field 'in\.c' in struct<b:",
        ),
        (
            "named_struct('a', x.a, 'in', named_struct('b', x.in.b, 'c', 1.5D))",
            r"'x\.in\.c' has type double, but the model was trained on int",
        ),
        ("array(1D, 2D, 3D)", "'x' has type array<double>, but the model was trained on struct<a:double,in:"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model.transform(frame.selectExpr(f"{wrong} as x"))


@pytest.mark.slow
def test_evaluate_takes_the_fields_of_a_label_by_their_names(spark, tmp_path):
    frame = spark.range(8).selectExpr(
        "array(float(id), 1F) as features", "named_struct('a', id / 2, 'b', 50D) as label"
    )
    settings = {"model": nn.Linear(2, 2), "metrics": ["mse"], "epochs": 1}
    model = quiet(TorchRegressor, tmp_path / "runs", **settings).fit(frame)
    model.save(str(tmp_path / "model"))
    other = frame.selectExpr("features", "named_struct('b', label.b, 'a', label.a) as label")
    for known in (model, TorchRegressionModel.load(str(tmp_path / "model"))):
        assert known.evaluate(other) == known.evaluate(frame)


def test_a_struct_of_integers_stays_whole_whatever_their_widths(spark, tmp_path):
    frame = spark.range(30).selectExpr(
        "named_struct('a', int(id), 'b', 1, 'c', int(id % 3)) as x", "1D as label", "id"
    )
    wider = frame.selectExpr("named_struct('a', id, 'b', 1Y, 'c', x.c) as x", "id")
    rows = _struct_model(tmp_path, frame).transform(wider).collect()
    assert [r.prediction for r in rows] == [r.id + 100 + 10_000 * (r.id % 3) for r in rows]


def test_a_struct_that_is_or_holds_a_null_is_a_null(spark, tmp_path):
    frame = spark.range(30).selectExpr(
        "id",
        "if(id = 3, null, named_struct('a', id / 4, 'b', if(id = 4, null, 1), 'in', "
        "if(id = 5, null, named_struct('c', if(id = 6, double('NaN'), 2D))))) as x",
        "1D as label",
    )
    missing = {3, 4, 5, 6}
    with pytest.raises(ValueError, match="'x' has nulls in 3 of 30 rows"):
        _struct_model(tmp_path, frame)
    model = _struct_model(tmp_path, frame, handleInvalid="skip")
    assert [*model.summary.history.rows] == [26]
    wanted = {row: row / 4 + 100 + 20_000 for row in range(30) if row not in missing}
    assert {r.id: r.prediction for r in model.transform(frame).collect()} == wanted
    kept = {r.id: r.prediction for r in model.setHandleInvalid("keep").transform(frame).collect()}
    assert {row for row, value in kept.items() if value is None or value != value} == missing
    assert {row: value for row, value in kept.items() if row not in missing} == wanted


def test_nulls_of_booleans_that_the_shards_keep_are_zeros(spark, tmp_path):
    """The network sums a boolean, its null mask and an array of two booleans."""
    weights = torch.tensor([100.0, 1000.0])
    network = shows(lambda flag, mask, flags: flag + 10 * mask + flags @ weights)
    frame = spark.range(12).selectExpr(
        "id",
        "if(id = 3, null, id % 2 = 0) as flag",
        "if(id = 4, null, array(id % 3 = 0, if(id = 6, null, true))) as flags",
        "1D as label",
    )
    write_shards(frame, str(tmp_path / "s"), handle_invalid={"flag": "keep", "flags": "keep"})
    columns = ["flag", "flag.isnull", "flags"]
    estimator = quiet(TorchRegressor, tmp_path / "runs", model=network, inputCols=columns, epochs=1)
    model = estimator.fitOnShards(str(tmp_path / "s"))
    wanted = [
        (row % 2 == 0) + 10 * (row == 3) + 100 * (row % 3 == 0 and row != 4) + 1000 * (row not in (4, 6))
        for row in range(12)
    ]
    assert values_of(model.transform(frame)) == wanted


def test_nulls_of_a_struct_that_the_shards_keep_are_zeros(spark, tmp_path):
    frame = spark.range(12).selectExpr(
        "id",
        "if(id = 3, null, named_struct('a', id, 'b', if(id = 4, null, 1L), 'c', 2L)) as x",
        "1D as label",
    )
    shards = str(tmp_path / "s")
    manifest = write_shards(frame, shards, handle_invalid={"x": "keep"})
    (batch,) = open_reader(manifest, batch_size=20, engine="arrow").batches(0)
    rows = np.argsort(batch["id"])
    wanted = np.array([[0, 0, 0] if row == 3 else [row, row != 4, 2] for row in range(12)])
    assert np.array_equal(batch["x"][rows], wanted)
    assert np.flatnonzero(batch["x.isnull"][rows]).tolist() == [3, 4]
    assert manifest.stats["train"]["x"].nulls == 2
    settings = {"model": _digits(), "inputCols": ["x"], "epochs": 1, "batchSize": 4}
    estimator = quiet(TorchRegressor, tmp_path, runUri=str(tmp_path / "run"), **settings)
    found = estimator.fitOnShards(shards).transform(frame)
    assert values_of(found) == (wanted @ [1, 100, 10_000]).tolist()


@pytest.mark.extras
def test_a_served_classifier_of_strings_names_its_classes(tmp_path):
    from ringspark.extras.serving.served_model import ServedModel

    spec = ModelSpec("linear", {"in_features": 1, "out_features": 3})
    network = spec.build()
    with torch.no_grad():
        network.linear.weight.copy_(torch.tensor([[-1.0], [0.0], [1.0]]))
        network.linear.bias.copy_(torch.tensor([0.0, 0.5, 0.0]))
    save_checkpoint(str(tmp_path), network)
    columns = (
        Column(name="features", kind=Array("float32", (1,))),
        Column(name="label", kind=Vocabulary(words=("no", "maybe"))),
    )
    model = TorchClassificationModel(model=spec)._set_trained(
        str(tmp_path), [(3,)], None, columns=columns, label_columns=["label"]
    )
    found = ServedModel(model).predict(pd.DataFrame({"features": [[-2.0], [0.0], [2.0]]}))
    # The last class represents all unknown strings.
    assert found["predictedLabel"].tolist() == ["no", "maybe", None]
    outputs = ["rawPrediction", "probability", "prediction", "predictedLabel"]
    assert list(found.columns) == outputs
    plain = model.copy({model.predictedLabelCol: ""})
    assert list(ServedModel(plain).predict(pd.DataFrame({"features": [[1.0]]})).columns) == outputs[:-1]


def _added(network: Net, *columns: torch.Tensor) -> torch.Tensor:
    """Adds all columns, with a weight for each."""
    weights = torch.arange(1, len(columns) + 1, dtype=torch.float32)
    return torch.stack([column.float() for column in columns], 1) @ weights[:, None]


def _model_of(columns: dict[str, str], folder: Path) -> TorchRegressionModel:
    kinds = [Column(name=name, kind=Scalar(dtype)) for name, dtype in columns.items()]
    return ready_model(TorchRegressionModel, Net(_added), folder, columns=kinds, inputCols=list(columns))


@pytest.mark.parametrize(
    "handling",
    [pytest.param("error", marks=pytest.mark.slow), pytest.param("skip", marks=pytest.mark.slow), "keep"],
)
def test_many_columns_are_predicted_like_few(spark, tmp_path, monkeypatch, handling):
    types = {"float": "float32", "double": "float64", "bigint": "int64", "boolean": "bool", "date": "int32"}
    columns = {f"{name}.{i}": dtype for name, dtype in types.items() for i in range(8)}
    numbers = [f"{name}.{i}" for name in ("float", "double", "bigint") for i in range(8)]
    frame = spark.range(60).selectExpr(
        "id",
        *(f"cast(id + {name[-1]} AS {name[:-2]}) AS `{name}`" for name in numbers),
        *(f"id % {i + 2} = 0 AS `boolean.{i}`" for i in range(8)),
        *(f"date_add(DATE'1970-01-01', int(id) - {i}) AS `date.{i}`" for i in range(8)),
    )
    if handling != "error":
        for number, name in enumerate(columns):
            if number % 5 == 0:
                frame = frame.withColumn(name, F.when(F.col("id") % 11 != number % 11, F.col(f"`{name}`")))
        nan = F.when(F.col("id") == 3, F.lit(float("nan")))
        frame = frame.withColumn("float.1", F.coalesce(nan, F.col("`float.1`")).cast("float"))
    model = _model_of(columns, tmp_path).setHandleInvalid(handling)
    packed = model.transform(frame)
    found = values_of(packed, "id", "prediction")
    assert packed.columns == [*frame.columns, "prediction"]
    monkeypatch.setattr(trained_model, "PACKED_INPUTS", len(columns) + 1)
    assert found == values_of(model.transform(frame), "id", "prediction")
    complete = frame.toPandas().dropna()["id"].tolist()
    assert [number for number, prediction in found if prediction is not None] == complete
    assert len(complete) == 60 or 0 < len(complete) < 60 == frame.count()


def test_the_calls_of_the_jvm_do_not_grow_with_the_number_of_columns(spark, tmp_path, monkeypatch):
    client, calls = spark.sparkContext._gateway._gateway_client, [0]
    send = client.send_command

    def count(command: str, *args: Any, **kwargs: Any) -> Any:
        # The release of an object counts for the code that made it.
        calls[0] += not command.startswith(MEMORY_COMMAND_NAME)
        return send(command, *args, **kwargs)

    counts = []
    for number in (40, 120):
        columns = {f"x{i}": "float64" for i in range(number)}
        frame = spark.range(5).selectExpr(*(f"cast(id AS double) AS {name}" for name in columns))
        assert len(frame.schema) == number
        model = _model_of(columns, tmp_path / str(number)).setHandleInvalid("keep")
        monkeypatch.setattr(client, "send_command", count)
        calls[0] = 0
        model.transform(frame)
        counts.append(calls[0])
        monkeypatch.undo()
    assert counts[1] < counts[0] + 40
