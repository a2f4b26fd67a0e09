"""Fitted models without a fit: the tests write weights as a training would, then use the model."""

import gc
import sys
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from ready_models import ready_model
from small_networks import Net, linear, outputs_of, shows
from spark_tables import values_of
from torch import nn

from ringspark.estimators import (
    TorchClassificationModel,
    TorchModel,
    TorchRegressionModel,
    trained_model,
    user_code,
)
from ringspark.estimators.columns.expressions import class_name
from ringspark.estimators.columns.feeds import Feed
from ringspark.estimators.inference import predict
from ringspark.estimators.inference.predict import choose_inference_device, run
from ringspark.estimators.inference.predictor import Predictor
from ringspark.estimators.inference.results import Classes, Values
from ringspark.estimators.training.checkpoint.weights import map_checkpoint, save_checkpoint
from ringspark.models import ModelSpec
from ringspark.models.meta_device import build_on_meta, copy_to_meta
from ringspark.pipelines import (
    Binary,
    HashBuckets,
    Padded,
    ShardManifest,
    Vector,
    Vocabulary,
    open_reader,
    storage,
    write_shards,
)

pytestmark = pytest.mark.spark


def echo() -> Net:
    return Net(
        lambda self, *inputs: torch.cat([x.reshape(len(x), -1).float() for x in inputs], dim=1) * self.scale,
        scale=nn.Parameter(torch.ones(1)),
    )


def nans() -> Net:
    """Returns a network that multiplies by 0, so infinite inputs give NaN."""
    network = echo()
    nn.init.zeros_(network.scale)
    return network


def one_and_three() -> Net:
    layers = {"one": nn.Linear(2, 1), "three": nn.Linear(2, 3)}
    return Net(lambda self, x: (self.one(x)[:, 0], self.three(x)), **layers)


def make(
    kind: Any, network: Any, folder: Path, shapes: Any, manifest: ShardManifest | None = None, **params: Any
) -> Any:
    columns = manifest.columns if manifest is not None else ()
    return ready_model(kind, network, folder / "checkpoint", shapes, columns, scale=2.0, seed=3, **params)


@pytest.fixture
def pairs(spark):
    rows = [(i, [float(i) / 3, float(-i * i) / 7]) for i in range(6)]
    return spark.createDataFrame(rows, "id long, features array<double>")


