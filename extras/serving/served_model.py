"""Loads the fitted stage of a logged MLflow model, and predicts pandas DataFrames without a Spark session.

MLflow models name this module, so it must not move. `ringspark.extras.serving` writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql.types import StructType

from ringspark.estimators.inference.local_inputs import predict_frame
from ringspark.estimators.names import first_line
from ringspark.estimators.stages.spark_metadata import read_metadata
from ringspark.estimators.stages.storage_root import find_session
from ringspark.estimators.torch_model import TorchClassificationModel, TorchModel, TorchRegressionModel
from ringspark.extras.quantiles.outputs import check_apart
from ringspark.models.class_scores import name_classes
from ringspark.pipelines import storage

_CLASSES = {kind.__name__: kind for kind in (TorchModel, TorchClassificationModel, TorchRegressionModel)}


def load_stage(model_uri: str) -> Any:
    """Returns the fitted stage of a logged model, such as "models:/m-1f2e" or "models:/name/1"."""
    from mlflow.artifacts import download_artifacts
    from mlflow.models import Model

    folder = Path(download_artifacts(artifact_uri=model_uri))
    found = Model.load(str(folder)).flavors.get("ringspark", {}).get("stage")
    if found is None:
        raise ValueError(
            f"{model_uri} holds no model of ringspark; give one that tracking='mlflow' has logged"
        )
    storage.check_inside(str(folder), found)
    return _stage(str(folder / found))


def save_logged(model_uri: str, folder: str) -> None:
    """Saves the stage of a logged model in a new folder on the store."""
    try:
        from mlflow.exceptions import MlflowException
    except ImportError:
        raise ValueError(f"{model_uri} needs the package mlflow; pip install 'ringspark[mlflow]'") from None
    try:
        stage = load_stage(model_uri)
    except MlflowException as error:
        raise ValueError(
            f"MLflow cannot give {model_uri}: {first_line(error)}; set MLFLOW_TRACKING_URI to the "
            "server, and give models:/name@alias or models:/name/version"
        ) from None
    stage.write().overwrite().save(folder)


def _load_pyfunc(data_path: str) -> ServedModel:
    """Loads the saved stage; MLflow calls this function by its name."""
    return ServedModel(_stage(data_path))


class ServedModel:
    def __init__(self, stage: TorchModel) -> None:
        self.stage = stage

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Returns the columns that `transform` would add. A column of integers may be stored as floats."""
        frame = model_input if isinstance(model_input, pd.DataFrame) else pd.DataFrame(model_input)
        check_apart(self.stage)
        names, results = self.stage._all_outputs()
        predictor = self.stage._predictor(results=results)
        inputs, columns = self.stage._inputs, self.stage.inputColumns()
        predicted = predict_frame(predictor, inputs, columns, names, frame, session_zone())
        if name := class_name(self.stage):
            classes = predicted[self.stage.getPredictionCol()].to_numpy(np.float64)
            labels = name_classes(classes, self.stage._labels)
            predicted[name] = pd.Series(labels, index=predicted.index, dtype=object)
        return predicted


def class_name(stage: TorchModel) -> str | None:
    """Returns the name of the column with the class names; None if there is none."""
    if not isinstance(stage, TorchClassificationModel):
        return None
    return next((field.name for field in stage._class_name_fields(StructType())), None)


def session_zone() -> str:
    """Returns the time zone of times without an offset."""
    session = find_session()
    return "UTC" if session is None else str(session.conf.get("spark.sql.session.timeZone"))


def _stage(folder: str) -> TorchModel:
    # With a scheme, because a session may look for a bare path on its own store.
    uri = f"file://{Path(folder).resolve()}"
    name = read_metadata(storage.normalize(uri))["class"].rpartition(".")[2]
    if name not in _CLASSES:
        raise ValueError(f"{folder} holds a {name}; give one of {', '.join(_CLASSES)}")
    stage: TorchModel = _CLASSES[name].load(uri)
    return stage
