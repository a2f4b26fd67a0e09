"""Saves and loads stages. The layout of a saved estimator or model, format version 2:

    metadata/             Spark ML's own part: class, uid, Params that are JSON
    ringspark.json        version, model's spec, names of pickled Params; for models also inputs, output
                          shapes and summary. Written last, when the stage is complete.
    weights/              models only: a checkpoint
    <param>.safetensors   estimators only: the initial weights of a network in `ringspark.json`
    <param>.program.json  models only: a network of a user's class as a program (`models.program`);
                          <param>.constants.safetensors: its tensors that no checkpoint holds
    objects.pkl           only if a Param holds other Python code

Loading `objects.pkl` runs code from whoever wrote it, so the user has to set RINGSPARK_ALLOW_PICKLE=1. If it
is set during `save` and `load`, a program comes back as its class, which can train further.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from pyspark.ml import Model
from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsReader, MLReader, MLWriter
from torch import nn

from ringspark.estimators import user_code
from ringspark.estimators.options.declare import Options
from ringspark.estimators.run_layout import CHECKPOINTS
from ringspark.estimators.stages.held_weights import HeldWeights
from ringspark.estimators.stages.saved_networks import PROGRAM, load_network, save_program, save_start
from ringspark.estimators.stages.spark_metadata import METADATA, read_metadata, write_metadata
from ringspark.estimators.stages.storage_root import find_session
from ringspark.models import ModelSpec
from ringspark.models.layers import describe_network
from ringspark.models.meta_device import copy_to_meta
from ringspark.models.program import Program
from ringspark.pipelines import storage
from ringspark.pipelines.folder_removal import check_removal, discard, remove_folder
from ringspark.pipelines.spark_paths import resolve
from ringspark.pipelines.typed_json import OtherFormatError, record, versioned

FORMAT_VERSION = 2
DESCRIPTION = "ringspark.json"
OBJECTS = "objects.pkl"
WEIGHTS_FOLDER = "weights"
_TENSORS = r"(?:model|adapter|optimizer|average|ranks)(?:-[\w.-]+)?\.safetensors|checkpoint\.json"
# All paths that a stage writes. Overwriting is refused if the folder holds another file, except below
# "evaluator/", whose class decides its own files.
_PATHS = (
    rf"(?:(?:estimator|best-model|evaluator)/)*(?:{METADATA}/(?:\.?part-[\w.-]+|\.?_SUCCESS(?:\.crc)?)|"
    rf"{WEIGHTS_FOLDER}/(?:{_TENSORS})|{CHECKPOINTS}/step-\d+/(?:{_TENSORS}|training\.json|part-[\w.-]+\.json)|"
    rf"{re.escape(DESCRIPTION)}|{re.escape(OBJECTS)}|"
    r"[a-z]\w*\.(?:(?:constants\.)?safetensors|program\.json))|evaluator/.+"
)
ALLOW_PICKLE = "RINGSPARK_ALLOW_PICKLE"

Stage = TypeVar("Stage", bound=Any)


@dataclass(frozen=True, kw_only=True)
class Description:
    """The content of `ringspark.json`; a model adds fields.

    `model` is a ModelSpec as JSON. `objects` names the Params that only `objects.pkl` holds. `modules` has
    the descriptions of networks, by Param.
    """

    model: str | None
    objects: tuple[str, ...]
    format_version: int = FORMAT_VERSION
    modules: dict[str, Any] | None = None


class StageWriter(MLWriter):
    """Writes any stage; only models have `weights`, `program` and `extra` (fields of `ringspark.json`)."""

    def __init__(
        self,
        stage: Params,
        weights: HeldWeights | None = None,
        extra: dict[str, Any] | None = None,
        program: Callable[[], Program | None] = lambda: None,
    ) -> None:
        super().__init__()
        self._stage = stage
        self._weights = weights
        self._extra = extra or {}
        self._program = program

    def save(self, path: str) -> None:
        """Writes the stage to the folder `path`; replaces a stage there if `overwrite()` was called."""
        if not isinstance(path, str):
            raise TypeError(f"path must be a string, got {type(path).__name__}")
        uri = meaning_of(path)
        was_there = storage.exists(uri)
        found = storage.list_names(uri) if was_there else []
        if found and not self.shouldOverwrite:
            raise ValueError(f"{path} exists already; use .write().overwrite().save(path) to replace it")
        if found and not _holds_stage(uri, found):
            raise ValueError(
                f"{path} holds something else than a saved stage ({', '.join(found[:3])}) and is not "
                "overwritten; give an empty folder"
            )
        if found:
            check_removal(uri, _PATHS)
        if self._weights is not None:
            self._weights.check()
        # Written next to the old stage, which may hold the weights to copy and stays until this is complete.
        target = f"{uri}.{uuid.uuid4().hex[:12]}" if found else uri
        storage.check_writable(target)
        try:
            self._write(target)
        except BaseException:
            # An empty folder that was there before stays, with its owner and permissions.
            discard(target, _PATHS, keep_folder=was_there and target == uri)
            raise
        if found:
            _swap(target, uri)

    def _write(self, uri: str) -> None:
        spec: str | None = None
        plain: dict[str, Any] = {}
        objects: dict[str, Any] = {}
        modules: dict[str, Any] = {}
        # Classes of saved programs, which are loaded only if pickles are allowed.
        classes: dict[str, Any] = {}
        for param, value in self._stage._paramMap.items():
            if isinstance(value, Model):
                remedy = "its path" if hasattr(value, "_trained") else "a column that it added to the rows"
                raise ValueError(
                    f"{param.name} of {self._stage.uid} is a model in memory; save that model, and set "
                    f"{param.name} to {remedy} before you save this stage"
                )
            if isinstance(value, Options):
                plain[param.name] = value.to_values()
            elif isinstance(value, ModelSpec):
                spec = value.to_json()
            elif _is_json(value):
                plain[param.name] = value
            elif isinstance(value, nn.Module) and (known := self._network(uri, param.name, value)):
                modules[param.name] = known
                if PROGRAM in known and allows_pickle() and not isinstance(value, Program):
                    classes[param.name] = copy_to_meta(value)
            elif isinstance(value, nn.Module) and self._holds_weights_of(param.name):
                objects[param.name] = copy_to_meta(value)
            else:
                objects[param.name] = value
        write_metadata(self._stage, uri, plain)
        if objects or classes:
            storage.write_atomic(storage.join(uri, OBJECTS), user_code.dumps(objects | classes))
        if self._weights is not None:
            self._weights.copy_to(storage.join(uri, WEIGHTS_FOLDER))
        description = {
            "format_version": FORMAT_VERSION,
            "model": spec,
            "objects": sorted(objects),
            "modules": modules,
        }
        storage.write_atomic(
            storage.join(uri, DESCRIPTION), json.dumps(description | self._extra, indent=1).encode()
        )

    def _network(self, uri: str, param: str, module: nn.Module) -> dict[str, Any] | None:
        """Writes a network without pickle; returns its entry in `ringspark.json`, None if it needs pickle."""
        description = describe_network(module)
        if self._holds_weights_of(param):
            if description is None and (program := self._program()) is not None:
                description = save_program(uri, param, program)
        elif description is not None:
            # The initial weights are a part of the estimator.
            save_start(uri, param, module)
        return description

    def _holds_weights_of(self, param: str) -> bool:
        # A transform keeps its own weights.
        return self._weights is not None and param == "model"


class StageReader(MLReader[Stage], Generic[Stage]):
    def __init__(self, cls: type[Stage]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Stage:
        """Loads the stage that was saved in the folder `path`; raises ValueError if it cannot."""
        uri = meaning_of(path)
        has_metadata = bool(storage.list_names(storage.join(uri, METADATA)))
        metadata = self._metadata(path, uri) if has_metadata else {}
        description = self._describe(path, uri)
        if not has_metadata:
            raise ValueError(f"{path} is incomplete ({METADATA}/ is missing); save the stage again")
        stage: Stage = self._cls()
        if unknown := sorted({*metadata["paramMap"]} - {param.name for param in stage.params}):
            raise ValueError(
                f"{path} has the setting {unknown[0]!r}, which {self._cls.__name__} does not have in this "
                "version of ringspark; load it with the version that saved it, or make and save it again"
            )
        cast(Any, stage)._resetUid(metadata["uid"])
        try:
            try:
                DefaultParamsReader.getAndSetParams(stage, metadata)
            except ValueError as error:  # a value that no stage would have taken
                raise _damaged(path, error) from error
            if description.model is not None:
                stage._set(model=_spec(path, uri, description.model))
            for name, known in (description.modules or {}).items():
                stage._set(**{name: self._network(path, uri, name, known)})
            if description.objects or (allows_pickle() and storage.exists(storage.join(uri, OBJECTS))):
                stage._set(**_load_objects(path, uri, description.objects))
            if hasattr(stage, "_restore"):
                stage._restore(uri, description)
        except (LookupError, TypeError, AttributeError, OverflowError, AssertionError) as error:
            raise _damaged(path, error) from error
        return stage

    def _metadata(self, path: str, uri: str) -> dict[str, Any]:
        """Reads Spark's metadata; raises ValueError if the folder holds a stage of another class."""
        try:
            metadata = read_metadata(uri)
        except ValueError as error:
            raise _damaged(path, error) from error
        found = metadata["class"]
        if found.rsplit(".", 1)[-1] != self._cls.__name__:
            raise ValueError(f"{path} holds a {found}, not a {self._cls.__name__}; load it with that class")
        return metadata

    def _network(self, path: str, uri: str, param: str, description: dict[str, Any]) -> nn.Module:
        try:
            return load_network(
                uri, param, description, is_fitted=param == "model" and hasattr(self._cls, "_restore")
            )
        except ValueError as error:
            raise ValueError(
                f"{path}: the network of {param!r} cannot be loaded: {error}; if need be, save the stage "
                "again"
            ) from error

    def _describe(self, path: str, uri: str) -> Description:
        file = storage.join(uri, DESCRIPTION)
        if not storage.exists(file):
            raise ValueError(
                f"{path} holds no saved {self._cls.__name__} ({DESCRIPTION} is missing); "
                "give the folder that save() wrote"
            )
        known: type[Description] = getattr(self._cls, "_description", Description)
        try:
            return record(known, versioned(storage.read_bytes(file), FORMAT_VERSION, allow_nan=True))
        except OtherFormatError as error:
            raise ValueError(f"{path} cannot be loaded: {error}") from None
        except ValueError as error:
            raise _damaged(path, error) from error


