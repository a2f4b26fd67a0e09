"""A fitted stage as an MLflow `pyfunc`, which predicts pandas DataFrames without a Spark session."""

from __future__ import annotations

import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql.types import DoubleType, StructType

from ringspark.estimators.columns.inputs import source_names
from ringspark.estimators.inference.local_inputs import needs_spark, predict_frame
from ringspark.estimators.stages.spark_metadata import read_metadata
from ringspark.estimators.torch_model import TorchClassificationModel, TorchModel, TorchRegressionModel
from ringspark.pipelines import storage
from ringspark.pipelines.kinds import Array, Kind, Padded, Ragged, Scalar, Tokens, Vocabulary

_CLASSES = {kind.__name__: kind for kind in (TorchModel, TorchClassificationModel, TorchRegressionModel)}
_EXAMPLE_ROWS = 2
_REQUIREMENTS = ("ringspark", "torch", "pyspark", "pyarrow", "pandas", "numpy")


def save(model: TorchModel, folder: str, run_id: str | None = None, model_id: str | None = None) -> None:
    """Writes the model as a `pyfunc` to a new local folder, with the ids of MLflow's run and logged model."""
    import mlflow.pyfunc
    from mlflow.models import Model

    with tempfile.TemporaryDirectory(prefix="ringspark-") as temporary:
        stage = Path(temporary) / "stage"
        model.write().save(f"file://{stage}")
        mlflow.pyfunc.save_model(
            path=folder,
            loader_module=__name__,  # so this module must not move
            data_path=str(stage),
            mlflow_model=Model(run_id=run_id, model_id=model_id),
            signature=_signature(model),
            input_example=_example(model),
            pip_requirements=_requirements(),
        )


def load_stage(model_uri: str) -> Any:
    """Returns the fitted stage of a logged model, such as "models:/m-1f2e" or "models:/name/1"."""
    from mlflow.artifacts import download_artifacts
    from mlflow.models import Model

    folder = Path(download_artifacts(artifact_uri=model_uri))
    flavour = Model.load(str(folder)).flavors["python_function"]
    return _stage(str(folder / flavour["data"]))


def _load_pyfunc(data_path: str) -> ServedModel:
    """Loads the files of `save`; MLflow calls this function by its name."""
    return ServedModel(_stage(data_path))


class ServedModel:
    def __init__(self, stage: TorchModel) -> None:
        self.stage = stage

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Returns the columns that `transform` would add. A column of integers may be stored as floats."""
        frame = model_input if isinstance(model_input, pd.DataFrame) else pd.DataFrame(model_input)
        names, results = self.stage._outputs()
        predictor = self.stage._predictor(results=results)
        predicted = predict_frame(predictor, self.stage._inputs, self.stage.inputColumns(), names, frame)
        if name := _class_name(self.stage):
            # Unknown strings have the number after the last class.
            classes = np.array([*self.stage._labels, None], dtype=object)
            numbers = predicted[self.stage.getPredictionCol()].to_numpy(np.int64)
            predicted[name] = pd.Series(
                classes[np.minimum(numbers, len(classes) - 1)], index=predicted.index, dtype=object
            )
        return predicted


def _class_name(stage: TorchModel) -> str | None:
    if not isinstance(stage, TorchClassificationModel):
        return None
    return next((field.name for field in stage._class_name_fields(StructType())), None)


def _stage(folder: str) -> TorchModel:
    # With a scheme, because a session may look for a bare path on its own store.
    uri = f"file://{Path(folder).resolve()}"
    name = read_metadata(storage.normalize(uri))["class"].rpartition(".")[2]
    stage: TorchModel = _CLASSES[name].load(uri)
    return stage


def _signature(model: TorchModel) -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types.schema import Array as Repeated
    from mlflow.types.schema import ColSpec, DataType, Schema

    sources = _sources(model)
    if sources is None:
        return None

    def nested(kind: Kind) -> Any:
        shape = _shape(kind)
        if shape is None:
            return DataType.string if isinstance(kind, Vocabulary | Tokens) else DataType.binary
        # pandas and JSON bring wide dtypes, which a smaller dtype would refuse.
        found: Any = {"f": DataType.double, "b": DataType.boolean}.get(_wide(kind)[0], DataType.long)
        for _ in shape:
            found = Repeated(found)
        return found

    names, results = model._outputs()
    outputs = [
        ColSpec(DataType.double if isinstance(of, DoubleType) else Repeated(DataType.double), name)
        for name, of in zip(names, results.types, strict=True)
        if name
    ]
    if class_name := _class_name(model):
        outputs.append(ColSpec(DataType.string, class_name, required=False))
    inputs = [ColSpec(nested(kind), name) for name, kind in sources]
    return ModelSignature(inputs=Schema(inputs), outputs=Schema(outputs))


def _example(model: TorchModel) -> pd.DataFrame | None:
    sources = _sources(model)
    if sources is None:
        return None
    columns: dict[str, Any] = {}
    for name, kind in sources:
        if isinstance(kind, Vocabulary):
            columns[name] = [*(kind.words or ("",))][:1] * _EXAMPLE_ROWS
        elif isinstance(kind, Tokens):
            columns[name] = ["text"] * _EXAMPLE_ROWS
        elif (shape := _shape(kind)) is None:
            return None
        else:
            dtype = "int64" if _wide(kind).startswith("int") else _wide(kind)
            columns[name] = list(np.zeros((_EXAMPLE_ROWS, *shape), dtype))
            if shape:
                columns[name] = [row.tolist() for row in columns[name]]
    return pd.DataFrame(columns)


def _sources(model: TorchModel) -> list[tuple[str, Kind]] | None:
    found = dict[str, Kind]()
    for item, name in zip(model._inputs, source_names(model._inputs, model.inputColumns()), strict=True):
        if needs_spark(item):
            return None
        assert item.column is not None
        found.setdefault(name, item.column.kind)
    return list(found.items())


def _wide(kind: Kind) -> str:
    dtype = str(getattr(kind, "dtype", ""))
    return "float64" if dtype.startswith("float") else dtype


def _shape(kind: Kind) -> tuple[int, ...] | None:
    if isinstance(kind, Scalar):
        return ()  # one number
    if isinstance(kind, Padded | Ragged):
        return (getattr(kind, "length", None) or 1,)
    return (kind.shape or (1,)) if isinstance(kind, Array) else None


def _requirements() -> list[str]:
    found = []
    for name in _REQUIREMENTS:
        try:
            found.append(f"{name}=={version(name)}")
        except PackageNotFoundError:  # shipped as a zip
            found.append(name)
    return found
