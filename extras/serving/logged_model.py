"""A fitted stage as an MLflow model that predicts with ringspark and without it.

The model has two flavors. "python_function" is served: it holds the network and its pre- and postprocessing
(`served_folder`), and needs neither ringspark nor Spark. "ringspark" holds the fitted stage and the wheel of
ringspark. If the network cannot be exported, "python_function" loads the stage, and needs the wheel.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ringspark.extras.export.export import Export, ExportError
from ringspark.extras.serving.schema import example_of, signature_of
from ringspark.extras.serving.served_folder import PACKAGE, copy_package, pin, write_served
from ringspark.extras.serving.wheel_file import write_wheel

FLAVOR = "ringspark"
# Their names are in logged models, so they must not change.
_STAGE_LOADER = "ringspark.extras.serving.served_model"
_STAGE, _WHEELS, _SERVED = "stage", "wheels", "served"

_STAGE_PACKAGES = ("torch", "pyspark", "pyarrow", "pandas", "numpy")

_log = logging.getLogger(__name__)


def save(
    model: Any,
    folder: str,
    run_id: str | None = None,
    model_id: str | None = None,
    runtime: str | None = None,
) -> None:
    """Writes the stage as an MLflow model to a new local folder, with the ids of MLflow's run and model.

    Args:
        runtime: "onnx" or "torch" for the package that runs the served network, or "ringspark" to serve the
            stage itself; None takes the first one that works.
    """
    import mlflow.pyfunc
    from mlflow.models import Model

    with tempfile.TemporaryDirectory(prefix="ringspark-") as temporary:
        work = Path(temporary)
        pins = _write_served(model, work / _SERVED, runtime)
        wheel = write_wheel(work / _WHEELS)
        place = f"{_WHEELS}/{wheel.name}"
        of_stage = [place, *map(pin, _STAGE_PACKAGES)]
        described = Model(run_id=run_id, model_id=model_id)
        described.add_flavor(FLAVOR, stage=_STAGE, wheel=place, requirements=of_stage)
        model.write().save(f"file://{work / _STAGE}")
        is_served = pins is not None
        mlflow.pyfunc.save_model(
            path=folder,
            loader_module=PACKAGE if is_served else _STAGE_LOADER,
            data_path=str(work / (_SERVED if is_served else _STAGE)),
            code_paths=[str(copy_package(work / "code"))] if is_served else None,
            mlflow_model=described,
            signature=signature_of(model),
            input_example=example_of(model),
            pip_requirements=[pin("mlflow-skinny"), *(of_stage if pins is None else pins)],
        )
        shutil.copytree(work / _STAGE, Path(folder) / _STAGE)
        shutil.copytree(work / _WHEELS, Path(folder) / _WHEELS)


def write_model(export: Export, path: str) -> None:
    """Writes the format "mlflow" of `export`."""
    try:
        save(export.stage, path)
    except ValueError as error:
        raise ExportError(str(error)) from error


def _write_served(model: Any, folder: Path, runtime: str | None) -> list[str] | None:
    """Returns the pins of a served model; None if the stage itself is served."""
    if runtime == FLAVOR:
        return None
    try:
        return write_served(model, folder, runtime)
    except ValueError as error:
        if runtime is not None:
            raise ValueError(f"runtime={runtime!r} cannot serve this model: {error}") from error
        _log.warning("the logged model needs ringspark and pyspark where it is served, because %s", error)
        return None
