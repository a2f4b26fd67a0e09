"""`mlflow.pyspark.ml.autolog()` still works with our stages in a pipeline."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler

from ringspark.estimators import TorchClassifier
from ringspark.extras.tracking.loggable_models import lines
from ringspark.models import ModelSpec

mlflow = pytest.importorskip("mlflow")

SETTING = "spark.mlflow.pysparkml.autolog.logModelAllowlistFile"


@pytest.mark.spark
@pytest.mark.slow
# Warnings of MLflow and of its imports.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pydantic.PydanticDeprecatedSince20")
def test_autolog_logs_a_pipeline_with_our_stage(spark: Any, tmp_path: Path) -> None:
    import mlflow.pyspark.ml as flavour

    listed = tmp_path / "loggable_models.txt"
    listed.write_text("\n".join(lines()))
    conf = spark.sparkContext._conf
    before, address = conf.get(SETTING), mlflow.get_tracking_uri()
    conf.set(SETTING, str(listed))  # as if the session had started with it
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    try:
        flavour.autolog()
        columns = "sin(id) AS a", "cos(id) AS b", "cast(sin(id) > 0 AS double) AS label"
        rows = spark.range(400).selectExpr(*columns)
        assemble = VectorAssembler(inputCols=["a", "b"], outputCol="features")
        spec = ModelSpec("mlp", {"in_features": 2, "hidden": [8], "out_features": 2})
        settings = {"epochs": 3, "learningRate": 0.05, "storageUri": str(tmp_path / "store")}
        network = TorchClassifier(model=spec, **settings, showProgress=False)
        experiment = mlflow.create_experiment("autolog", artifact_location=str(tmp_path / "artifacts"))
        with mlflow.start_run(experiment_id=experiment) as run:
            model = Pipeline(stages=[assemble, network]).fit(rows)
            predicted = model.transform(rows)
            accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(predicted)
        found = mlflow.get_run(run.info.run_id)
        assert found.data.params["TorchClassifier.epochs"] == "3"
        logged = [value for name, value in found.data.metrics.items() if name.startswith("accuracy")]
        assert logged == [accuracy]
        loaded = mlflow.spark.load_model(f"runs:/{run.info.run_id}/model")
        assert loaded.transform(rows).collect() == predicted.collect()
    finally:
        flavour.autolog(disable=True)
        mlflow.set_tracking_uri(address)
        if before is None:
            conf._jconf.remove(SETTING)
        else:
            conf.set(SETTING, before)
