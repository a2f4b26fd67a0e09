"""Tables that people really have: `fit` without a model takes a column, or says why it leaves it out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ringspark.estimators import TorchClassifier, TorchRegressor
from ringspark.estimators.table_fit import prepare_fit
from ringspark.pipelines import Vocabulary
from ringspark.pipelines.kinds.table_row import _SHORT_ZONES, _on_clock

pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore::UserWarning")]

ROWS = 400
LABEL = "int(id > 200) AS label"

# Spark SQL of a column -> how the plan uses it, and a part of the reason.
COLUMNS = {
    "id + (1L << 60)": ("number", "32 bins"),
    "CAST(id + (1L << 60) AS decimal(30,0))": ("number", "32 bins"),
    "id - (1L << 62)": ("number", "32 bins"),
    "named_struct('a', id + (1L << 60)).a": ("number", "32 bins"),
    "string(sqrt(id))": ("number", "text of numbers, 32 bins"),
    "concat(' ', sqrt(id))": ("number", "text of numbers"),
    "string(date_add(DATE'2020-01-01', int(id)))": ("date", "trend, weekday"),
    "string(timestamp_seconds(id * 7777))": ("date", "trend, hour"),
    "lpad(id, 5, '0')": ("left out", "an id"),
    "concat('item-', id)": ("left out", "an id"),
    "string(id % 5)": ("category", "5 values"),
    "if(id % 50 = 0, TIMESTAMP'9999-12-31 00:00:00', timestamp_seconds(id * 86400))": ("date", "weekday"),
    "if(id % 50 = 0, TIMESTAMP'0001-01-01 00:00:00', timestamp_seconds(id * 86400))": ("date", "weekday"),
    "parse_json('{}')": ("left out", "cannot take this type"),
    "map('a', id)": ("left out", "cannot take this type"),
    "INTERVAL '1' DAY * id": ("left out", "cannot take this type"),
    "collate(string(id % 5), 'UTF8_LCASE')": ("category", "5 values"),
}


@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_is_used_or_left_out_for_a_reason(spark: Any, column: str) -> None:
    frame = spark.range(0, ROWS, 1, 2).selectExpr(f"{column} AS c", "id % 3 AS other", LABEL)
    plan = prepare_fit(TorchClassifier(labelCol="label"), frame).plan
    assert plan is not None
    (use,) = [use for use in plan.uses if use.column == "c"]
    assert use.use == COLUMNS[column][0]
    assert COLUMNS[column][1] in use.reason


@pytest.fixture
def zone(spark: Any) -> Iterator[Any]:
    before = spark.conf.get("spark.sql.session.timeZone")
    yield lambda name: spark.conf.set("spark.sql.session.timeZone", name)
    spark.conf.set("spark.sql.session.timeZone", before)


def test_the_clock_of_a_zone_is_the_clock_of_spark(spark: Any, zone: Any) -> None:
    zone("UTC")
    zones = ["Z", "GMT+1", "GMT+08:00", "UTC+3", "+1:00", "-03:30", "+05:30:15", "UTC", "Europe/Paris"]
    zones += ["EST", "MST", "HST", *_SHORT_ZONES.keys() - {"Z"}]
    moments = (
        "explode(sequence(TIMESTAMP'1970-01-01 03:00:00', TIMESTAMP'2300-01-01', INTERVAL '317' DAY)) AS t"
    )
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
    model = TorchRegressor(labelCol="label", epochs=1, showProgress=False).fit(rows)
    odd = spark.sql(
        "SELECT TIMESTAMP'9999-12-31 23:59:59' AS t, 'no number' AS text, 1L AS big, array(1D, null) AS v "
        "UNION ALL SELECT TIMESTAMP'0001-01-01 00:00:00', '1e400', -9223372036854775808L, null "
        "UNION ALL SELECT null, null, null, array(double('nan'), double('inf'))"
    )
    predictions = [row["prediction"] for row in model.transform(odd).select("prediction").collect()]
    assert np.isfinite(predictions).all()
    with pytest.raises(Exception, match=r"is in an array of 3 numbers; give arrays of 2, as in the training"):
        model.transform(odd.selectExpr("t", "text", "big", "array(1D, 2D, 3D) AS v")).collect()


def test_the_label_may_have_a_vocabulary_and_no_input_may(spark: Any) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr("id % 4 AS k", "if(id % 4 = 1, 'yes', 'no') AS label")
    words = {"label": Vocabulary(words=("yes", "no"))}
    model = TorchClassifier(labelCol="label", epochs=1, columns=words, showProgress=False).fit(rows)
    assert model.labels == ["yes", "no"]
    with pytest.raises(ValueError, match="without a model, fit chooses the types; remove it"):
        TorchClassifier(labelCol="label", columns={"k": Vocabulary()}).fit(rows)


def test_an_infinite_class_is_refused_and_a_collation_makes_no_class(spark: Any) -> None:
    rows = spark.range(0, ROWS, 1, 2)
    infinite = rows.selectExpr("id % 4 AS k", "if(id = 5, double('inf'), double(id % 2)) AS label")
    with pytest.raises(ValueError, match="column 'label' has 1 infinite values"):
        TorchClassifier(labelCol="label").fit(infinite)
    text = "collate(element_at(array('a', 'A', 'b'), int(id % 3) + 1), 'UTF8_LCASE') AS label"
    model = TorchClassifier(labelCol="label", epochs=1, showProgress=False)
    assert model.fit(rows.selectExpr("id % 3 AS k", text)).labels == ["A", "a", "b"]


def test_changed_features_change_the_statistics_of_a_table(spark: Any, tmp_path: Any) -> None:
    rows = spark.range(0, ROWS, 1, 2).selectExpr("id AS x", "id % 2 AS label")
    settings = {"labelCol": "label", "epochs": 1, "runUri": str(tmp_path / "run"), "showProgress": False}
    TorchClassifier(**settings).fit(rows)
    changed = rows.selectExpr("if(x = 7, 300, x) AS x", "label")
    with pytest.raises(ValueError, match="__ringspark_table"):
        TorchClassifier(**settings, resume=True).fit(changed)