def meaning_of(path: str) -> str:
    """Returns the normalized URI of the folder that Spark means by `path`. Runs on the driver."""
    session = find_session()
    if session is None:
        return storage.normalize(path)
    if path.startswith("~"):
        # Spark would write its part of a Pipeline there, and ours would lie in the home folder.
        raise ValueError(
            f"{path!r} is a folder named '~' to Spark; give the whole path, {os.path.expanduser(path)!r}"
        )
    found = resolve(session, path)
    if path.startswith("/dbfs/") and found.startswith("file://"):
        raise ValueError(
            f"{path!r} means {'dbfs:' + path!r} to Spark, but {'dbfs:' + path[5:]!r} to Python; give one of "
            "these two URIs"
        )
    return storage.normalize(found)


def _holds_stage(uri: str, names: list[str]) -> bool:
    if DESCRIPTION in names:
        return True
    # Iceberg's tables have a folder of that name, too.
    try:
        return METADATA in names and "uid" in read_metadata(uri)
    except (ValueError, KeyError, TypeError):
        return False


def _swap(new: str, old: str) -> None:
    """Puts the folder `new` in the place of the folder `old`.

    On a local disk, a complete stage exists at any moment. On an object store, `new` is removed only after it
    has been copied to `old`.
    """
    if storage.is_local(new):
        retired = f"{old}.{uuid.uuid4().hex[:12]}"
        try:
            os.rename(old, retired)
            try:
                os.rename(new, old)
            except BaseException:
                os.rename(retired, old)
                raise
        except BaseException:
            discard(new, _PATHS)
            raise
        remove_folder(retired, _PATHS)
        return
    fs, source = storage.filesystem(new)
    _, target = storage.filesystem(old)
    try:
        remove_folder(old, _PATHS)
        # A copy, because a move that fails halfway may have removed what it had moved.
        fs.copy(source, target, recursive=True)
    except Exception as error:
        raise OSError(
            f"{old} could not be replaced ({error}); the new stage is whole in {new}: load it from there, or "
            f"save again"
        ) from error
    remove_folder(new, _PATHS)


