"""Folds on real Spark: guarantees, independence of order and partitions, and error messages."""

from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from changing_frames import random_function
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.functions import array_to_vector
from pyspark.ml.tuning import CrossValidator, TrainValidationSplit
from pyspark.sql import functions as F

from ringspark.estimators import TorchClassifier
from ringspark.extras.tuning import cross_validate, fold_pairs, grouped_folds, stratified_folds, time_folds
from ringspark.extras.tuning import folds as folds_module
from ringspark.models import ModelSpec

pytestmark = pytest.mark.spark

K = 3


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    """200 rows: classes of 140, 50, 7 and 3 rows; groups of 1 to 40 rows; a vector, nulls, a map, a time."""
    plain = spark.range(0, 200, 1, 3).selectExpr(
        "id",
        "CASE WHEN id < 140 THEN 'a' WHEN id < 190 THEN 'b' WHEN id < 197 THEN 'c' ELSE 'd' END AS label",
        "cast(sqrt(id * 8) AS int) AS `a group`",
        "IF(id % 3 = 0, NULL, id % 7) AS some",
        "map('k', id) AS m",
        "timestamp_seconds(3600 * (id DIV 2)) AS t",
        "cast(id % 40 AS double) AS n",
        "date_add(date'2024-02-20', cast(id % 30 AS int)) AS d",
    )
    return plain.withColumn("v", array_to_vector(F.array(F.col("id").cast("double")))).cache()


def shuffled(df: Any) -> Any:
    return df.repartition(7, F.col("n")).orderBy(F.rand(5))


def test_every_class_is_shared_out_up_to_one_row(table: Any) -> None:
    rows = stratified_folds(table, "LABEL", K, seed=4).select("id", "label", "fold").collect()
    assert sorted(row.id for row in rows) == list(range(200))
    for label in "abcd":
        sizes = Counter(row.fold for row in rows if row.label == label)
        assert sorted(sizes) == list(range(K))
        assert max(sizes.values()) - min(sizes.values()) <= 1
    sizes = Counter(row.fold for row in rows)
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_no_group_is_in_two_folds_and_folds_differ_by_at_most_the_largest_group(table: Any) -> None:
    rows = grouped_folds(table, "a group", K, seed=4).select("a group", "fold").collect()
    assert len(rows) == 200
    assert len({(row[0], row[1]) for row in rows}) == len({row[0] for row in rows})
    sizes = Counter(row.fold for row in rows)
    assert max(sizes.values()) - min(sizes.values()) <= max(Counter(row[0] for row in rows).values())


def _by_map(df: Any, seed: int) -> Any:
    rows = df.select("label", F.create_map(F.lit("id"), "id").alias("map"))
    return stratified_folds(rows, "label", K, seed).withColumn("id", F.col("map")["id"])


DEALS: dict[str, Any] = {
    "stratified": lambda df, seed: stratified_folds(df, "label", K, seed),
    "stratified by a key": lambda df, seed: stratified_folds(df, "label", K, seed, keyCols=["id"]),
    "by a key that many rows share": lambda df, seed: stratified_folds(df, "label", K, seed, keyCols=["n"]),
    "rows that differ only in a map": _by_map,
    "grouped": lambda df, seed: grouped_folds(df, "id", K, seed),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEALS)
def test_the_rows_and_the_seed_alone_decide(table: Any, name: str) -> None:
    def folds(df: Any, seed: int) -> list[Any]:
        return sorted(DEALS[name](df, seed).select("id", "fold").collect())

    first = folds(table, 1)
    assert folds(shuffled(table), 1) == first
    assert folds(table, 2) != first


def test_columns_stay_as_they_were(table: Any) -> None:
    for dealt in (stratified_folds(table, "label", K), grouped_folds(table, "a group", K)):
        assert dealt.columns == [*table.columns, "fold"]
        assert dealt.schema["fold"].dataType.simpleString() == "int"


