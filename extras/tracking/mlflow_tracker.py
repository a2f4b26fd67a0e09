"""Logs a training as one run of MLflow, from the driver only.

MLflow's active run and tracking URI are read and never changed, so other code of the process is not affected.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ringspark.estimators.lazy_imports import load_object
from ringspark.estimators.tracking.base import Listener, RunStart, Text, Tracker, check_options

# Keys of `RunStart.surroundings`.
PARENT = "mlflow.parent"
EXPERIMENT = "mlflow.experiment"
CONTEXT = "mlflow.context"

# A path, because the module imports MLflow, which takes seconds.
RUN = "ringspark.extras.tracking.mlflow_run:MlflowRun"

# Set by Databricks on its clusters.
_DATABRICKS = "DATABRICKS_RUNTIME_VERSION"


@dataclass(frozen=True)
class MlflowTracker(Tracker):
    """Logs one run per training; a resumed training continues its run.

    Attributes:
        tracking_uri: Address of the server or database; default: `mlflow.get_tracking_uri()`.
        registry_uri: Address of the model registry, such as "databricks-uc"; default: MLflow's own choice.
        experiment: Name of the experiment, created if needed; default: the parent run's, else the active one.
        run_name: Name of the run; default: the stage's uid.
        tags: Further tags of the run.
        log_model: Whether to log the fitted stage, as a `pyfunc` that needs neither Spark nor ringspark.
        runtime: Package that runs the logged `pyfunc`: "onnx", "torch", or "ringspark" itself; None takes the
            first that can run it.
        registered_model_name: Name to register the stage under; "catalog.schema.model" in Unity Catalog.
        alias: Alias of the registered version, such as "champion" in "models:/name@champion".
        nested: Whether a run that is active in the caller of `fit` becomes the parent.
        parent_run_id: Id of the parent, instead of the active run.
    """

    name: ClassVar[str] = "mlflow"
    tracking_uri: Text | None = None
    registry_uri: Text | None = None
    experiment: Text | None = None
    run_name: Text | None = None
    tags: dict[str, Any] | None = None
    log_model: bool = True
    registered_model_name: Text | None = None
    alias: Text | None = None
    runtime: Literal["onnx", "torch", "ringspark"] | None = None
    nested: bool = True
    parent_run_id: str | None = None

    def check(self) -> None:
        check_options(self, package="mlflow")
        if self.registered_model_name is not None and not self.log_model:
            raise ValueError(
                "tracking: registered_model_name of 'mlflow' needs the logged model, but log_model is "
                "False; drop one of the two"
            )
        if self.alias is not None and self.registered_model_name is None:
            raise ValueError("tracking: alias of 'mlflow' needs registered_model_name; set it too")

    def surroundings(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if os.environ.get(_DATABRICKS):
            found |= _databricks_context()
        if not self.nested:
            return found
        # Without the import there is no active run, and importing takes seconds.
        if "mlflow" in sys.modules:
            import mlflow

            active = mlflow.active_run()
            if active is not None:
                return found | {PARENT: active.info.run_id, EXPERIMENT: active.info.experiment_id}
        # Set by `mlflow run` and by jobs.
        given = os.environ.get("MLFLOW_RUN_ID")
        return found | {PARENT: given} if given else found

    def start(self, run: RunStart) -> Listener:
        return load_object(RUN)(self, run)  # type: ignore[no-any-return]


def _databricks_context() -> dict[str, str]:
    from mlflow.tracking.context import registry as context
    from mlflow.tracking.default_experiment import registry as default

    # Only the calling thread can read them. Both log their errors and raise nothing.
    found = {CONTEXT: json.dumps(context.resolve_tags())}
    experiment = default.get_experiment_id()
    return found if experiment is None else found | {EXPERIMENT: str(experiment)}
