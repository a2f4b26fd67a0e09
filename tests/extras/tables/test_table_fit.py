"""`fit` without a model: what becomes of each column, the rows that are held out, and the predictions."""

import datetime
import decimal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity import assert_equal_weights
from programs import run_program
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import TrainValidationSplit
from pyspark.sql import functions as F
from spark_tables import run_stream

from ringspark.estimators import TorchClassifier, TorchModel, TorchRegressor
from ringspark.extras.tables.recipe import complete_table
from ringspark.extras.tables.table_plan import TablePlan
from ringspark.models import ModelSpec
from ringspark.pipelines.kinds import TableRow

pytestmark = [
    pytest.mark.spark,
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore:left out of the table:UserWarning"),
]

ROWS = 400
SCHEMA = """row string, number double, word string, many string, flag boolean, day date, moment timestamp,
    price decimal(9,2), pair array<double>, inner struct<x:int,y:map<string,int>>, tags map<string,int>,
    constant int, empty double, code long, label double, late string, when int"""


@pytest.fixture(scope="module")
def table(spark: Any) -> Any:
    rng = np.random.default_rng(0)
    effects = rng.normal(size=60)
    # Ids whose order says nothing, in a column of numbers.
    codes = rng.choice(10**6, 50, replace=False)
    of_code = rng.normal(size=50)
    rows = []
    for row in range(ROWS):
        number, many, code = float(rng.normal()), int(rng.integers(60)), int(rng.integers(50))
        label = float(100 + 10 * number + 20 * effects[many] + 40 * of_code[code])
        day = datetime.date(2020, 1, 1) + datetime.timedelta(days=row * 3)
        moment, price = datetime.datetime(2020, 1, 1, row % 24, row % 60), decimal.Decimal(row) / 4
        plain = f"row {row}", None if row % 9 == 0 else number, "abc"[row % 3], f"name {many}", row % 2 == 0
        nested = [number, 1.0 * (row % 5)], (row % 7, {}), {"a": 1}
        last = 7, None, int(codes[code]), label, "yes" if label > 100 else "no", row
        rows.append((*plain, day, moment, price, *nested, *last))
    return spark.createDataFrame(rows, SCHEMA).repartition(2, "row").cache()


SMALL: dict[str, Any] = {"rates": [1.0, 0.5], "width": 8, "depth": 1, "number_width": 2}

PACK = ModelSpec("tabpack", {"dropouts": [0.0, 0.2], **SMALL})
FAST: dict[str, Any] = {"model": PACK, "epochs": 2, "showProgress": False, "collective": "torch"}


