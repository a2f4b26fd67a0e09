"""`TorchEstimator` and its two tasks: from a DataFrame to a trained network, in one `fit`.

The order of `fit` is the promise to the user: every setting is checked, then the storage, then the
data is written once and its statistics are checked, then the model is tried on two rows of zeros,
and only then does a gang start. Whatever fails, the folder of the fit is removed.
"""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Generic, TypeVar, cast

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLReader, MLWritable
from pyspark.sql import DataFrame, SparkSession

from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.gang import run_gang
from ringspark.estimators.launch.slots import check_slots
from ringspark.estimators.params import _ClassifierParams, _TrainingParams, set_params
from ringspark.estimators.persistence import StageReader, StageWriter
from ringspark.estimators.progress import ProgressWatcher
from ringspark.estimators.schema import check_columns_exist, check_inputs, check_types, for_fit
from ringspark.estimators.summary import TrainingSummary
from ringspark.estimators.torch_model import TorchClassificationModel, TorchModel, TorchRegressionModel
from ringspark.estimators.training.check import check_names, check_training
from ringspark.estimators.training.config import Task, TrainConfig, UserObjects
from ringspark.estimators.training.status import Status
from ringspark.estimators.training.worker import TrainResult, train_worker
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest, storage, write_shards
from ringspark.pipelines.columns import quote

_logger = logging.getLogger(__name__)

E = TypeVar("E", bound="TorchEstimator[Any]")
M = TypeVar("M", bound=TorchModel)


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """The work of one rank, as Spark ships it."""

    config: TrainConfig
    objects: UserObjects

    def __call__(self, collective: Collective, device: str, status: Status) -> str:
        return train_worker(self.config, collective, self.objects, device, status).to_json()


