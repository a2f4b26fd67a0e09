"""Tables that people really have: `fit` without a model takes a column, or says why it leaves it out."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from spark_tables import no_job

from ringspark.estimators import TorchClassifier, TorchRegressor
from ringspark.estimators.prepared_fit import prepare_fit
from ringspark.models import ModelSpec
from ringspark.pipelines import Vocabulary, write_shards
from ringspark.pipelines.kinds.table_row import _SHORT_ZONES, _on_clock

pytestmark = [
    pytest.mark.spark,
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

ROWS = 400
LABEL = "int(id > 200) AS label"

# Spark SQL of a column -> how the plan uses it, and a part of the reason.
COLUMNS = {
    "id + (1L << 60)": ("number", "32 bins"),
    "CAST(id + (1L << 60) AS decimal(30,0))": ("number", "32 bins"),
    "id - (1L << 62)": ("number", "32 bins"),
    "if(id < 200, -1, 1) * CAST(repeat('9', 38) AS decimal(38,0))": ("number", "2 bins"),
    "named_struct('a', id + (1L << 60)).a": ("number", "32 bins"),
    "if(id = 0, 0, id + (1L << 60))": ("number", "32 bins"),
    "string(id + (1L << 60))": ("number", "text of numbers, 32 bins"),
    "array(id + (1L << 60))": ("number", "32 bins"),
    "array(CAST(id + (1L << 60) AS decimal(38,2)))": ("number", "32 bins"),
    "CAST(id + (1L << 60) AS decimal(38,2))": ("number", "32 bins"),
    "array(id % 2 = 0)": ("number", "2 bins"),
    "string(sqrt(id))": ("number", "text of numbers, 32 bins"),
    "if(id % 20 = 0, ' ', string(sqrt(id)))": ("number", "text of numbers, 32 bins"),
    "if(id % 20 = 0, 'N/A', string(date_add(DATE'2020-01-01', int(id))))": ("date", "trend, weekday"),
    "concat(' ', sqrt(id))": ("number", "text of numbers"),
    "string(date_add(DATE'2020-01-01', int(id)))": ("date", "trend, weekday"),
    "date_format(date_add(DATE'2020-01-01', int(id)), 'MM/dd/yyyy')": ("date", "trend, weekday"),
    "date_format(timestamp_seconds(id * 77777), 'd/M/yyyy HH:mm')": ("date", "trend, hour, weekday"),
    "date_format(date_add(DATE'2020-01-01', int(id)), 'dd.MM.yyyy')": ("date", "trend, weekday"),
    "date_format(date_add(DATE'2020-01-01', int(id)), 'yyyy/MM/dd')": ("date", "trend, weekday"),
    "concat(id, '/', id % 7, '/', id % 9)": ("left out", "an id"),
    "string(timestamp_seconds(id * 7777))": ("date", "trend, hour"),
    "concat(id % 24, ':', lpad(id % 60, 2, '0'))": ("category", "rare ones as unknown"),
    "lpad(id, 5, '0')": ("left out", "an id"),
    "concat('item-', id)": ("left out", "an id"),
    "string(id % 5)": ("category", "5 values"),
    "if(id % 50 = 0, TIMESTAMP'9999-12-31 00:00:00', timestamp_seconds(id * 86400))": ("date", "weekday"),
    "if(id % 50 = 0, TIMESTAMP'0001-01-01 00:00:00', timestamp_seconds(id * 86400))": ("date", "weekday"),
    "parse_json('{}')": ("left out", "cannot take this type"),
    "map('a', id)": ("left out", "cannot take this type"),
    "INTERVAL '1' DAY * id": ("left out", "cannot take this type"),
    "collate(string(id % 5), 'UTF8_LCASE')": ("category", "5 values"),
    "if(id % 2 = 0, 1e300, -1.7e308) * (id / 400)": ("number", "bins"),
    "if(id % 2 = 0, 1.7e308, -1.7e308)": ("number", "2 bins"),
    "double(id) * 1e-310": ("number", "32 bins"),
    "named_struct('b', array(id % 2 = 0)).b[0]": ("category", "2 values"),
}

NETWORK = {"rates": [1.0, 0.5], "dropouts": [0.0, 0.2], "width": 8, "depth": 1, "number_width": 2}
FAST: dict[str, Any] = {"model": ModelSpec("tabpack", NETWORK), "epochs": 1, "collective": "local"}


@pytest.mark.telling
def test_a_column_is_used_or_left_out_for_a_reason(spark: Any) -> None:
    columns = [f"{column} AS c{number}" for number, column in enumerate(COLUMNS)]
    frame = spark.range(0, ROWS, 1, 2).selectExpr(*columns, LABEL)
    plan = prepare_fit(TorchClassifier(labelCol="label"), frame).plan
    uses = {use.column.removesuffix("[0]"): use for use in plan.uses}
    for number, (column, (use, reason)) in enumerate(COLUMNS.items()):
        found = uses[f"c{number}"]
        assert (found.use, reason in found.reason) == (use, True), (column, found)


@pytest.fixture
def zone(spark: Any) -> Iterator[Any]:
    before = spark.conf.get("spark.sql.session.timeZone")
    yield lambda name: spark.conf.set("spark.sql.session.timeZone", name)
    spark.conf.set("spark.sql.session.timeZone", before)


def test_the_clock_of_a_zone_is_the_clock_of_spark(spark: Any, zone: Any) -> None:
    zone("UTC")
    zones = ["Z", "GMT+1", "GMT+08:00", "UTC+3", "+1:00", "-03:30", "+05:30:15", "UTC", "Europe/Paris"]
    zones += ["EST", "MST", "HST", *_SHORT_ZONES.keys() - {"Z"}]
    moments = "explode(sequence(TIMESTAMP'1970-01-01 03:00', TIMESTAMP'2300-01-01', INTERVAL '317' DAY)) AS t"
    shown = [f"unix_micros(from_utc_timestamp(t, '{name}')) / 1e6 AS `{name}`" for name in zones]
    clocks = spark.range(1).selectExpr(moments).selectExpr("unix_micros(t) / 1e6 AS utc", *shown).toPandas()
    seconds = clocks["utc"].to_numpy()
    # pandas knows the rules until 2262, and Java beyond. Before 1970, their histories differ.
    known = seconds < 9.2e9
    for name in zones:
        distance = np.abs(_on_clock(seconds, name) - clocks[name].to_numpy())
        assert distance[known].max() < 1e-5, name
        assert distance.max() <= 3600, name


def test_scoring_takes_every_value_of_the_trained_types(spark: Any, zone: Any) -> None:
    zone("GMT+08:00")
    rows = spark.range(0, ROWS, 1, 2).selectExpr(
        "timestamp_seconds(id * 40000) AS t", "string(sqrt(id)) AS text", "id + (1L << 60) AS big",
        "array(double(id), 1D) AS v", "CAST(id % 7 AS decimal(38,18)) AS label",
    )  # fmt: skip
    model = TorchRegressor(**FAST).fit(rows)
    odd = spark.sql(
        "SELECT TIMESTAMP'9999-12-31 23:59:59' AS t, 'no number' AS text, 1L AS big, array(1D, null) AS v "
        "UNION ALL SELECT TIMESTAMP'0001-01-01 00:00:00', '1e400', -9223372036854775808L, null "
        "UNION ALL SELECT null, null, null, array(double('nan'), double('inf'))"
    )
    predictions = [row["prediction"] for row in model.transform(odd).select("prediction").collect()]
    assert np.isfinite(predictions).all()
    with pytest.raises(Exception, match=r"is in an array of 3 numbers; give arrays of 2, as in the training"):
        model.transform(odd.selectExpr("t", "text", "big", "array(1D, 2D, 3D) AS v")).collect()


@pytest.mark.telling
def test_long_numbers_and_times_in_texts_are_read_alike_in_every_session(spark: Any, zone: Any) -> None:
    zone("UTC")
    rows = spark.range(0, ROWS, 1, 2).selectExpr(
        "id", "string(id + (1L << 60)) AS big", "array(id + (1L << 60)) AS bigs",
        "string(TIMESTAMP_NTZ'2020-01-01 00:00:00' + INTERVAL '7' HOUR * id) AS local",
        "concat(TIMESTAMP_NTZ'2020-01-01 00:00:00' + INTERVAL '7' HOUR * id, '+02:00') AS zoned", LABEL,
    )  # fmt: skip
    kind = prepare_fit(TorchClassifier(labelCol="label"), rows).plan.kind

    def inputs() -> Any:
        row = kind.select(None, rows.schema).alias("row")
        (made,) = kind.encode(rows.orderBy("id").select(row).toArrow()["row"].combine_chunks()).arrays
        return kind.decode([made])["numbers"].copy()

    expected = inputs()
    big = kind.titles(".numbers").index("big")
    assert min(len(np.unique(expected[:, column])) for column in (big, big + 1)) > 0.9 * ROWS
    zone("Asia/Kathmandu")
    np.testing.assert_array_equal(inputs(), expected)


def test_the_label_may_have_a_vocabulary_and_no_input_may(spark: Any) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr("id % 4 AS k", "if(id % 4 = 1, 'yes', 'no') AS label")
    words = {"label": Vocabulary(words=("yes", "no"))}
    model = TorchClassifier(**FAST, columns=words).fit(rows)
    assert model.labels == ["yes", "no"]
    with pytest.raises(ValueError, match="without a model, fit chooses the types; remove it"):
        TorchClassifier(labelCol="label", columns={"k": Vocabulary()}).fit(rows)


def test_an_infinite_class_is_refused_and_a_collation_makes_no_class(spark: Any) -> None:
    rows = spark.range(0, ROWS, 1, 2)
    infinite = rows.selectExpr("id % 4 AS k", "if(id = 5, double('inf'), double(id % 2)) AS label")
    with pytest.raises(ValueError, match="column 'label' has 1 infinite values"):
        TorchClassifier(labelCol="label").fit(infinite)
    text = "collate(element_at(array('a', 'A', 'b'), int(id % 3) + 1), 'UTF8_LCASE') AS label"
    model = TorchClassifier(**FAST)
    assert model.fit(rows.selectExpr("id % 3 AS k", text)).labels == ["A", "a", "b"]


def test_changed_features_change_the_statistics_of_a_table(spark: Any, tmp_path: Any) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr("id AS x", "id % 2 AS label")
    settings = FAST | {"runUri": str(tmp_path / "run")}
    TorchClassifier(**settings).fit(rows)
    changed = rows.selectExpr("if(x = 7, 300, x) AS x", "label")
    with pytest.raises(ValueError, match="__ringspark_table"):
        TorchClassifier(**settings, resume=True).fit(changed)


@pytest.mark.telling
def test_vectors_may_be_null(spark: Any) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr("id", "array(double(id), 1D) AS v", LABEL)
    vectors = rows.withColumn("v", F.when(F.col("id") % 3 > 0, array_to_vector("v")))
    model = TorchClassifier(**FAST).fit(vectors)
    assert "v[0]" in set(model.summary.columns["column"])
    assert model.transform(vectors).where("prediction IN (0, 1)").count() == ROWS


def test_evaluate_names_the_text_of_a_new_class(spark: Any) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr("id", "if(id > 200, 'late', 'on time') AS label")
    model = TorchClassifier(**FAST, metrics=["accuracy"]).fit(rows)
    assert model.evaluate(rows)["accuracy"] <= 1
    with pytest.raises(ValueError, match="labelCol 'label' has the class 'never', which the model was not"):
        model.evaluate(rows.selectExpr("id", "if(id = 7, 'never', label) AS label"))


def test_evaluate_takes_the_decimals_that_fit_took(spark: Any) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr("id AS x", "CAST(id / 7 AS decimal(38,18)) AS label")
    model = TorchRegressor(**FAST, metrics=["rmse"]).fit(rows)
    expected = model.evaluate(rows.withColumn("label", F.col("label").cast("double")))
    assert model.evaluate(rows) == pytest.approx(expected)
    with pytest.raises(ValueError, match="'label' holds texts, but the model was trained on numbers"):
        model.evaluate(rows.withColumn("label", F.lit("7")))


MLP = ModelSpec("mlp", {"in_features": 1, "out_features": 2})
# Settings that `fit` refuses, and a part of the reason.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "workers": ({"numWorkers": 2, "batchSize": 1, "collective": "torch"}, "batchSize counts rows over all"),
    "metric": ({"metrics": ["mae"]}, "metrics of a classification must be among"),
    "precision": ({"inferencePrecision": "int8", "inferenceUseGpu": True}, "runs on the CPU"),
    "weight": ({"weightCol": "word"}, "column 'word' has type string"),
    "indicator": ({"validationIndicatorCol": "word"}, "'word' must be boolean or 0/1, got type string"),
    "time": ({"timeCol": "word"}, "must hold dates, timestamps or numbers"),
    "label as input": ({"inputCols": ["x", "label"]}, "inputCols and labelCol both name 'label'"),
    "indicator as input": (
        {"inputCols": ["x", "held"], "validationIndicatorCol": "held"},
        "inputCols and validationIndicatorCol both name 'held'",
    ),
    "label of an array": ({"labelCol": "pair"}, "give a column of strings or of class numbers"),
    "output": ({"predictionCol": "X"}, "Output column X already exists"),
    "name of a class": ({"labelCol": "word", "predictedLabelCol": "x"}, "Output column x already exists"),
    "a model and a time": (
        {"model": MLP, "featuresCol": "x", "timeCol": "x", "validationFraction": 0.2, "metrics": ["mae"]},
        "metrics of a classification must be among",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_setting_is_refused_before_any_job(spark: Any, name: str) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr(
        "id AS x", "string(id % 3) AS word", "id % 5 = 0 AS held", "array(id) AS pair", LABEL
    )
    settings, reason = REFUSED[name]
    with no_job(spark), pytest.raises(ValueError, match=reason):
        TorchClassifier(**FAST | settings).fit(rows)


def test_a_weight_that_is_named_as_input_is_an_input(spark: Any) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr("id AS x", "id % 5 + 1 AS w", LABEL)
    for named, found in ({"inputCols": ["x", "w"]}, ["x", "w"]), ({}, ["x"]):
        plan = prepare_fit(TorchClassifier(**FAST, weightCol="w", **named), rows).plan
        assert [use.column for use in plan.uses] == found


def test_decimal_weights_are_accepted_and_weights_below_float32_refused(spark: Any) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr("id AS x", "CAST(1.5 AS decimal(22,2)) AS w", LABEL)
    TorchClassifier(**FAST, weightCol="w").fit(rows)
    with pytest.raises(ValueError, match="weightCol 'w' is at most 1e-300 in all train rows"):
        TorchClassifier(**FAST, weightCol="w").fit(rows.withColumn("w", F.lit(1e-300)))


def test_fields_of_structs_follow_the_rule_of_the_session_for_names(spark: Any) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr("named_struct('u', id, 'w', 1) AS st", LABEL)
    model = TorchClassifier(**FAST).fit(rows)
    other = rows.selectExpr("named_struct('W', st.w, 'U', st.u) AS st", "st.u AS id")
    scored = [model.transform(each).orderBy("id") for each in (rows.selectExpr("st", "st.u AS id"), other)]
    found = [each.toPandas()["probability"] for each in scored]
    assert found[0].tolist() == found[1].tolist()
    message = "column 'st' lacks the field 'u', which the model was trained on; add it, or rename"
    with pytest.raises(ValueError, match=message):
        model.transform(rows.selectExpr("named_struct('w', 1) AS st"))


def test_a_label_beyond_float32_is_refused(spark: Any) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr("id AS x", "1e300 * id AS label")
    message = r"values up to 3.99e\+302, but networks compute in float32, which ends at 3.4e"
    with pytest.raises(ValueError, match=message):
        TorchRegressor(**FAST).fit(rows)
    with pytest.raises(ValueError, match=r"only up to 3.99e-298, .* float32, which begins at 1.18e-38"):
        TorchRegressor(**FAST).fit(rows.withColumn("label", F.expr("1e-300 * x")))


def test_a_failed_job_is_explained_as_in_a_write(spark: Any, tmp_path: Any) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr("id AS x", LABEL)
    rows.write.parquet(str(tmp_path / "rows"))
    rows.selectExpr("string(x) AS x", "label").write.mode("append").parquet(str(tmp_path / "rows"))
    mixed = spark.read.schema("x double, label int").parquet(str(tmp_path / "rows"))
    message = r"Spark cannot read the file .*; remove it, or write it again"
    with pytest.raises(ValueError, match=message):
        TorchClassifier(**FAST).fit(mixed)
    words = spark.read.schema("x string, label int").parquet(str(tmp_path / "rows"))
    with pytest.raises(ValueError, match=message):
        write_shards(words, str(tmp_path / "shards"), columns={"x": Vocabulary()})
    stream = spark.readStream.schema("x double, label int").parquet(str(tmp_path / "rows"))
    with pytest.raises(ValueError, match="fit takes a batch DataFrame, got a streaming one; call it in"):
        TorchClassifier(**FAST).fit(stream)
