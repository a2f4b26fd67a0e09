"""`SequenceWindows` compared with windows sliced by NumPy, and its error messages."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F
from spark_tables import time_zone
from torch import nn

from ringspark.estimators import SequenceWindows, TorchRegressor

pytestmark = pytest.mark.spark

HOUR = 3600
START = datetime(2024, 10, 26, 12)  # a day before Europe's clocks go back


def expected(rows: Any, *, steps: int, stride: int, horizon: int, max_gap: Any, keeps: bool) -> Any:
    """Returns the expected windows: id of the last row, history, label."""
    table = pd.DataFrame(rows).sort_values(["k", "t"])
    is_after_gap = table.groupby("k")["t"].diff() > (np.inf if max_gap is None else max_gap)
    windows: list[tuple[Any, ...]] = []
    for _, run in table.groupby(["k", is_after_gap.cumsum()]):
        values, labels = run[["a", "b"]].to_numpy(), run["y"].to_numpy()
        for first in range(0, len(run) - steps + 1, stride):
            end = first + steps
            history, later = values[first:end], labels[end : end + horizon]
            has_label = len(later) == horizon and not np.isnan(later).any()
            if not np.isnan(history).any() and (keeps or has_label):
                label = (later[0] if horizon == 1 else later.tolist()) if has_label else None
                windows.append((run["id"].iloc[end - 1], history.tolist(), label))
    return sorted(windows, key=lambda window: window[0])


def random_rows(seed: int, *, nulls: bool) -> list[dict[str, Any]]:
    """Returns series of several lengths, some with a single row, with gaps of 1 to 4 hours."""
    rng = np.random.default_rng(seed)
    rows = []
    for key in range(5):
        now = 0
        for _ in range(int(rng.choice([1, 3, 8, 25]))):
            now += int(rng.choice([1, 1, 1, 1, 1, 1, 2, 4])) * HOUR
            values = {name: float(np.round(rng.normal(), 3)) for name in ("a", "b", "y")}
            if nulls:
                values = {name: None if rng.random() < 0.06 else v for name, v in values.items()}
            rows.append({"k": f"key {key}", "t": now, **values})
    rng.shuffle(rows)
    return [{"id": number, **row} for number, row in enumerate(rows)]


@pytest.mark.modes
@pytest.mark.parametrize(
    ("seed", "steps", "stride", "horizon", "max_gap", "nulls", "keeps"),
    [
        (0, 1, 1, 1, None, False, False),
        (1, 4, 1, 1, "1 hour", False, False),
        (2, 3, 3, 2, "2 hours", False, True),
        (3, 5, 2, 3, None, True, False),
        (4, 2, 4, 1, "1 hour", True, True),
    ],
)
def test_the_windows_are_those_of_numpy(
    spark: Any, seed: int, steps: int, stride: int, horizon: int, max_gap: str, nulls: bool, keeps: bool
) -> None:
    rows = random_rows(seed, nulls=nulls)
    frame = spark.createDataFrame(rows, "id long, k string, t long, a double, b double, y double")
    names = {"timeCol": "time", "valueCols": ["a", "b"], "targetCol": "y", "targetTimeCol": "until"}
    sizes = {"steps": steps, "stride": stride, "horizon": horizon}
    handle = {"handleInvalid": "skip", "handleUnlabeled": "keep" if keeps else "skip"}
    stage = _stage(**names, **sizes, **handle, maxGap=max_gap)
    given = frame.withColumn("time", F.timestamp_seconds("t")).drop("t").repartition(3)
    windows = stage.transform(given)
    assert windows.schema == stage.transformSchema(given.schema)
    found = windows.orderBy("id").collect()
    limit = int(max_gap.split()[0]) * HOUR if max_gap else None
    wanted = expected(rows, steps=steps, stride=stride, horizon=horizon, max_gap=limit, keeps=keeps)
    assert len(wanted) > 3
    assert [(row.id, row.features, row.label) for row in found] == wanted
    # A label is later than its whole window.
    assert all((row.until is None) == (row.label is None) for row in found)
    assert all(row.until > row.time for row in found if row.until is not None)
    counts = stage.countWindows(given)
    assert counts["windows"] == len(wanted)
    assert sum(counts.values()) == len(rows)


@pytest.mark.parametrize("kind", ["timestamp", "timestamp_ntz", "date", "bigint", "smallint"])
def test_gaps_of_every_type_of_time(spark: Any, kind: str) -> None:
    """Three neighbors, a gap, two neighbors, across a clock change in the session's time zone."""
    steps = [0, 1, 2, 4, 5]
    if kind in ("timestamp", "timestamp_ntz"):
        times: list[Any] = [START + timedelta(hours=12 + step) for step in steps]
        if kind == "timestamp":
            times = [(time - datetime(1970, 1, 1)).total_seconds() for time in times]
    else:
        times = [START.date() + timedelta(days=step) for step in steps] if kind == "date" else steps
    type_of = {"timestamp": "double", "smallint": "bigint"}.get(kind, kind)
    with time_zone(spark, "Europe/Berlin"):
        frame = spark.createDataFrame([(time, i) for i, time in enumerate(times)], f"t {type_of}, v int")
        if kind != type_of:
            frame = frame.withColumn("t", F.col("t").cast(kind))
        assert frame.schema["t"].dataType.simpleString() == kind
        gap: Any = {"date": timedelta(days=1), "bigint": 1, "smallint": 1}.get(kind, "60 minutes")
        stage = SequenceWindows(keyCols=[], timeCol="t", valueCols="v", steps=2, maxGap=gap)
        found = [row.features for row in stage.transform(frame).orderBy("v").collect()]
        assert found == [[[0], [1]], [[1], [2]], [[3], [4]]]