@pytest.mark.parametrize("thresholds", [None, [0.9, 0.05, 0.05]])
@pytest.mark.parametrize("width", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_one_vector_is_predicted_as_transform_predicts_it(pairs, tmp_path, width, thresholds):
    """Names and types match Spark's own LogisticRegressionModel."""
    vectors = pairs.select(array_to_vector("features").alias("features"))
    manifest = write_shards(vectors, str(tmp_path / "s"))
    given = None if thresholds is None else thresholds[: max(2, width)]
    shape = () if width == 1 else (width,)
    model = make(TorchClassificationModel, linear(width), tmp_path, [shape], manifest, thresholds=given)
    assert (model.numFeatures, model.numClasses) == (2, max(2, width))
    for row in model.transform(vectors).collect():
        sparse = Vectors.sparse(2, list(enumerate(row.features)))
        for features in (row.features, row.features.toArray().tolist(), sparse):
            assert model.predict(features) == row.prediction
        np.testing.assert_allclose(model.predictRaw(row.features), row.rawPrediction, rtol=1e-6)
        np.testing.assert_allclose(model.predictProbability(row.features), row.probability, rtol=1e-6)


@pytest.mark.parametrize("handling", ["error", pytest.param("keep", marks=pytest.mark.slow)])
def test_a_table_with_vectors_is_scored_straight_from_parquet(pairs, tmp_path, handling):
    """Spark 4.3 converts columns read from Parquet in a way that refuses vectors."""
    stored = str(tmp_path / "table")
    pairs.withColumn("vector", array_to_vector("features")).write.parquet(stored)
    read = pairs.sparkSession.read.parquet(stored)
    model = make(TorchClassificationModel, linear(3), tmp_path, [(3,)], handleInvalid=handling)
    for column in ("features", "vector"):
        scored = model.copy().setFeaturesCol(column).transform(read)
        assert values_of(scored) == values_of(model.transform(pairs))


@pytest.mark.parametrize("width", [3, 70])
def test_a_server_whose_functions_take_no_vectors_gives_the_same(pairs, tmp_path, monkeypatch, width):
    """Spark before 4.1 lacks vectors in functions, also if a newer Spark Connect client calls it."""
    frame = pairs.withColumn("features", F.when(F.col("id") != 2, F.col("features")))
    model = make(TorchClassificationModel, linear(width), tmp_path, [(width,)], handleInvalid="keep")
    expected = model.transform(frame).orderBy("id").collect()
    monkeypatch.setattr(trained_model, "takes_vectors", lambda spark: False)
    assert model.transform(frame).orderBy("id").collect() == expected
    assert [row.prediction is None for row in expected] == [i == 2 for i in range(6)]


def test_one_vector_of_a_regression_is_a_number_or_several(pairs, tmp_path):
    manifest = write_shards(pairs.select("features"), str(tmp_path / "s"))
    expected = [row.features for row in pairs.collect()]
    one = make(TorchRegressionModel, linear(1), tmp_path / "1", [(1,)], manifest)
    two = make(TorchRegressionModel, echo(), tmp_path / "2", [(2,)], manifest)
    assert [one.predict(row) for row in expected] == values_of(one.transform(pairs))
    assert two.predict(expected[3]) == pytest.approx([2 * value for value in expected[3]])


def test_what_one_vector_cannot_feed_is_refused_in_one_sentence(raw, pairs, tmp_path):
    frame = raw.select("tokens", "number", "id")
    manifest = write_shards(frame, str(tmp_path / "s"), columns={"tokens": Padded()})
    several, padded, ids = (
        make(TorchRegressionModel, echo(), tmp_path / name, [(1,)], manifest, inputCols=columns)
        for name, columns in (("a", ["number", "id"]), ("b", ["tokens"]), ("c", ["id"]))
    )
    for model in (several, padded):
        assert model.numFeatures == -1
        with pytest.raises(ValueError, match="predict takes one vector, but this model was not trained on"):
            model.predict([1.0, 2.0])
    assert (ids.numFeatures, ids.predict([3.0])) == (1, 6.0)
    for features, message in (
        ([0.5], "held whole numbers in the training"),
        ([1.0, 2.0], r"needs the 1 numbers of one row of column 'id', got an array of shape \(2,\)"),
        ([float("nan")], "a vector of numbers without null and NaN"),
        ([None], "a vector of numbers without null and NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            ids.predict(features)


@pytest.mark.modes
@pytest.mark.parametrize("width", [1, 2, 3, 70])
def test_probabilities_are_the_softmax_and_the_largest_wins(pairs, tmp_path, width):
    model = make(TorchClassificationModel, linear(width), tmp_path, [(width,)])
    rows = values_of(model.transform(pairs), "rawPrediction", "probability", "prediction")
    inputs = torch.tensor(values_of(pairs, "features"), dtype=torch.float32)
    logits = outputs_of(model.module(), inputs).double()
    if width == 1:
        logits = torch.cat([-logits, logits], dim=1)
        probabilities = torch.sigmoid(logits)
    else:
        probabilities = logits.softmax(dim=1)
    np.testing.assert_allclose([raw.toArray() for raw, _, _ in rows], logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([p.toArray() for _, p, _ in rows], probabilities, rtol=1e-5)
    assert [prediction for _, _, prediction in rows] == logits.argmax(dim=1).tolist()
    assert model.numClasses == max(2, width)


def test_rows_are_predicted_in_pieces_of_bounded_size(spark, tmp_path):
    """16,384 results per row take 128 KiB, so 512 rows take 64 MiB. Spark joins the resulting batches."""
    spec, width = linear(1 << 14, 1), 1 << 14
    info = save_checkpoint(str(tmp_path / "wide"), spec.build())
    predictor = Predictor(
        model=spec.to_json(),
        weights_uri=str(tmp_path / "wide"),
        weights_id=info.checkpoint_id,
        feeds=(Feed(name="features", shape=(1,)),),
        results=Values(shapes=((width,),)),
        output_widths=(width,),
        batch_size=100,
    )
    ids = (range(650), range(0), range(1))
    batches = [pa.array([[i / 7] for i in some], pa.list_(pa.float32())) for some in ids]
    pieces = list(run(predictor, iter(batches)))
    assert [len(piece) for piece in pieces] == [100, 500, 50, 0, 1]
    expected = outputs_of(predictor.load(), torch.arange(650)[:, None] / 7)[:, 5]
    found = [row[5].as_py() for piece in pieces[:3] for row in piece]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    narrow = make(TorchModel, linear(1, 1), tmp_path, [(1,)], inferenceBatchSize=100)
    frame = spark.range(0, 650, 1, 1).selectExpr("id", "array(id / 7) as features")
    expected = outputs_of(narrow.module(), torch.arange(650)[:, None] / 7)[:, 0]
    found = values_of(narrow.transform(frame))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def sparks_rule(probability: np.ndarray, thresholds: list[float]) -> float:
    """Computes Spark's rule in ProbabilisticClassificationModel: the first index with the largest p / t."""
    best, largest = 0, -np.inf
    for i, (p, t) in enumerate(zip(probability, thresholds, strict=True)):
        scaled = p / t if t else (np.inf if p > 0 else np.nan)
        if scaled > largest:
            best, largest = i, scaled
    return float(best)


@pytest.mark.parametrize(
    ("width", "thresholds"),
    [(1, [0.9, 0.1]), (1, [1.0, 0.0]), (2, [0.01, 0.5]), (3, [0.2, 1.0, 0.4]), (70, [0.0] + [1.0] * 69)],
)
def test_thresholds_divide_probabilities_as_in_spark(pairs, tmp_path, width, thresholds):
    model = make(TorchClassificationModel, linear(width), tmp_path, [(width,)], thresholds=thresholds)
    rows = values_of(model.transform(pairs), "probability", "prediction")
    assert [prediction for _, prediction in rows] == [sparks_rule(p.toArray(), thresholds) for p, _ in rows]


def test_a_class_without_probability_does_not_win_by_a_threshold_of_zero():
    classes = Classes(width=3, thresholds=(0.0, 1.0, 1.0))
    assert classes.decide(np.array([[-np.inf, 0.0, 1.0], [-30.0, 0.0, 1.0]])).tolist() == [2.0, 0.0]


def test_of_equal_logits_the_first_class_wins():
    for width in (1, 2, 3):
        assert Classes(width=width).decide(np.zeros((1, width))) == [0.0]


def test_an_empty_name_leaves_a_column_out(pairs, tmp_path):
    names = {"rawPredictionCol": "", "probabilityCol": ""}
    model = make(TorchClassificationModel, linear(2), tmp_path, [(2,)], **names)
    result = model.transform(pairs)
    assert result.columns == ["id", "features", "prediction"]
    assert model.transformSchema(pairs.schema).names == result.columns


@pytest.mark.modes
def test_each_output_has_a_column(pairs, tmp_path):
    model = make(TorchModel, one_and_three(), tmp_path, [(), (3,)], predictionCols=["one", "three"])
    result = model.transform(pairs)
    kinds = [field.dataType.simpleString() for field in result.schema.fields[2:]]
    assert kinds == ["double", "array<double>"]
    one, three = outputs_of(model.module(), torch.tensor(values_of(pairs, "features"), dtype=torch.float32))
    np.testing.assert_allclose(values_of(result, "one"), one, rtol=1e-6)
    np.testing.assert_allclose(values_of(result, "three"), three, rtol=1e-6)


def test_outputs_need_a_name_each(pairs, tmp_path):
    model = make(TorchModel, one_and_three(), tmp_path, [(), (3,)])
    with pytest.raises(ValueError, match=r"the model has 2 outputs, .* set predictionCols"):
        model.transform(pairs)
    with pytest.raises(ValueError, match="one column for each of the model's 2 outputs, got"):
        model.setPredictionCols(["one"]).transform(pairs)


@pytest.mark.parametrize("thresholds", [None, [0.2, 0.5, 0.3]])
@pytest.mark.parametrize("width", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_nan_among_the_logits_makes_the_class_nan(spark, tmp_path, width, thresholds):
    rows = [[float("inf") if i == hit else 1.0 for i in range(width)] for hit in range(-1, width)]
    frame = spark.createDataFrame(list(enumerate(rows)), "id long, features array<double>")
    if thresholds is not None:
        thresholds = thresholds[: max(2, width)]
    model = make(TorchClassificationModel, nans(), tmp_path, [(width,)], thresholds=thresholds)
    found = values_of(model.transform(frame))
    assert np.isnan(found).tolist() == [False, *[True] * width]
    np.testing.assert_equal([model.predict(row) for row in rows], found)


def test_a_class_that_is_nan_has_no_name(spark):
    frame = spark.createDataFrame([(0, float("nan")), (1, 1.0), (2, None)], "id int, number double")
    named = frame.withColumn("name", class_name(F.col("number"), ["a", "b"]))
    assert values_of(named, "name") == [None, "b", None]


@pytest.mark.parametrize("width", [1, 4, 70])
def test_a_nan_among_others_is_no_null_in_a_narrow_and_a_wide_output(spark, tmp_path, width):
    hit = min(1, width - 1)
    numbers = [float("inf") if i == hit else float(i) for i in range(width)]
    frame = spark.createDataFrame([(0, numbers), (1, None)], "id long, features array<double>")
    values = make(TorchRegressionModel, nans(), tmp_path / "v", [(width,)], handleInvalid="keep")
    expected = [np.nan if i == hit else 0.0 for i in range(width)]
    row, nothing = values_of(values.transform(frame))
    assert nothing is None
    np.testing.assert_array_equal(np.ravel(row).astype(float), expected)
    classes = make(TorchClassificationModel, nans(), tmp_path / "c", [(width,)], handleInvalid="keep")
    (raw, probability, _), nothing = values_of(
        classes.transform(frame), "rawPrediction", "probability", "prediction"
    )
    assert nothing == (None, None, None)
    np.testing.assert_array_equal(raw.toArray(), expected if width > 1 else [np.nan] * 2)
    assert np.isnan(probability.toArray()).all()
    assert classes.transform(frame).schema == classes.transformSchema(frame.schema)
    assert values.transform(frame).schema == values.transformSchema(frame.schema)


def exact() -> Net:
    """Returns a network that gives a whole number that fp32 cannot hold, and a fraction that fp32 rounds."""
    zero = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    return Net(
        lambda self, x: (torch.full((len(x),), 2**24 + 1), 1 / 3 + self.zero.expand(len(x))), zero=zero
    )


def test_whole_numbers_and_doubles_are_not_rounded_to_fp32(pairs, tmp_path):
    model = make(TorchModel, exact(), tmp_path, [(), ()], predictionCols=["whole", "third"])
    assert set(values_of(model.transform(pairs), "whole", "third")) == {(2**24 + 1, 1 / 3)}


def test_rows_around_an_invalid_one_keep_their_exact_predictions(tmp_path):
    info = save_checkpoint(str(tmp_path), exact())
    predictor = Predictor(
        model=user_code.dumps(copy_to_meta(exact())),
        weights_uri=str(tmp_path),
        weights_id=info.checkpoint_id,
        feeds=(Feed(name="x", shape=(1,)),),
        results=Values(shapes=((), ())),
        output_widths=(1, 1),
        batch_size=8,
        keeps_rows=True,
    )
    rows = pa.array([[1.0], [2.0], [3.0]]), pa.array([True, False, True])
    (found,) = run(predictor, iter([rows]))
    known = {"c0": 2**24 + 1, "c1": 1 / 3}
    assert found.to_pylist() == [known, None, known]


def count(network: Net, x: torch.Tensor) -> torch.Tensor:
    """Records each forward pass in a file."""
    with open(network.file, "a") as file:
        file.write(f"{len(x)}\n")
    return network.line(x)


@pytest.mark.parametrize("handling", [pytest.param("error", marks=pytest.mark.slow), "skip", "keep"])
@pytest.mark.parametrize("width", [1, pytest.param(2, marks=pytest.mark.slow), 70])
def test_a_filter_on_the_prediction_runs_the_network_once(pairs, tmp_path, width, handling):
    log = tmp_path / "rows"
    model_class = TorchRegressionModel if width == 1 else TorchClassificationModel
    module = Net(count, file=str(log), line=nn.Linear(2, width))
    model = make(model_class, module, tmp_path, [(width,)], handleInvalid=handling)
    log.write_text("")
    assert model.transform(pairs).where("prediction > -1000").select("id").count() == 6
    assert sum(map(int, log.read_text().split())) == 6
    log.write_text("")
    # Spark pushes a filter on another column below the network.
    assert model.transform(pairs).where("id < 2").select("prediction").count() == 2
    assert sum(map(int, log.read_text().split())) == 2


INVALID = {
    "array<double>": [[1.0, 2.0], None, [1.0, None], [float("nan"), 1.0]],
    "array<float>": [[1.0, 2.0], None, [1.0, None], [float("nan"), 1.0]],
    "array<array<double>>": [[[1.0, 2.0]], None, [None], [[1.0, float("nan")]], [[None, 2.0]]],
    "array<bigint>": [[1, 2], None, [None, 1]],
    "double": [1.0, None, float("nan")],
    "bigint": [1, None],
    "boolean": [True, None],
    "date": ["1970-01-02", None],
}

# The other types differ in their elements only.
QUICK = ("array<double>", "double", "boolean", "date")


@pytest.mark.parametrize(
    "data_type", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in INVALID]
)
def test_invalid_rows_are_left_out_or_kept_without_a_prediction(spark, tmp_path, data_type):
    text = data_type == "date"
    frame = spark.createDataFrame(
        list(enumerate(INVALID[data_type])), f"id long, features {'string' if text else data_type}"
    )
    if text:
        frame = frame.selectExpr("id", "to_date(features) as features")
    width = np.ravel(1 if text else INVALID[data_type][0]).size
    model = make(TorchModel, echo(), tmp_path, [(width,)])
    expected = 2.0 if width == 1 else [2.0, 4.0]
    skipped = model.copy({model.handleInvalid: "skip"}).transform(frame)
    assert values_of(skipped, "id", "prediction") == [(0, expected)]
    kept = model.copy({model.handleInvalid: "keep"}).transform(frame)
    assert values_of(kept) == [expected] + [None] * (len(INVALID[data_type]) - 1)
    with pytest.raises(Exception, match=r"column 'features' has a null or NaN in transform"):
        model.transform(frame).collect()


@pytest.mark.modes
def test_invalid_vectors_are_found_dense_and_sparse(spark, tmp_path):
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql.types import LongType, StructField, StructType

    nan = float("nan")
    vectors = [
        Vectors.dense([1.0, 0.0]),
        Vectors.sparse(2, [1], [3.0]),
        None,
        Vectors.dense([nan, 1.0]),
        Vectors.sparse(2, [0], [nan]),
    ]
    schema = StructType([StructField("id", LongType()), StructField("features", VectorUDT())])
    frame = spark.createDataFrame(list(enumerate(vectors)), schema)
    model = make(TorchClassificationModel, linear(2), tmp_path, [(2,)], handleInvalid="skip")
    assert values_of(model.transform(frame), "id") == [0, 1]
    kept = values_of(
        model.setHandleInvalid("keep").transform(frame), "rawPrediction", "probability", "prediction"
    )
    assert [row == (None, None, None) for row in kept] == [False, False, True, True, True]


def test_ids_beside_a_null_stay_exact(spark, tmp_path):
    """pandas turns a column with a null into floats, which would round 2**60 + 1 to an even number."""
    rows = [(0, 2**60 + 1, 1.0), (1, None, 1.0), (2, 2**60, None), (3, 2**60 + 1, float("nan"))]
    frame = spark.createDataFrame(rows, "id long, key long, x double").coalesce(1)
    odd = shows(lambda key, x: (key % 2).float() + 10 * x)
    model = make(TorchModel, odd, tmp_path, [()], inputCols=["key", "x"], handleInvalid="keep")
    assert values_of(model.transform(frame)) == [11.0, None, None, None]


@pytest.fixture
def raw(spark):
    """Columns that need an entry in `columns`, and columns that need none."""
    rows = [
        (
            i,
            f"word {i % 3}",
            f"key {i}",
            [float(j) for j in range(i % 4 + 1)],
            np.arange(i, i + 6, dtype=np.int16).tobytes(),
            date(2024, 1, 1) + timedelta(i),
            i / 7,
            None if i % 5 == 0 else i / 2,
        )
        for i in range(12)
    ]
    return spark.createDataFrame(
        rows,
        "id long, word string, key string, tokens array<float>, blob binary, day date, number double, "
        "gap double",
    )


def test_raw_columns_become_what_the_shards_held(raw, tmp_path):
    frame = raw.withColumn("vector", array_to_vector(F.array("number", "id")))
    choices = {
        "word": Vocabulary(),
        "key": HashBuckets(5, seed=3),
        "tokens": Padded(length=6, value=-1),
        "blob": Binary("raw", shape=(2, 3), dtype="int16"),
        "vector": Vector("float64"),
    }
    manifest = write_shards(
        frame.coalesce(1), str(tmp_path / "s"), columns=choices, handle_invalid={"gap": "keep"}
    )
    inputs = [
        *("word", "key", "tokens", "tokens.length", "blob"),
        *("day", "number", "gap", "gap.isnull", "vector"),
    ]
    model = make(TorchModel, echo(), tmp_path, [(21,)], manifest, inputCols=inputs)
    unseen = frame.unionByName(frame.limit(1).selectExpr("99 as id", "'new' as word", *frame.columns[2:]))
    predictions = np.array(values_of(model.transform(unseen)))
    (batch,) = open_reader(manifest, batch_size=100, engine="arrow", shuffle=False).batches(0)
    order = np.argsort(batch["id"])
    expected = np.concatenate(
        [batch[name][order].reshape(12, -1).astype(np.float32) for name in inputs], axis=1
    )
    np.testing.assert_array_equal(predictions[:12], 2 * expected)
    # A word that is in no shard gets the id after the last one.
    assert predictions[12, 0] == 2 * 3


@pytest.mark.parametrize(
    ("trained", "taken", "given", "message"),
    [
        ("1D", "int(x)", "cast(x as string)", "'x' has type string; .* in fit, set columns="),
        ("1D", "int(x)", "array(x, x)", "'x' has type array<double>, but the model was trained on double"),
        ("1D", "int(x)", "date'2024-01-01'", "'x' has type date, but the model was trained on double"),
        ("1", "bigint(x)", "double(x)", "'x' has type double, but the model was trained on int"),
    ],
)
def test_another_type_is_refused_on_the_driver(spark, tmp_path, trained, taken, given, message):
    frame = spark.range(1).selectExpr("id", f"{trained} as x")
    manifest = write_shards(frame, str(tmp_path / "s"))
    model = make(TorchModel, echo(), tmp_path, [(1,)], manifest, featuresCol="x")
    assert values_of(model.transform(frame.selectExpr("id", f"{taken} as x"))) == [2.0]
    with pytest.raises(ValueError, match=message):
        model.transform(frame.selectExpr("id", f"{given} as x"))


def test_another_length_is_refused_in_one_sentence(spark, pairs, tmp_path):
    manifest = write_shards(pairs, str(tmp_path / "s"))
    model = make(TorchRegressionModel, linear(1), tmp_path, [(1,)], manifest)
    longer = pairs.selectExpr("id", "concat(features, features) as features")
    for frame in (longer, longer.select("id", array_to_vector("features").alias("features"))):
        with pytest.raises(Exception, match="has 4 numbers per row, but the model was trained on 2"):
            model.transform(frame).collect()


def test_too_long_a_row_to_pad_is_refused(raw, tmp_path):
    manifest = write_shards(raw.select("id", "tokens"), str(tmp_path / "s"), columns={"tokens": Padded()})
    model = make(TorchModel, echo(), tmp_path, [(4,)], manifest, inputCols=["tokens"])
    longer = raw.selectExpr("id", "concat(tokens, tokens) as tokens")
    with pytest.raises(Exception, match=r"'tokens' has an array of [68] elements, .* shorten the array"):
        model.transform(longer).collect()


def test_a_vector_of_mllib_is_refused_in_one_sentence(spark, tmp_path):
    from pyspark.mllib.linalg import Vectors
    from pyspark.mllib.util import MLUtils

    frame = spark.createDataFrame([(0, Vectors.dense([1.0, 2.0]))], ["id", "features"])
    model = make(TorchModel, linear(1), tmp_path, [(1,)])
    with pytest.raises(ValueError, match=r"'features' has a type of the old pyspark.mllib") as failure:
        model.transform(frame)
    assert len(str(failure.value).splitlines()) == 1
    assert model.transform(MLUtils.convertVectorColumnsToML(frame, "features")).count() == 1


@pytest.mark.modes
def test_a_column_of_the_outputs_name_is_not_written_over(pairs, tmp_path):
    model = make(TorchRegressionModel, linear(1), tmp_path, [(1,)])
    taken = pairs.selectExpr("*", "'mine' as Prediction")
    with pytest.raises(ValueError, match="Output column prediction already exists"):
        model.transform(taken)
    with pytest.raises(ValueError, match="Output column prediction already exists"):
        model.transform(model.transform(pairs))
    result = model.setPredictionCol("guess").transform(taken)
    assert values_of(result, "Prediction") == ["mine"] * 6


@pytest.mark.modes
def test_names_with_dots_and_in_another_case_are_found(pairs, tmp_path):
    model = make(TorchRegressionModel, linear(1), tmp_path, [(1,)], featuresCol="my.features")
    expected = values_of(model.transform(pairs.withColumnRenamed("features", "my.features")))
    other = model.transform(pairs.withColumnRenamed("features", "My.Features"))
    assert values_of(other) == expected
    with pytest.raises(ValueError, match=r"'my\.features' is not a column"):
        model.transform(pairs)
    both = pairs.selectExpr("features as `my.features`", "features as `My.Features`")
    with pytest.raises(ValueError, match=r"column 'my\.features' is ambiguous"):
        model.transform(both)


def test_columns_that_share_a_name_pass_through(pairs, tmp_path):
    model = make(TorchRegressionModel, linear(1), tmp_path, [(1,)])
    twice = pairs.selectExpr("id", "features", "id + 1 as note", "id + 2 as note")
    assert model.transform(twice).columns == ["id", "features", "note", "note", "prediction"]
    assert [tuple(row)[2:4] for row in model.transform(twice).orderBy("id").take(2)] == [(1, 2), (2, 3)]


class Heavy(nn.Module):
    """A megabyte of tied weights, a non-persistent buffer, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 512, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(512)
        self.register_buffer("offset", torch.arange(512.0), persistent=False)
        self.register_parameter("extra", nn.Parameter(torch.full((3,), 0.5, dtype=torch.bfloat16)))
        self.also = [self.first.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.second(self.first(x))) + self.offset
        return hidden.sum(1) + (x @ self.also[0]).sum(1) + self.extra.float().sum()


def test_a_users_module_travels_without_its_weights_and_gets_them_all_back(spark, tmp_path):
    module = Heavy()
    module.norm.running_mean.normal_()
    model = make(TorchModel, module, tmp_path, [()])
    assert len(user_code.dumps(model._predictor())) < 50_000
    loaded = model._predictor().load()
    assert loaded.second.weight is loaded.first.weight
    assert loaded.also[0] is loaded.first.weight
    assert loaded.extra.dtype == torch.bfloat16
    x = torch.randn(7, 512)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(x), module.eval()(x), rtol=0, atol=0)
    frame = spark.createDataFrame([(i, x[i].tolist()) for i in range(7)], "id long, features array<float>")
    expected = outputs_of(module, x).double().tolist()
    assert values_of(model.transform(frame.coalesce(1))) == expected


def test_a_spec_is_built_without_memory_for_its_weights():
    spec = ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 1})
    before = torch.random.get_rng_state()
    assert all(parameter.is_meta for parameter in build_on_meta(spec.build).parameters())
    assert torch.random.get_rng_state().equal(before)
    assert not any(parameter.is_meta for parameter in spec.build().parameters())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_local_weights_are_mapped_not_copied(tmp_path):
    model = make(TorchModel, linear(8, 8), tmp_path, [(8,)])
    module = model.module()
    (place,) = {
        (int(start, 16), int(end, 16))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(tmp_path / "checkpoint" / "model.safetensors"))
        for start, end in [line.split()[0].split("-")]
    }
    assert all(place[0] <= parameter.data_ptr() < place[1] for parameter in module.parameters())
    with torch.no_grad():
        next(module.parameters()).zero_()
    assert any(parameter.abs().sum() > 0 for parameter in model.module().parameters())
    assert next(model.module().parameters()).abs().sum() > 0, "a change went into the file"


def test_weights_from_a_store_are_copied_once_for_the_workers_of_an_executor(tmp_path):
    module, uri, cache = nn.Linear(2, 2), "memory://ringspark-test/checkpoint", tmp_path / "cache"
    cache.mkdir()
    try:
        info = save_checkpoint(uri, module)
        for _ in range(2):
            other = nn.Linear(2, 2)
            map_checkpoint(uri, other, cache=str(cache))
            assert other.weight.equal(module.weight)
        (kept,) = cache.glob("*.safetensors")
        assert kept.name == f"ringspark-{info.checkpoint_id}.safetensors"
        other = nn.Linear(2, 2)
        map_checkpoint(uri, other)
        assert other.weight.equal(module.weight)
    finally:
        storage.remove(uri, recursive=True)


def signed(sign: int) -> Net:
    """Returns a network with one layer, and a sign that is not a weight."""
    return Net(lambda self, x: self.sign * self.line(x), sign=sign, line=nn.Linear(2, 1))


@pytest.mark.parametrize("kind", ["module", "spec"])
def test_the_same_weights_in_another_network_are_another_model(pairs, tmp_path, kind):
    networks: list[Any] = [signed(1), signed(-1)]
    if kind == "spec":
        kwargs = {"in_features": 2, "hidden": [4], "out_features": 1}
        networks = [ModelSpec("mlp", kwargs | {"activation": name}) for name in ("relu", "tanh")]
    model = make(TorchModel, networks[0], tmp_path, [(1,)])
    other = model.copy({model.model: networks[1]})
    inputs = torch.tensor(values_of(pairs, "features"), dtype=torch.float32)
    found = [values_of(stage.transform(pairs.coalesce(1))) for stage in (model, other)]
    assert found[0] != found[1]
    with torch.no_grad():
        for stage, predictions in zip((model, other), found, strict=True):
            np.testing.assert_allclose(predictions, stage.module()(inputs)[:, 0], rtol=1e-6)


def test_a_network_is_the_same_to_the_cache_in_each_transform(tmp_path):
    model = make(TorchModel, signed(1), tmp_path, [(1,)])
    assert model._predictor().model == model._predictor().model


@pytest.mark.parametrize(
    ("use_gpu", "addresses", "partition", "devices", "expected"),
    [
        (False, ["1"], 5, 4, "cpu"),
        (True, ["1"], 5, 4, "cuda:1"),
        (True, [], 5, 4, "cuda:1"),
        (True, [], 4, 1, "cuda:0"),
        (True, ["GPU-7f3c"], 2, 1, "cuda:0"),
        (True, ["6"], 3, 2, "cuda:1"),
    ],
)
def test_a_task_computes_where_spark_says_or_its_partition(use_gpu, addresses, partition, devices, expected):
    assert choose_inference_device(use_gpu, addresses, partition, devices) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there_is_one_sentence(pairs, tmp_path):
    model = make(TorchRegressionModel, linear(1), tmp_path, [(1,)], inferenceUseGpu=True)
    with pytest.raises(Exception, match="inferenceUseGpu=True needs a GPU on every host"):
        model.transform(pairs).collect()


def exported(make_shards: Any, tmp_path: Path) -> Any:
    manifest = make_shards({"key": np.arange(8) % 5, "numbers": np.zeros((8, 2), np.float32)})
    layers = {"table": nn.Embedding(5, 3), "line": nn.Linear(2, 3)}
    looked = Net(lambda self, key, x: self.table(key) + torch.relu(self.line(x)), **layers)
    return make(TorchModel, looked, tmp_path, [(3,)], manifest, inputCols=["key", "numbers"])


@pytest.mark.extras
def test_an_exported_program_gives_the_modules_numbers_for_any_number_of_rows(make_shards, tmp_path):
    model = exported(make_shards, tmp_path)
    model.export(str(tmp_path / "out" / "model.pt2"))
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    for rows in (1, 7):
        inputs = (torch.arange(rows) % 5, torch.randn(rows, 2))
        with torch.no_grad():
            torch.testing.assert_close(program(*inputs), model.module()(*inputs))


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_onnx_file_gives_the_modules_numbers_for_any_number_of_rows(make_shards, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = exported(make_shards, tmp_path)
    model.export(str(tmp_path / "model.onnx"), format="onnx")
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    for rows in (1, 7):
        inputs = (torch.arange(rows) % 5, torch.randn(rows, 2))
        (found,) = session.run(None, {"key": inputs[0].numpy(), "numbers": inputs[1].numpy()})
        np.testing.assert_allclose(found, outputs_of(model.module(), *inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.extras
def test_what_cannot_be_traced_is_one_sentence(make_shards, tmp_path):
    manifest = make_shards({"numbers": np.zeros((8, 2), np.float32)})
    branching = Net(lambda self, x: self.line(x) if x.sum() > 0 else -self.line(x), line=nn.Linear(2, 1))
    model = make(TorchModel, branching, tmp_path, [(1,)], manifest, inputCols=["numbers"])
    with pytest.raises(ValueError, match=r"Net cannot be exported .* without branches") as failure:
        model.export(str(tmp_path / "x.pt2"))
    assert len(str(failure.value).splitlines()) == 1
    assert not (tmp_path / "x.pt2").exists()


def _num_on_meta() -> int:
    return sum(issubclass(type(thing), torch.Tensor) and thing.is_meta for thing in gc.get_objects())


def test_a_task_of_transform_leaves_nothing_on_its_gpu(tmp_path, monkeypatch):
    """The meta device replaces the GPU: nothing remains on it when the CUDA cache is emptied."""
    predictor = make(TorchRegressionModel, linear(1), tmp_path, [(1,)])._predictor()
    load, before, held, after = Predictor.load, _num_on_meta(), [], []
    # The library that reads the weights does not support the meta device.
    monkeypatch.setattr(Predictor, "load", lambda self, device, *_, **__: load(self).to(device))
    monkeypatch.setattr(predict, "task_device", lambda use_gpu: "meta")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: after.append(_num_on_meta()))

    def batches() -> Iterator[Any]:
        held.append(_num_on_meta())
        yield from ()

    assert list(predict.run(predictor, batches())) == []
    assert held == [before + 2], "weight and bias"
    assert after == [before]
