"""What is learned from the training rows sees no held-out row, also if the rows change between two jobs."""

import pytest
from changing_frames import CHANGING, ROWS

from ringspark.estimators import TorchRegressor
from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.held_out_rows import exact_number, hold_out_at_random, hold_out_newest
from ringspark.estimators.prepared_fit import prepare_fit
from ringspark.pipelines import Vocabulary, open_reader, write_shards
from ringspark.pipelines.fixed_rows import fix_rows

pytestmark = pytest.mark.spark


@pytest.mark.modes
@pytest.mark.parametrize("kind", CHANGING)
def test_a_vocabulary_knows_the_training_rows_and_no_others(spark, tmp_path, kind):
    rows = CHANGING[kind](spark).selectExpr("id", "x", "concat('w', id) AS word")
    manifest = write_shards(
        rows, str(tmp_path / "s"), columns={"word": Vocabulary()}, validation_fraction=0.4
    )
    train = [
        number
        for batch in open_reader(manifest.select("train"), engine="arrow", shuffle=False).batches(0)
        for number in batch["id"].tolist()
    ]
    words = manifest.column("word").kind.words
    assert sorted(words) == sorted(f"w{number}" for number in train)
    assert 0 < len(train) < ROWS


@pytest.mark.extras
@pytest.mark.modes
@pytest.mark.parametrize("kind", CHANGING)
def test_a_table_is_measured_on_the_rows_that_are_trained_on(spark, tmp_path, kind):
    estimator = TorchRegressor(labelCol="x", validationFraction=0.3, storageUri=str(tmp_path))
    prepared = prepare_fit(estimator, CHANGING[kind](spark))
    fit = CheckedFit.of(prepared.estimator, prepared.dataset)
    manifest = fit.data.write(prepared.dataset, str(tmp_path / "rows"))
    assert prepared.plan.rows == manifest.select("train").num_rows < manifest.num_rows == ROWS


@pytest.mark.parametrize("seed", range(3))
def test_equal_rows_are_divided_if_few_rows_differ(spark, seed):
    rows = fix_rows(spark.range(0, 1_000, 1, 4).selectExpr("id % 4 AS kind", "id % 2 AS label"))
    split = hold_out_at_random(rows, ["kind", "label"], 0.15, seed)
    held = split.dataset.where(split.indicator).count()
    assert abs(held - 150) <= 5
    # Both jobs see the same rows on the same side.
    counts = split.dataset.groupBy("kind", split.indicator).count().collect()
    assert sum(row["count"] for row in counts if row[split.indicator]) == held
    assert len(counts) == 8, "each of the four rows is on both sides"


@pytest.mark.parametrize("rows", [2, 3, 7])
def test_a_table_of_few_rows_has_both_sides(spark, rows):
    for seed in range(4):
        split = hold_out_at_random(spark.range(rows), ["id"], 0.15, seed)
        assert 0 < split.dataset.where(split.indicator).count() < rows


@pytest.mark.parametrize(("rows", "differ", "fraction"), [(4_000, 2_000, 0.2), (10_000, 400, 0.15)])
@pytest.mark.parametrize("seed", range(3))
def test_equal_rows_stay_together_if_many_rows_differ(spark, rows, differ, fraction, seed):
    frame = spark.range(0, rows, 1, 4).selectExpr(f"id % {differ} AS kind")
    split = hold_out_at_random(frame, ["kind"], fraction, seed)
    sides = split.dataset.select("kind", split.indicator).distinct()
    assert sides.count() == differ
    held, expected = sides.where(split.indicator).count(), fraction * differ
    assert abs(held - expected) < 4 * (expected * (1 - fraction)) ** 0.5, "four standard deviations"


NUMBERS = [
    "id + (1L << 60)",
    "CAST(id + (1L << 60) AS decimal(38,2))",
    "CAST(5000000000000000 + id * 0.01BD AS decimal(38,2))",
    "id - (1L << 60)",
    "if(id = 0, 0, id + (1L << 60))",
    "if(id = 0, TIMESTAMP'0001-01-01 00:00:00', timestamp_micros(1700000000000000 + id))",
    "CAST(timestamp_micros(1700000000000000 + id) AS timestamp_ntz)",
    "if(id = 0, CAST('-9e37' AS decimal(38,0)), CAST('9e37' AS decimal(38,0)) + id)",
]


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_beyond_2_to_the_53_stay_different(spark, text):
    frame = spark.range(100).selectExpr(f"{text} AS n")
    number = exact_number(frame, frame["n"], frame.schema["n"].dataType)
    assert frame.select(number).distinct().count() == 100
    split = hold_out_newest(frame, "n", 0.2)
    assert 19 <= split.dataset.where(split.indicator).count() <= 21


def test_a_time_that_is_no_number_is_no_newest_time(spark):
    frame = spark.range(100).selectExpr("if(id < 50, double('nan'), double(id)) AS t")
    split = hold_out_newest(frame, "t", 0.2)
    assert split.dataset.where(split.indicator).count() == 10
    with pytest.raises(ValueError, match="timeCol 't' has no value in any row"):
        hold_out_newest(frame.where("isnan(t)"), "t", 0.2)