@pytest.mark.parametrize("gap", ["1 day", "1 day 30 minutes", timedelta(days=1), "24 hours"])
def test_a_day_of_max_gap_is_a_day_of_the_calendar(spark: Any, gap: Any) -> None:
    """Tests rows at midnight and rows every 24 hours, in weeks with clock changes."""
    with time_zone(spark, "Europe/Berlin"):
        days = spark.range(0, 16, 1, 1).selectExpr(
            "explode(array('2024-10-20', '2025-03-22')) as first", "id", "cast(id as int) as day"
        )
        rows = days.selectExpr(
            "first",
            "id as v",
            "inline(array("
            "struct('midnight' as kind, cast(date_add(first, day) as timestamp) as t),"
            "struct('24 hours' as kind,"
            "timestamp_seconds(unix_seconds(cast(first as timestamp)) + day * 86400) as t)))",
        )
        stage = SequenceWindows(keyCols=["first", "kind"], timeCol="t", valueCols="v", steps=3, maxGap=gap)
        found = stage.transform(rows).groupBy("first", "kind").count().collect()
        counts = {(row["first"][:4], row["kind"]): row["count"] for row in found}
        split = 14 if gap != "24 hours" else 12
        wanted = {("2024", "midnight"): split, ("2024", "24 hours"): 14}
        assert counts == wanted | {("2025", "midnight"): 14, ("2025", "24 hours"): 14}


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    """Two series of 30 hours: a number, a vector with its double, its parity, and a text."""
    columns = ["id", "concat('s', id % 2) as k", "timestamp_seconds(id div 2 * 3600) as t"]
    columns += ["id % 2 = 0 as even", "sin(id / 3) as v", "cast(id % 3 as int) as n"]
    columns.append("cast(id as decimal(9, 2)) as d")
    plain = spark.range(0, 60, 1, 2).selectExpr(*columns)
    return plain.withColumn("pair", F.array(F.col("v"), 2 * F.col("v")))


def _stage(**params: Any) -> SequenceWindows:
    settings = {"keyCols": "k", "timeCol": "t", "valueCols": "v", "steps": 3}
    return SequenceWindows(**(settings | params))


