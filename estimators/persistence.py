"""Stages on disk. The layout of a saved estimator or model, format version 1:

    metadata/             Spark ML's own: class, uid, Params that are JSON
    ringspark.json        format version, the model's spec, output shape, training summary
    weights/              a checkpoint (safetensors + JSON), models only
    objects.pkl           only where a Param holds Python code: an nn.Module, a callable

Without `objects.pkl` nothing is unpickled on load. With it, loading runs code of whoever wrote the
file, so it needs an explicit yes: the environment variable RINGSPARK_ALLOW_PICKLE=1.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import Any, Generic, TypeVar, cast

import cloudpickle
from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from ringspark.estimators.training.checkpoint import COMMIT, WEIGHTS, read_info
from ringspark.models import ModelSpec
from ringspark.pipelines import storage

FORMAT_VERSION = 1
DESCRIPTION = "ringspark.json"
OBJECTS = "objects.pkl"
WEIGHTS_FOLDER = "weights"
ALLOW_PICKLE = "RINGSPARK_ALLOW_PICKLE"

Stage = TypeVar("Stage", bound=Any)


class StageWriter(MLWriter):
    """Writes any of our stages; `weights_uri` and `extra` come from models."""

    def __init__(
        self, stage: Params, weights_uri: str | None = None, extra: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self._stage = stage
        self._weights_uri = weights_uri
        self._extra = extra or {}

    def save(self, path: str) -> None:
        """Writes the stage to the folder `path`.

        Raises:
            ValueError: The folder exists and `overwrite()` was not asked for, or cannot be written.
        """
        if not isinstance(path, str):
            raise TypeError(f"path must be a string, got {type(path).__name__}")
        uri = storage.normalize(path)
        if storage.exists(uri) and storage.list_names(uri):
            if not self.shouldOverwrite:
                raise ValueError(f"{path} exists already; use .write().overwrite().save(path) to replace it")
            # A model may be saved over the folder that its own weights are in.
            if self._weights_uri is None or not self._weights_uri.startswith(uri + "/"):
                storage.remove(uri, recursive=True)
            else:
                raise ValueError(f"{path} holds this model's own weights; save it to another folder")
        storage.check_writable(uri)
        try:
            self.saveImpl(path)
        except BaseException:
            storage.remove(uri, recursive=True)
            raise

    def saveImpl(self, path: str) -> None:
        uri = storage.normalize(path)
        plain: dict[str, Any] = {}
        objects: dict[str, Any] = {}
        spec: str | None = None
        for param, value in self._stage._paramMap.items():
            if isinstance(value, ModelSpec):
                spec = value.to_json()
            elif _is_json(value):
                plain[param.name] = value
            else:
                objects[param.name] = value
        DefaultParamsWriter.saveMetadata(
            self._stage, path, cast(Any, metadata_session(self.sparkSession)), paramMap=plain
        )
        if objects:
            storage.write_atomic(storage.join(uri, OBJECTS), cloudpickle.dumps(objects))
        if self._weights_uri is not None:
            copy_weights(self._weights_uri, storage.join(uri, WEIGHTS_FOLDER))
        description = {"format_version": FORMAT_VERSION, "model": spec, "objects": sorted(objects)}
        # Last: its presence says that all of the stage is here.
        storage.write_atomic(
            storage.join(uri, DESCRIPTION), json.dumps(description | self._extra, indent=1).encode()
        )


class StageReader(MLReader[Stage], Generic[Stage]):
    """Reads what `StageWriter` wrote."""

    def __init__(self, cls: type[Stage]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Stage:
        """The stage saved in the folder `path`.

        Raises:
            ValueError: No stage is there, it is of another class or a newer format, or it holds
                pickled code and loading that was not allowed.
        """
        uri = storage.normalize(path)
        description = self._describe(path, uri)
        metadata = DefaultParamsReader.loadMetadata(path, cast(Any, metadata_session(self.sparkSession)))
        found = metadata["class"]
        if found.rsplit(".", 1)[-1] != self._cls.__name__:
            raise ValueError(f"{path} holds a {found}, not a {self._cls.__name__}; load it with that class")
        stage: Stage = self._cls()
        cast(Any, stage)._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        if description["model"] is not None:
            stage._set(model=ModelSpec.from_json(description["model"]))
        if description["objects"]:
            stage._set(**_load_objects(path, uri, description["objects"]))
        if hasattr(stage, "_restore"):
            stage._restore(uri, description)
        return stage

    def _describe(self, path: str, uri: str) -> dict[str, Any]:
        file = storage.join(uri, DESCRIPTION)
        if not storage.exists(file):
            raise ValueError(
                f"{path} holds no saved {self._cls.__name__} ({DESCRIPTION} is missing); "
                "give the folder that save() wrote"
            )
        description: dict[str, Any] = json.loads(storage.read_bytes(file))
        if description["format_version"] > FORMAT_VERSION:
            raise ValueError(
                f"{path} has stage format {description['format_version']}, this ringspark reads up to "
                f"{FORMAT_VERSION}; upgrade ringspark"
            )
        return description


def metadata_session(session: Any) -> Any:
    """What `saveMetadata` and `loadMetadata` want: a SparkContext before Spark 4, then a session."""
    import pyspark

    return session if int(pyspark.__version__.split(".")[0]) >= 4 else session.sparkContext


def copy_weights(source: str, target: str) -> None:
    """Copies a checkpoint between stores, the committing file last."""
    read_info(source)
    storage.make_dirs(target)
    for name in (WEIGHTS, COMMIT):
        with (
            storage.open_file(storage.join(source, name), "rb") as reader,
            storage.open_file(storage.join(target, name), "wb") as writer,
        ):
            shutil.copyfileobj(reader, writer, 16 << 20)


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _load_objects(path: str, uri: str, names: list[str]) -> dict[str, Any]:
    if os.environ.get(ALLOW_PICKLE) != "1":
        raise ValueError(
            f"{path} holds pickled Python code for {names}, which runs when it is loaded; if you trust "
            f"whoever wrote it set {ALLOW_PICKLE}=1, or save a model made by ModelSpec instead"
        )
    objects: dict[str, Any] = cloudpickle.loads(storage.read_bytes(storage.join(uri, OBJECTS)))
    return objects