def _damaged(path: str, error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged ({type(error).__name__}: {error}); save the stage again")


def _spec(path: str, uri: str, text: str) -> ModelSpec:
    spec = ModelSpec.from_json(text)
    if storage.is_local(uri) and not allows_pickle():
        try:
            spec.check_apart(storage.filesystem(uri)[1])
        except ValueError as error:
            raise ValueError(
                f"{path}: {error}; set {ALLOW_PICKLE}=1 if you trust the author of the stage"
            ) from None
    return spec


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def allows_pickle() -> bool:
    return os.environ.get(ALLOW_PICKLE) == "1"


def _load_objects(path: str, uri: str, names: Sequence[str]) -> dict[str, Any]:
    if not allows_pickle():
        network = "; the code is the network's class, and the network can be trained only by its class"
        network = network if "model" in names else ""
        raise ValueError(
            f"{path} holds pickled Python code for {list(names)}, which runs when it is loaded{network}; if "
            f"you trust its author, set {ALLOW_PICKLE}=1, or save a model made by ModelSpec instead"
        )
    file = storage.join(uri, OBJECTS)
    if not storage.exists(file):
        raise ValueError(f"{path} is incomplete ({OBJECTS} is missing); save the stage again")
    try:
        objects: dict[str, Any] = user_code.loads(storage.read_bytes(file))
    except Exception as error:  # unpickling runs any code
        raise ValueError(
            f"{path}/{OBJECTS} cannot be read here ({type(error).__name__}: {error}); install the "
            "packages that were installed where the stage was saved"
        ) from error
    return objects