def _times(rows: Any, name: str) -> list[Any]:
    return [row[0] for row in rows.select(name).collect()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gap"), [("t", timedelta(hours=5)), ("d", timedelta(days=2)), ("n", 3), ("n", 0), ("id", 2.5)]
)
def test_training_ends_more_than_the_gap_before_validation(table: Any, name: str, gap: Any) -> None:
    folds = time_folds(table, name, 4, gap)
    again = time_folds(shuffled(table), name, 4, gap)
    last = None
    for fold, other in zip(folds, again, strict=True):
        train, validation = _times(fold.train, name), _times(fold.validation, name)
        assert max(train) < min(validation) - gap
        assert last is None or last < min(validation)
        last = max(validation)
        # About a fifth of the rows each, as far as equal times allow.
        assert 30 <= len(validation) <= 50
        assert sorted(train) == sorted(_times(other.train, name))
        assert sorted(validation) == sorted(_times(other.validation, name))
    assert last == max(_times(table, name))


def test_bad_input_is_refused_in_one_sentence(table: Any) -> None:
    t, deal, group = table, stratified_folds, grouped_folds
    null = t.withColumn("label", F.expr("nullif(label, 'd')"))
    span = t.withColumn("i", F.expr("make_interval(0, 0, 0, 1)"))
    months = t.withColumn("i", F.expr("make_ym_interval(1, id)"))
    refused: list[tuple[Any, tuple[Any, ...], str]] = [
        (deal, (t, "label", 1), r"k of stratified_folds must be .* got 1$"),
        (time_folds, (t, "t", True), r"k of time_folds must be .* got True$"),
        (deal, (t, "label", 4), r"per fold \(4\), got 3 of class 'd'; lower k"),
        (deal, (t.where("false"), "label", 2), r"per fold \(2\), got no rows"),
        (deal, (null, "label", 2), r"labelCol 'label' .* got 3 rows with null"),
        (group, (t, "some", 2), r"groupCol 'some' .* got 67 rows with null"),
        (group, (t, "label", 5), r"per fold \(5\), got 4 in column 'label'"),
        (group, (t, "m", 2), r"groupCol 'm' must have .* got map<string,bigint>"),
        (deal, (span, "i", 2), r"labelCol 'i' must have .* compared, got interval; use another column"),
        (deal, (months, "i", 2), r"\(2\), got 1 of class \"INTERVAL '1-0' YEAR TO MONTH\"; lower k"),
        (group, (t, "labl", 2), r"groupCol 'labl' is not a column .*'label'"),
        (partial(deal, keyCols=["idd"]), (t, "label", 2), r"keyCols 'idd' is not a column"),
        (partial(deal, keyCols=[]), (t, "label", 2), r"keyCols must be .* at least one column, got \[\]"),
        (partial(group, foldCol="N"), (t, "id", 2), r"foldCol 'N' is already a column"),
        (group, ([1], "id", 2), r"grouped_folds takes a Spark DataFrame, got"),
        (time_folds, (t, "t", 2, timedelta(-1)), r"gap must be finite and not negative"),
        (time_folds, (t, "t", 2, 3), r"gap must be a datetime.timedelta, because timeCol"),
        (time_folds, (t, "n", 2, timedelta(1)), r"gap must be a number, because timeCol 'n'"),
        (time_folds, (t, "n", 2, 30), r"leaves fold 0 without training rows, with k=2"),
        (time_folds, (t.withColumn("n", F.lit(1)), "n", 2), r"leaves fold 0 without training"),
        (time_folds, (t, "label", 2), r"timeCol 'label' must hold dates, timestamps or numbers"),
        (time_folds, (t, "some", 2), r"timeCol 'some' .* got 67 rows without"),
        (time_folds, (t.where("false"), "n", 2), r"time_folds needs rows, got none"),
        (fold_pairs, (t, 2, "n"), r"foldCol 'n' must hold each number from 0 to 1 and"),
    ]
    for call, arguments, sentence in refused:
        with pytest.raises(ValueError, match=sentence) as caught:
            call(*arguments)
        assert "\n" not in str(caught.value), sentence