class TorchEstimator(_TrainingParams, Estimator, MLWritable, MLReadable[Any], Generic[M]):  # type: ignore[type-arg]
    """Trains any network with any loss; the model's prediction is the network's output.

    Keywords are the Params of the class: see `explainParams()`. `model` has no default.
    """

    _task: Task = "any"
    _model_class: type[TorchModel] = TorchModel

    def __init__(self, **params: Any) -> None:
        super().__init__()
        set_params(self, params)

    def setParams(self: E, **params: Any) -> E:
        """Sets several Params at once."""
        set_params(self, params)
        return self

    def fitOnShards(self, uri: str) -> M:
        """Trains on shards that `write_shards` has written; they stay as they are.

        Raises:
            ValueError: The settings, the model or the shards cannot be used; says why.
            WorkerError: A worker failed.
        """
        spark = _active_session()
        config, objects = self._settings()
        check_slots(spark, config.num_workers)
        manifest = ShardManifest.load(uri)
        manifest.verify_files()
        run_uri = self._new_folder(spark)
        return self._guarded(run_uri, spark, replace(config, shards_uri=manifest.uri), objects, manifest)

    def write(self) -> StageWriter:
        """A writer; its `overwrite()` replaces what is there."""
        return StageWriter(self)

    @classmethod
    def read(cls: type[E]) -> MLReader[E]:
        return StageReader(cls)

    def _fit(self, dataset: DataFrame) -> M:
        spark = dataset.sparkSession
        config, objects = self._settings()
        self._check_schema(dataset)
        check_slots(spark, config.num_workers)
        run_uri = self._new_folder(spark)
        shards_uri = storage.join(run_uri, "shards")
        validation_col = self._validation_col()
        columns = [*config.input_columns, config.label_column, config.weight_column, validation_col]
        try:
            manifest = write_shards(
                dataset.select(*dict.fromkeys(quote(c) for c in columns if c is not None)),
                shards_uri,
                validation_col=validation_col,
            )
        except BaseException as error:
            _discard(run_uri)
            if isinstance(error, ValueError):
                raise for_fit(error) from None
            raise
        model = self._guarded(run_uri, spark, replace(config, shards_uri=shards_uri), objects, manifest)
        _discard(shards_uri)
        return model

    def _guarded(
        self,
        run_uri: str,
        spark: SparkSession,
        config: TrainConfig,
        objects: UserObjects,
        manifest: ShardManifest,
    ) -> M:
        """Checks, trains and makes the model; a failure leaves nothing of the run behind."""
        try:
            config = replace(config, run_uri=run_uri)
            config, output_width = check_training(config, objects, manifest)
            storage.write_atomic(storage.join(run_uri, "config.json"), config.to_json().encode())
            task = TrainTask(config=config, objects=objects)
            with ProgressWatcher(run_uri, self.getShowProgress()):
                texts = run_gang(
                    spark,
                    config.num_workers,
                    config.collective,
                    task,
                    use_gpu=config.use_gpu,
                    timeout_seconds=config.timeout_seconds,
                )
        except BaseException:
            _discard(run_uri)
            raise
        return self._make_model(TrainResult.from_json(texts[0]), output_width)

    def _make_model(self, result: TrainResult, output_width: int | None) -> M:
        model = self._model_class()._set_trained(
            result.checkpoint_uri, output_width, TrainingSummary.of(result)
        )
        # Also the parent's uid, as every Spark ML model has it.
        model._resetUid(self.uid)
        return cast(M, self._copyValues(model))

    def _settings(self) -> tuple[TrainConfig, UserObjects]:
        """The Params as one checked config, and the Python objects that it has no names for."""
        if not self.isDefined(self.model):
            raise ValueError(
                f"{type(self).__name__} needs a model; pass model=ModelSpec('mlp', {{...}}) or an nn.Module"
            )
        model, loss = self.getModel(), self.getLoss()
        optimizer, schedule = self.getOptimizer(), self.getLrSchedule()
        by_name = {
            name: value
            for name, value in (("loss", loss), ("optimizer", optimizer), ("lr_schedule", schedule))
            if isinstance(value, str)
        }
        config = TrainConfig(
            shards_uri="",
            run_uri="",
            task=self._task,
            model=model.to_json() if isinstance(model, ModelSpec) else None,
            input_columns=tuple(self.inputColumns()),
            label_column=self.getLabelCol(),
            weight_column=self.getWeightCol() if self.isDefined(self.weightCol) else None,
            learning_rate=self.getLearningRate(),
            weight_decay=self.getWeightDecay(),
            max_grad_norm=self.getMaxGradNorm(),
            epochs=self.getEpochs(),
            batch_size=self.getBatchSize(),
            seed=self.getSeed(),
            shuffle=self.getShuffle(),
            num_workers=self.getNumWorkers(),
            use_gpu=self.getUseGpu(),
            collective=self.getCollective(),
            precision=cast(Any, self.getPrecision()),
            gradient_checkpointing=self.getGradientCheckpointing(),
            gradient_accumulation=self.getGradientAccumulation(),
            reader=self.getReader(),
            timeout_seconds=self.getTimeoutSeconds(),
            **by_name,
        )
        objects = UserObjects(
            module=None if isinstance(model, ModelSpec) else model,
            loss=None if "loss" in by_name else loss,
            optimizer=None if "optimizer" in by_name else optimizer,
            lr_schedule=None if "lr_schedule" in by_name else schedule,
        )
        check_names(config, objects)
        return config, objects

    def _validation_col(self) -> str | None:
        return self.getValidationIndicatorCol() if self.isDefined(self.validationIndicatorCol) else None

    def _check_schema(self, dataset: DataFrame) -> None:
        schema = dataset.schema
        check_inputs(schema, self.inputColumns())
        others = {self.getLabelCol(): "labelCol"}
        if self.isDefined(self.weightCol):
            others[self.getWeightCol()] = "weightCol"
        if (validation := self._validation_col()) is not None:
            others[validation] = "validationIndicatorCol"
        check_columns_exist(schema, others)
        check_types(schema, [name for name, param in others.items() if param != "validationIndicatorCol"])

    def _new_folder(self, spark: SparkSession) -> str:
        """A folder of this fit's own, never one that was used before."""
        root = self.getStorageUri() or _session_folder(spark.conf.get("spark.master", "") or "")
        with suppress(OSError):
            # Made first, and kept: fits that run side by side must not remove it under each other.
            storage.make_dirs(storage.normalize(root))
        storage.check_writable(root)
        return storage.join(storage.normalize(root), f"run-{uuid.uuid4().hex[:12]}")


class TorchClassifier(TorchEstimator[TorchClassificationModel], _ClassifierParams):
    """Trains a network to tell classes 0..n-1 apart.

    The network gives (batch, n) logits, or (batch, 1) or (batch,) for two classes.
    """

    _task: Task = "classification"
    _model_class = TorchClassificationModel


class TorchRegressor(TorchEstimator[TorchRegressionModel]):
    """Trains a network to give numbers: (batch,) or (batch, 1), or (batch, k) for array labels."""

    _task: Task = "regression"
    _model_class = TorchRegressionModel


def _discard(uri: str) -> None:
    """Removes a folder, best effort: a store that hiccups must hide neither a model nor an error."""
    try:
        storage.remove(uri, recursive=True)
    except OSError as error:
        _logger.warning("could not remove %s: %s", uri, error)


def _active_session() -> SparkSession:
    session = SparkSession.getActiveSession()
    if session is None:
        raise ValueError("no Spark session is active; make one with SparkSession.builder.getOrCreate()")
    return session


def _session_folder(master: str) -> str:
    if not master.startswith("local"):
        raise ValueError(
            f"storageUri is not set; on master {master!r} give a folder that driver and executors share"
        )
    return _temporary_folder()


@cache
def _temporary_folder() -> str:
    """One folder a process, removed when it ends; models of a session without storageUri live there."""
    folder = tempfile.mkdtemp(prefix="ringspark-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
