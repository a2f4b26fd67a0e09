"""Saves a stage that contains other stages, each in a subfolder: `estimator`, `evaluator`, `best-model`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from pyspark.ml.evaluation import Evaluator
from pyspark.ml.param import Params
from pyspark.ml.util import MLWritable

from ringspark.estimators.stages.persistence import ALLOW_PICKLE, StageWriter, allows_pickle
from ringspark.estimators.stages.spark_metadata import METADATA, read_metadata
from ringspark.estimators.stages.storage_root import active_session
from ringspark.pipelines import storage
from ringspark.pipelines.spark_paths import to_spark_uri


class SearchWriter(StageWriter):
    def __init__(self, stage: Params, parts: Mapping[str, Any], extra: dict[str, Any] | None = None) -> None:
        bare = copy.copy(stage)
        bare._paramMap = {param: value for param, value in stage._paramMap.items() if param.name not in parts}
        super().__init__(bare, extra=extra)
        self._parts = {name: part for name, part in parts.items() if part is not None}
        for name, part in self._parts.items():
            if not isinstance(part, MLWritable):
                raise ValueError(
                    f"{name} {type(part).__name__} cannot be saved, because it is not MLWritable; derive "
                    "its class from DefaultParamsWritable and DefaultParamsReadable"
                )

    def _write(self, uri: str) -> None:
        for name, part in self._parts.items():
            writer = part.write()
            if isinstance(writer, StageWriter):
                writer._write(storage.join(uri, name))
            else:
                writer.save(to_spark_uri(active_session(), storage.join(uri, name)))
        # Last, because its description marks the stage as complete.
        super()._write(uri)


# Packages whose stages a saved search may name.
_OURS = ("ringspark.estimators.", "ringspark.extras.")


def load_part(uri: str, name: str) -> Any:
    """Loads one of the stages inside a saved stage; returns None if it is missing.

    Raises ValueError if the class is neither from ringspark nor an evaluator of Spark ML, unless
    RINGSPARK_ALLOW_PICKLE=1 allows other classes.
    """
    folder = storage.join(uri, name)
    if not storage.exists(storage.join(folder, METADATA)):
        return None
    path = to_spark_uri(active_session(), folder)
    found = str(read_metadata(folder)["class"])
    # Spark's metadata has the JVM's name of a class.
    module, _, kind = found.replace("org.apache.spark.", "pyspark.", 1).rpartition(".")
    if allows_pickle():
        return getattr(import_module(module), kind).load(path)
    known: Any = None
    is_ours = module.startswith(_OURS)
    if is_ours or module.startswith("pyspark.ml."):
        known = getattr(import_module(module), kind, None)
    # From Spark ML only evaluators: a Pipeline, for example, imports the classes that its folder names.
    base = Params if is_ours else Evaluator
    is_known = isinstance(known, type) and issubclass(known, base)
    # A class of ringspark that has moved is also found by its old name.
    if not is_known or not (known.__module__ == module or (is_ours and known.__module__.startswith(_OURS))):
        raise ValueError(
            f"{path} names the class {found!r}, which is neither ringspark's nor an evaluator of Spark ML; "
            f"loading it would run its code, so set {ALLOW_PICKLE}=1 if you trust its author"
        )
    return cast(Any, known).load(path)