@pytest.fixture(scope="module")
def classified(table: Any) -> tuple[TorchModel, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = TorchClassifier(labelCol="late", **FAST).fit(table.drop("label", "when"))
    return model, [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def test_the_summary_says_what_became_of_each_column(classified: tuple[TorchModel, list[str]]) -> None:
    model, messages = classified
    columns = model.summary.columns.set_index("column")
    wanted = {
        "left out": {"row", "inner.y", "tags", "constant", "empty"},
        "number": {"number", "price", "pair[0]", "pair[1]", "inner.x"},
        "category": {"word", "many", "flag"},
        "date": {"day", "moment"},
        "number and category": {"code"},
    }
    assert {use: set(found.index) for use, found in columns.groupby("use")} == wanted
    assert columns.loc["row", "reason"] == "almost every row has its own value, an id"
    assert columns.loc["tags", "reason"] == "a network for tables cannot take this type"
    assert columns.loc["constant", "reason"] == "every row has the same value"
    assert columns.loc["empty", "missing"] == 1.0
    assert columns.loc["number", "missing"] == pytest.approx(1 / 9, abs=0.02)
    assert columns.loc["day", "reason"] == "trend, weekday, monthday, yearday"
    assert columns.loc["moment", "reason"] == "trend, hour"
    (message,) = [text for text in messages if "left out" in text]
    assert "'inner.y', 'tags', 'row', 'constant', 'empty'" in message


def test_columns_may_be_in_another_order_and_have_new_values(classified: Any, table: Any) -> None:
    model, _ = classified
    found = model.transform(table.select(*reversed(table.columns))).orderBy("row").collect()
    expected = model.transform(table).orderBy("row").collect()
    assert [row.probability for row in found] == [row.probability for row in expected]
    assert {row.predictedLabel for row in found} <= {"yes", "no"}
    # A new name, a null and a number beyond the known range are fine.
    odd = table.limit(1).withColumns({"many": F.lit("new"), "word": F.lit(None), "number": F.lit(1e300)})
    (row,) = model.transform(odd).collect()
    assert np.isfinite(row.probability.toArray()).all()


@pytest.mark.slow
def test_a_new_process_predicts_with_the_saved_model(classified: Any, table: Any, tmp_path: Path) -> None:
    model, _ = classified
    first = model.transform(table).orderBy("row").select("probability").collect()
    model.write().overwrite().save(str(tmp_path / "model"))
    table.write.parquet(str(tmp_path / "rows"))
    script = f"""
from pyspark.sql import SparkSession
from ringspark.estimators import TorchClassificationModel
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
model = TorchClassificationModel.load({str(tmp_path / "model")!r})
rows = model.transform(spark.read.parquet({str(tmp_path / "rows")!r})).orderBy("row").collect()
print(len(model.summary.columns), *(row.probability[1] for row in rows))
"""
    columns, *again = run_program(script).stdout.split()
    assert int(columns) == 16
    # Other batches round differently.
    assert np.array(again, float) == pytest.approx([row.probability[1] for row in first], abs=1e-6)


def test_the_probabilities_are_calibrated(classified: tuple[TorchModel, list[str]]) -> None:
    model, _ = classified
    network: Any = model.module()
    found = model.summary.history["validation_temperature"].iloc[model.summary.model_epoch - 1]
    assert float(network.temperature) == pytest.approx(min(4.0, max(0.5, found)))


@pytest.mark.modes
def test_a_regression_returns_the_unit_of_its_label(table: Any) -> None:
    settings = FAST | {"epochs": 15, "batchSize": 16, "learningRate": 2e-2}
    model = TorchRegressor(**settings).fit(table.drop("late", "when"))
    predicted = model.transform(table).select("prediction", "label").toPandas()
    assert abs(predicted.prediction.mean() - predicted.label.mean()) < 0.2 * predicted.label.std()
    errors = predicted.prediction - predicted.label
    assert errors.std() < 0.6 * predicted.label.std()


def test_ranks_do_not_change_the_weights(table: Any) -> None:
    # Without dropout, whose random numbers differ between ranks.
    model = ModelSpec("tabpack", {"dropouts": [0.0, 0.0], "unknown": 0.0, **SMALL})
    given = {**FAST, "model": model, "batchSize": 64}
    models = [TorchRegressor(**given, numWorkers=n).fit(table.drop("late", "when")) for n in (1, 2)]
    assert_equal_weights(*models, 1e-5)


def test_a_column_that_tells_the_label_is_named(table: Any) -> None:
    leaky = table.select("label", "number", (F.col("label") * 2 + 1).alias("twice"))
    with pytest.warns(UserWarning, match=r"predicts the label almost perfectly: 'twice'; drop the column"):
        TorchRegressor(**FAST).fit(leaky)


def test_a_label_with_too_many_digits_gives_a_warning(table: Any) -> None:
    stamped = table.select("number", (F.col("label") + 1.7e9).alias("label"))
    with pytest.warns(UserWarning, match=r"'label' varies by only .* around 1\.7e\+09, and predictions"):
        TorchRegressor(**FAST).fit(stamped)


def test_seconds_bound_the_training(table: Any) -> None:
    stage = TorchRegressor(**{**FAST, "epochs": 500}, timeBudgetSeconds=1e-3)
    model = stage.fit(table.select("label", "number"))
    assert model.summary.stop_reason == "timeBudgetSeconds=0.001 left no time for another epoch"
    assert len(model.summary.history) == 1
    # Planned for 500 epochs, the warm-up and the decay fit into the one for which there was time.
    assert model.summary.history["learning_rate"].iloc[0] < 1e-3


def test_a_resume_continues_with_the_columns_of_the_first_start(table: Any, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    few = table.select("label", "number", "many").repartition(5)
    given = {**FAST, "runUri": run, "checkpointEveryEpochs": 1}
    first = TorchRegressor(**given).fit(few)
    # Another order of the rows may give other quantiles.
    again = TorchRegressor(**given, resume=True).fit(few.orderBy("number"))
    assert_equal_weights(again, first)
    (tmp_path / "run" / "table.json").write_text("{}")
    with pytest.raises(ValueError, match=r"table.json in runUri .* is damaged .*; give runUri a new folder"):
        TorchRegressor(**given, resume=True).fit(few)


@pytest.mark.slow
def test_many_columns_are_embedded_narrower(spark: Any) -> None:
    wide = spark.range(200).selectExpr("id % 2 AS label", "transform(sequence(1, 300), i -> sin(i*id)) AS x")
    network = {"dropouts": [0.0, 0.2], "rates": [1.0, 0.5], "width": 8, "depth": 1}
    model = TorchClassifier(**FAST | {"model": ModelSpec("tabpack", network)}).fit(wide)
    assert model.module().numbers.bias.shape[2:] == (300, 2_048 // 300)


def test_a_large_table_takes_fewer_members_and_epochs() -> None:
    def made(rows: int, network: dict[str, Any], **given: Any) -> tuple[dict[str, Any], Any, Any]:
        plan = TablePlan(kind=TableRow(), edges=[[0.0, 1.0]], uses=[], rows=rows)
        found = complete_table(TorchClassifier(**given), plan, ModelSpec("tabpack", network))
        return found["model"].kwargs, found.get("epochs"), found["batchSize"]

    network, *sizes = made(720_000, {})
    assert (network["rates"], network["dropouts"]) == ([1.0] * 3, [0.0, 0.1, 0.3])
    assert sizes == [1, 1024]
    network, *sizes = made(34_700, {})
    assert "rates" not in network
    assert sizes == [37, 256]
    network, *sizes = made(720_000, {"rates": [1.0], "dropouts": [0.1]}, epochs=3)
    assert (network["rates"], sizes) == ([1.0], [None, 1024])


@pytest.mark.telling
def test_in_a_pipeline_and_a_tuner(table: Any) -> None:
    rows = table.select("label", "number", "many")
    stage = TorchRegressor(**FAST)
    maps = [{stage.learningRate: 1e-2}]
    tuner = TrainValidationSplit(estimator=stage, estimatorParamMaps=maps, evaluator=RegressionEvaluator())
    model = Pipeline(stages=[tuner]).fit(rows).stages[0]
    assert len(model.validationMetrics) == 1
    # The tuner's own column is no input.
    assert model.bestModel.summary.columns["column"].tolist() == ["number", "many"]
    assert model.transform(rows).count() == ROWS


@pytest.mark.telling
def test_input_columns_may_be_named(table: Any, tmp_path: Path) -> None:
    model = TorchRegressor(**FAST, inputCols=["number", "many"]).fit(table)
    assert model.summary.columns["column"].tolist() == ["number", "many"]
    table.select("label", "number", "many").write.parquet(str(tmp_path / "files"))
    read = TorchRegressor(**FAST).fitOnParquet(str(tmp_path / "files"))
    assert read.transform(table).count() == ROWS


@pytest.mark.telling
def test_the_newest_rows_are_held_out(table: Any) -> None:
    estimator = TorchRegressor(**FAST, timeCol="when")
    fractions = [{estimator.validationFraction: share} for share in (0.1, 0.5)]
    models = [model for _, model in estimator.fitMultiple(table.drop("late"), fractions)]
    assert [model.summary.rows for model in models] == [2 * 360, 2 * 200]
    uses = models[0].summary.columns.set_index("column")
    # The trend of a time says nothing about later rows.
    assert uses.loc["when", "reason"] == "every held-out value lies above all training values"
    assert uses.loc["day", "reason"] == "weekday, monthday, yearday"


def test_a_stream_is_scored(classified: tuple[TorchModel, list[str]], table: Any, tmp_path: Path) -> None:
    model, _ = classified
    table.limit(50).write.parquet(str(tmp_path / "rows"))
    stream = table.sparkSession.readStream.schema(table.schema).parquet(str(tmp_path / "rows"))
    scored = run_stream(model.transform(stream).select("row", "prediction"), tmp_path).collect()
    expected = model.transform(table).select("row", "prediction").orderBy("row").collect()
    assert len(scored) == 50
    assert set(scored) <= set(expected)