@pytest.fixture(scope="module")
def classes(spark: Any) -> Any:
    rows = spark.range(0, 96, 1, 2).selectExpr("id", "sin(id) AS a", "cast(sin(id) > 0 AS double) AS label")
    return rows.withColumn("features", array_to_vector(F.array("a"))).cache()


def _classifier(folder: Path, **params: Any) -> TorchClassifier:
    network = ModelSpec("linear", {"in_features": 1, "out_features": 2})
    settings = {"batchSize": 32, "learningRate": 0.3, "epochs": 4, "collective": "torch", "reader": "arrow"}
    return TorchClassifier(model=network, storageUri=str(folder), showProgress=False, **settings, **params)


@pytest.mark.slow
def test_cross_validation_is_a_table_and_leaves_no_folder(classes: Any, tmp_path: Path) -> None:
    folds = fold_pairs(stratified_folds(classes, "label", 2), 2)
    evaluators = {"auc": BinaryClassificationEvaluator(), "accuracy": MulticlassClassificationEvaluator(
        metricName="accuracy")}  # fmt: skip
    table = cross_validate(_classifier(tmp_path), folds, evaluators)
    assert list(table.columns) == ["fold", "auc", "accuracy", "seconds"]
    assert list(table["fold"]) == [0, 1]
    assert (table["auc"] > 0.99).all()
    assert (table["accuracy"] > 0.8).all()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_cross_validation_removes_what_it_fitted_and_nothing_else(classes: Any, tmp_path: Path) -> None:
    kept = _classifier(tmp_path / "mine", predictionCol="first", rawPredictionCol="", probabilityCol="")
    mine = kept.fit(classes)
    own = _classifier(tmp_path / "theirs")
    judge = BinaryClassificationEvaluator()
    search = TrainValidationSplit(estimator=own, estimatorParamMaps=[{own.epochs: 1}], evaluator=judge)
    cross_validate(Pipeline(stages=[mine, search]), [(classes, classes)], judge)
    assert mine.transform(classes).count() == classes.count()
    # Spark's search leaves files of trials other than its best model, which this package cannot identify.
    assert len(list((tmp_path / "theirs").iterdir())) <= 1


@pytest.mark.slow
def test_spark_s_cross_validator_takes_the_folds(classes: Any, tmp_path: Path) -> None:
    estimator = _classifier(tmp_path)
    dealt = grouped_folds(classes.withColumn("g", F.expr("id % 12")), "g", 2)
    maps, judge = [{estimator.epochs: epochs} for epochs in (2, 4)], BinaryClassificationEvaluator()
    given = {"estimator": estimator, "estimatorParamMaps": maps, "evaluator": judge}
    validator = CrossValidator(**given, numFolds=2, foldCol="fold")
    assert max(validator.fit(dealt).avgMetrics) > 0.99


def test_cross_validation_refuses_what_it_cannot_use(classes: Any, tmp_path: Path) -> None:
    judge, pairs, own = BinaryClassificationEvaluator(), [(classes, classes)], _classifier(tmp_path)
    in_one_folder = _classifier(tmp_path, runUri=str(tmp_path / "run"))
    for arguments, message in (
        ((in_one_folder, pairs, judge), "runUri is the folder of one training"),
        ((own, [], judge), "folds must hold at least one pair"),
        ((own, [classes], judge), r"folds must hold pairs .* got DataFrame"),
        ((own, pairs, "auc"), "got str for 'metric'"),
    ):
        with pytest.raises(ValueError, match=message):
            cross_validate(*arguments)


@pytest.mark.parametrize("deal", [stratified_folds, grouped_folds])
def test_a_row_that_the_count_never_saw_is_an_error(spark: Any, deal: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(folds_module, "fix_rows", lambda df: df)
    # Each key has two rows, but other keys come in each branch of the plan.
    keys = random_function(spark).selectExpr("explode(array(1, 2)) AS n", "bigint(x * 1000000000) AS key")
    with pytest.raises(Exception, match="not among the rows that were counted for the folds"):
        deal(keys, "key", 2).collect()
