"""Columns with types that leave the encoding open, chosen with the setting `columns`."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, LongType, StructType
from small_networks import Net
from spark_tables import quiet
from torch import nn

from ringspark.estimators import TorchClassifier, TorchRegressionModel, TorchRegressor
from ringspark.estimators.columns.inputs import layout_of_inputs, model_inputs, source_columns
from ringspark.models import ModelSpec
from ringspark.pipelines import Array, Column, Padded, Ragged, Sparse, Vocabulary

pytestmark = pytest.mark.spark

CITIES = ["Bern", "Oslo", "Rome"]
# Only the city determines the class. A rare city gets its own id only if `columns` sets no bound.
CLASSES = {"Bern": "cold", "Oslo": "cold", "Rome": "warm", "Lima": "warm"}


@pytest.fixture(scope="module")
def table(spark):
    names = [CITIES[i % 3] for i in range(117)] + ["Lima"] * 3
    rows = [(i, name, CLASSES[name], float(i % 2)) for i, name in enumerate(names)]
    return spark.createDataFrame(rows, "id long, city string, weather string, odd double").repartition(2)


def _classifier(tmp_path: Path, **params: Any) -> TorchClassifier:
    columns = {"featuresCol": "city", "labelCol": "weather", "columns": {"city": Vocabulary()}}
    settings = {"model": nn.Embedding(5, 2), "epochs": 12, "batchSize": 16, "learningRate": 0.3}
    return quiet(TorchClassifier, tmp_path, **(columns | settings | params))


@pytest.mark.modes
def test_strings_are_features_and_classes_and_come_back_as_strings(table, tmp_path):
    model = _classifier(tmp_path, metrics=["accuracy"]).fit(table)
    # Sorted by frequency, then by name.
    assert model.labels == ["cold", "warm"]
    unknown = table.sparkSession.createDataFrame([(1000, "Rome"), (1001, "Cairo")], "id long, city string")
    rows = model.transform(table.select("id", "city").union(unknown)).orderBy("id").collect()
    assert [row.predictedLabel for row in rows[:121]] == [CLASSES[row.city] for row in rows[:121]]
    assert [model.labels[int(row.prediction)] for row in rows] == [row.predictedLabel for row in rows]
    assert model.evaluate(table) == {"accuracy": 1.0}
    schema = model.transformSchema(table.schema)
    assert schema == model.transform(table).schema
    assert model.copy({model.predictedLabelCol: ""}).transform(table).columns[-1] == "prediction"


@pytest.mark.modes
def test_what_cannot_be_a_kind_is_refused_before_anything_is_written(table, tmp_path):
    for columns, sentence in (
        (None, r"column 'city' has type string.*set columns=\{'city': Vocabulary\(max_size=1000\)\}"),
        ({"town": Vocabulary()}, "columns 'town' is not a column of the DataFrame"),
    ):
        with pytest.raises(ValueError, match=sentence):
            _classifier(tmp_path, columns=columns).fit(table)
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_without_a_bound_does_not_fill_the_driver(table, tmp_path, monkeypatch):
    monkeypatch.setattr("ringspark.pipelines.writing.shards.MAX_WORDS", 3)
    with pytest.raises(ValueError, match=r"'city' has more than 3 different strings; keep .* HashBuckets"):
        _classifier(tmp_path).fit(table)
    _classifier(tmp_path, columns={"city": Vocabulary(max_size=4)}, epochs=1).fit(table)
    assert list(tmp_path.glob("shards-*")) == []


def test_a_column_named_like_a_part_is_fed_from_itself():
    name = "user.values"
    inputs = model_inputs([Column(name=name, kind=Ragged("int64"))], [name])
    numbers = ArrayType(LongType())
    schema = StructType().add("user", numbers).add(name, numbers)
    assert [field.name for field in source_columns(inputs, [name], schema, exact=True)] == [name, name]
    padded = model_inputs([Column(name="words", kind=Padded("int64", 3))], ["words", "words.length"])
    fields = source_columns(padded, ["user", "user.length"], schema, exact=True)
    assert [field.name for field in fields] == ["user", "user"]
    with pytest.raises(ValueError, match="name the same column of variable length twice"):
        layout_of_inputs([*inputs, *inputs])


def test_classes_are_numbered_by_the_alphabet_whatever_their_counts(spark, tmp_path):
    """So thresholds and class weights mean the same in every fold."""
    rows = [(float(i % 2), "no" if i % 4 == 0 else "yes") for i in range(16)]
    network = nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 2))
    estimator = quiet(TorchClassifier, tmp_path, model=network, featuresCol="x")
    model = estimator.fit(spark.createDataFrame(rows, "x double, label string"))
    assert model.labels == ["no", "yes"]


def test_nan_inside_arrays_of_a_kind_is_left_out_as_elsewhere(spark, tmp_path):
    nan = float("nan")
    rows = [(float(i), [1.0] * (i % 3), [[float(i)]]) for i in range(12)] + [(1.0, [nan], [[1.0]])]
    table = spark.createDataFrame(rows, "label double, words array<double>, grid array<array<double>>")
    sums = Net(lambda self, words, grid: self.line(words)[:, 0] + grid[:, 0, 0], line=nn.Linear(2, 1))
    kinds = {"words": Padded(), "grid": Array()}
    estimator = quiet(TorchRegressor, tmp_path, model=sums, inputCols=[*kinds], columns=kinds)
    model = estimator.setHandleInvalid("skip").fit(table)
    assert next(iter(model.summary.history.rows)) == 12
    assert model.transform(table).count() == 12


def test_null_strings_are_refused_or_left_out_as_numbers_are(table, tmp_path):
    rows = table.withColumn("city", F.when(F.col("id") != 5, F.col("city")))
    with pytest.raises(ValueError, match="'city' has nulls in 1 of 120 rows"):
        _classifier(tmp_path).fit(rows)
    model = _classifier(tmp_path, handleInvalid="skip").fit(rows)
    assert next(iter(model.summary.history.rows)) == 119
    assert model.transform(rows).count() == 119
    kept = model.copy({model.handleInvalid: "keep"}).transform(rows).where("id = 5").first()
    assert (kept.prediction, kept.predictedLabel) == (None, None)


@pytest.mark.modes
def test_sparse_vectors_reach_a_bag_of_embeddings_without_being_widened(spark, tmp_path):
    """A linear network over 2^18 features; the target is the sum of the values at even indexes."""
    size = 1 << 18
    rows = []
    for i in range(60):
        places = sorted({(i * 7919) % size, (i * 104729 + 1) % size, 2 * i})[: i % 4]
        rows.append((i, Vectors.sparse(size, places, [1.0 + j for j in range(len(places))])))
    table = spark.createDataFrame(rows, ["id", "features"]).repartition(3).sortWithinPartitions("id")
    table = table.withColumn("label", F.col("id") % 5 / F.lit(4.0))
    network, weights = nn.EmbeddingBag(size, 1, mode="sum"), {}
    columns = {"model": network, "columns": {"features": Sparse()}}
    settings = columns | {"optimizer": "sgd", "learningRate": 0.1, "epochs": 2, "batchSize": 8}
    for workers, accumulation in ((1, 1), (2, 3)):
        spread = {"numWorkers": workers, "gradientAccumulation": accumulation, "collective": "torch"}
        model = quiet(TorchRegressor, tmp_path, **settings, **spread).fit(table)
        weights[workers, accumulation] = model.module().weight
    first = weights[1, 1]
    assert all((first - other).abs().max() < 1e-6 for other in weights.values())
    model.write().overwrite().save(str(tmp_path / "model"))
    loaded = TorchRegressionModel.load(str(tmp_path / "model"))
    for row in loaded.transform(table).collect():
        wanted = sum(
            first[place, 0].item() * value
            for place, value in zip(row.features.indices, row.features.values, strict=True)
        )
        assert abs(row.prediction - wanted) < 1e-5
    shorter = spark.createDataFrame([(Vectors.sparse(9, [1], [1.0]),)], ["features"])
    with pytest.raises(Exception, match="vector of size 9 in transform, but the model was trained on size"):
        loaded.transform(shorter).collect()


@pytest.mark.extras
def test_each_element_of_an_array_may_have_its_own_embedding_table(table, tmp_path):
    spec = ModelSpec("tabular", {"cardinalities": [2, 9], "num_numeric": 1, "hidden": [4], "out_features": 2})
    codes = table.withColumn("codes", F.array(F.col("id") % 2, F.col("id") % 9))
    codes = codes.withColumn("numbers", F.array("odd"))
    settings = {"model": spec, "inputCols": ["codes", "numbers"], "labelCol": "weather"}
    assert quiet(TorchClassifier, tmp_path, **settings).fit(codes).labels == ["cold", "warm"]