@pytest.mark.telling
@pytest.mark.modes
def test_a_pipeline_of_windows_is_fitted_and_saved(spark_saves: None, table: Any, tmp_path: Path) -> None:
    module, sizes = nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), {"epochs": 2, "batchSize": 16}
    network = TorchRegressor(model=module, handleInvalid="skip", storageUri=str(tmp_path), **sizes)
    # One pipeline trains on the windows with labels, and also forecasts after the newest row.
    windows = _stage(valueCols=["v", "n"], targetCol="v", horizon=2, handleUnlabeled="keep")
    Pipeline(stages=[windows, network]).save(str(tmp_path / "pipeline"))
    model = Pipeline.load(str(tmp_path / "pipeline")).fit(table)
    assert next(iter(model.stages[1].summary.history.rows)) == 52
    model.save(str(tmp_path / "model"))
    assert not list((tmp_path / "model").rglob("objects.pkl"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    rows = loaded.transform(table).orderBy("id").collect()
    assert len(rows) == 56
    assert [row.label is None for row in rows] == [False] * 52 + [True] * 4
    assert rows == model.transform(table).orderBy("id").collect()
    assert [len(row.prediction) for row in rows] == [2] * 56


@pytest.mark.slow
def test_a_stage_keeps_its_params_when_copied_saved_and_loaded(table: Any, tmp_path: Path) -> None:
    stage = _stage(outputCols="w", maxGap=timedelta(hours=1), targetCol="d", stride=2)
    stage.save(str(tmp_path / "stage"))
    for other in (SequenceWindows.load(str(tmp_path / "stage")), stage.copy()):
        assert other.uid == stage.uid
        assert {p.name: v for p, v in other.extractParamMap().items()} == {
            p.name: v for p, v in stage.extractParamMap().items()
        }
        found, wanted = (each.transform(table).orderBy("id").collect() for each in (other, stage))
        assert found == wanted
    assert stage.copy({stage.maxGap: "30 minutes"}).countWindows(table)["short"] == 60
    for param in stage.params:
        assert f"{param.name}: {param.doc}" in stage.explainParams()
        capital = param.name[0].upper() + param.name[1:]
        assert callable(getattr(stage, f"get{capital}"))
        assert callable(getattr(stage, f"set{capital}"))


def test_numbers_of_all_kinds_join_and_keep_their_type_alone(table: Any) -> None:
    rows = table.withColumn("vector", array_to_vector("pair")).where("id >= 54")
    names = ["v", "n", "even", "d", "pair", "vector"]
    joined = _stage(valueCols=names)
    apart = _stage(valueCols=names, outputCols=[f"w_{name}" for name in names])
    assert joined.transform(rows).schema == joined.transformSchema(rows.schema)
    assert apart.transform(rows).dtypes == [
        (f.name, f.dataType.simpleString()) for f in apart.transformSchema(rows.schema)
    ]
    given = {row.id: row for row in rows.collect()}
    (first, _) = joined.transform(rows).orderBy("id").collect()
    for row, number in zip(first.features, (54, 56, 58), strict=True):
        there = given[number]
        plain = [there.v, there.n, there.even, float(there.d), *there.pair, *np.float32(there.pair)]
        assert row == [float(value) for value in plain]
    (first, _) = apart.transform(rows).orderBy("id").collect()
    assert first.w_even == [True] * 3
    assert first.w_n == [given[number].n for number in (54, 56, 58)]
    assert np.shape(first.w_vector) == (3, 2)
    # Integers stay integers for an nn.Embedding, and single precision stays single.
    types = {("n", "id"): "bigint", ("n", "v"): "double", ("vector", "even"): "float"}
    for names_of, kind in types.items():
        schema = _stage(valueCols=list(names_of)).transformSchema(rows.schema)
        assert schema["features"].dataType.simpleString() == f"array<array<{kind}>>"


def test_a_target_array_with_a_null_inside_is_no_target(spark: Any) -> None:
    rows = spark.range(0, 8, 1, 1).selectExpr(
        "id as t", "double(id) as v", "array(double(id), if(id = 5, null, 1.0D)) as y"
    )
    stage = _stage(keyCols=[], steps=2, targetCol="y", handleInvalid="skip")
    found = stage.transform(rows).orderBy("t").collect()
    assert [(row.t, row.label) for row in found] == [(t, [t + 1.0, 1.0]) for t in (1, 2, 3, 5, 6)]
    counts = stage.countWindows(rows)
    assert (counts["windows"], counts["unlabeled"]) == (5, 2)


def test_spark_shuffles_and_sorts_once(table: Any) -> None:
    if not hasattr(table, "_jdf"):
        pytest.skip("a plan of Connect is the server's")
    stage = _stage(targetCol="v", horizon=3, maxGap="1 hour", targetTimeCol="until")
    plan = stage.transform(table)._jdf.queryExecution().executedPlan().toString()
    assert (plan.count("Sort ["), plan.count("Exchange ")) == (1, 1)


@pytest.mark.modes
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("if(id = 8, timestamp_seconds(0), t) as t", r"two rows have k=s0, t=1970.*groupBy\('k', 't'\)"),
        ("if(id = 8, null, k) as k", r"'k' is null at k=null, t=1970-01-01 .*handleInvalid='skip'"),
        ("if(id = 8, null, t) as t", r"'t' is null at k=s0, t=null; fill or drop it first"),
        ("if(id = 8, null, v) as v", r"'v' is null at k=s0, t=1970-01-01"),
    ],
)
def test_rows_that_no_series_can_hold_are_refused(
    spark: Any, table: Any, tmp_path: Path, change: str, sentence: str
) -> None:
    name = change.rpartition(" ")[2]
    rows = table.select(*(c for c in table.columns if c != name), F.expr(change))
    windows = _stage(targetCol="v").transform(rows)
    # This also applies if no column of the windows is used.
    for action in (windows.count, windows.select("id").collect):
        with pytest.raises(Exception, match=sentence):
            action()
    network = TorchRegressor(model=nn.Sequential(nn.Flatten(), nn.Linear(3, 1)), storageUri=str(tmp_path))
    with pytest.raises(ValueError, match=f"^{sentence}") as caught:
        network.fit(windows)
    assert "\n" not in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_cannot_be_windows_is_refused_before_any_job(table: Any) -> None:
    for params, sentence in (
        ({"timeCol": None}, "SequenceWindows needs timeCol: column that orders a series"),
        ({"valueCols": []}, "valueCols must name at least one column"),
        ({"valueCols": ["v", "k"]}, "valueCols 'k' has type string.*StringIndexer"),
        ({"timeCol": "v"}, "timeCol 'v' has type double; make it a timestamp"),
        ({"maxGap": 3600}, "maxGap must be a duration such as '1 hour', because timeCol 't' has"),
        ({"timeCol": "id", "maxGap": "1 hour"}, "maxGap must be a whole number, because timeCol 'id'"),
        ({"outputCols": ["a", "b"]}, "outputCols must name a column for each of the 1 valueCols"),
        ({"outputCol": "v"}, "Output column v already exists; drop it first"),
        ({"targetCol": "d", "labelCol": "features"}, "the output columns must differ"),
    ):
        with pytest.raises(ValueError, match=sentence):
            _stage(**params).transform(table)
    days = table.withColumn("t", F.to_date("t"))
    with pytest.raises(ValueError, match="maxGap must be whole days, because timeCol 't' holds dates"):
        _stage(maxGap="36 hours").transform(days)
    for name, value in (("stride", 0), ("horizon", 0), ("maxGap", 0), ("maxGap", "2 months")):
        with pytest.raises(ValueError, match=f"{name} must be"):
            _stage(**{name: value})
    with pytest.raises(ValueError, match="handleInvalid must be 'error' or 'skip', got 'keep'"):
        _stage(handleInvalid="keep")
    with pytest.raises(TypeError, match="'keyCol'; did you mean 'keyCols'"):
        SequenceWindows(keyCol="k")
    with pytest.warns(UserWarning, match="horizon has no effect: targetCol is not set"):
        _stage(horizon=2).transform(table)
