"""The estimators: from a DataFrame to a trained network.

`fit` checks settings, schema and storage, writes the data once, checks its statistics, and tries the model on
two rows of zeros before a gang starts. If anything fails, it removes its folders.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from pyspark.ml import Estimator
from pyspark.ml.base import _FitMultipleIterator
from pyspark.ml.util import MLReadable, MLReader, MLWritable
from pyspark.sql import DataFrame, SparkSession

from ringspark.estimators.checked_fit import CheckedFit, check_settings, prepare_checked
from ringspark.estimators.launch.python_daemon import choose_daemon
from ringspark.estimators.launch.supervisor import Supervisor
from ringspark.estimators.launch.train_task import TrainTask
from ringspark.estimators.prepared_fit import Plans, PreparedFit, prepare_fit
from ringspark.estimators.run.folder import RunFolder, check_run_uri
from ringspark.estimators.run.identity import identity_of
from ringspark.estimators.run.shards import ShardStates, run_shards
from ringspark.estimators.stages.declared import plain_values
from ringspark.estimators.stages.fit_data import SharedShards
from ringspark.estimators.stages.model_params import _EstimatorParams, check_distinct, check_thresholds
from ringspark.estimators.stages.params import (
    ClassifierKeywords,
    ClassifierParams,
    EstimatorKeywords,
    LabelParams,
    MultiLabelParams,
    OffsetParams,
    RegressorKeywords,
    RegressorParams,
)
from ringspark.estimators.stages.persistence import StageReader, StageWriter
from ringspark.estimators.stages.storage_root import active_session, storage_root
from ringspark.estimators.stages.summary import TrainingSummary
from ringspark.estimators.stages.to_config import settings_without_effect
from ringspark.estimators.techniques import FUNCTIONS, techniques_in
from ringspark.estimators.torch_model import TorchClassificationModel, TorchModel, TorchRegressionModel
from ringspark.estimators.tracking.base import RunEnd, RunStart
from ringspark.estimators.tracking.registry import surroundings_of
from ringspark.estimators.tracking.watcher import RunWatcher
from ringspark.estimators.training.check.training import CheckedTraining
from ringspark.estimators.training.settings.choices import Task
from ringspark.estimators.training.worker import FinishedRun, TrainResult
from ringspark.models import ModelSpec
from ringspark.models.meta_device import copy_to_meta
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.spark_paths import resolve, to_spark_uri
from ringspark.pipelines.table_files import TableSource

E = TypeVar("E", bound="_TorchEstimator[Any]")
M = TypeVar("M", bound=TorchModel)


class _TorchEstimator(_EstimatorParams, Estimator, MLWritable, MLReadable[Any], Generic[M]):  # type: ignore[type-arg]
    """Base class of the estimators. The constructor's keywords are the Params."""

    _task: Task = "any"
    _model_class: type[TorchModel] = TorchModel

    _surroundings: Mapping[str, str] = MappingProxyType({})
    _source: TableSource | None = None

    def copy(self: E, extra: Any = None) -> E:
        # The calling thread's surroundings, such as an active run, may be missing in the fit's thread.
        that = super().copy(extra)
        that._surroundings = surroundings_of(that.getTracking()) or self._surroundings
        return that

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[dict[Any, Any]]) -> Iterator[tuple[int, M]]:
        """Fits one model per parameter map; fits that read the same columns share one write of the data.

        Returns a thread-safe iterator over (index of the map, model); each `next` is one fit.
        """
        estimators = [self.copy(cast(Any, values)) for values in paramMaps]
        for estimator in estimators:
            for technique in techniques_in(estimator):
                technique.check_many(estimator, "fitMultiple, as in a CrossValidator,")
            check_settings(estimator, dataset)
        plans = Plans()
        fits = [prepare_fit(estimator, dataset, plans) for estimator in estimators]
        checked = [CheckedFit.of(fit.estimator, fit.dataset) for fit in fits]
        runs = [c.data.root for c, e in zip(checked, estimators, strict=True) if e.getRunUri() is not None]
        if len(set(runs)) < len(runs):
            raise ValueError(
                f"runUri {runs[0]!r} is the folder of one training, and {len(estimators)} parameter maps are "
                "to be fitted; leave runUri unset, or give each map its own runUri"
            )
        choose_daemon(dataset.sparkSession, any(each.config.use_gpu for each in checked))
        datasets = {each.data: fit.dataset for each, fit in zip(checked, fits, strict=True)}
        shards = SharedShards(datasets, [each.data for each in checked])
        return _FitMultipleIterator(
            lambda index: fits[index].estimator._train(fits[index], checked[index], shards), len(fits)
        )

    def fitOnShards(self, uri: str) -> M:
        """Trains on shards that `write_shards` has written.

        Raises:
            ValueError: The settings, the model or the shards cannot be used.
            WorkerError: A worker failed.
        """
        spark, estimator = active_session(), self._complete()
        fit, manifest = CheckedFit.of_shards(estimator, spark, uri)
        run = self._run_folder(fit.data.root)
        choose_daemon(spark, fit.config.use_gpu)
        with run.guarded():
            return estimator._train_on(spark, run, fit, manifest)

    def fitOnParquet(self, uri: str) -> M:
        """Trains on the Parquet files in a folder, as `spark.read.parquet(uri)` reads them, without a copy.

        This is `fit` with data="inPlace", so the files must not change during the training. Only an estimator
        without a model copies the rows. Raises errors like `fitOnShards`.
        """
        return cast(M, FUNCTIONS["fit_on_parquet"](self, uri))

    def fitOnDelta(self, uri: str, version: int | str | None = None) -> M:
        """Trains on one version of a Delta table, by default the newest, without a copy of its files.

        A text is a time, such as "2026-11-27 12:00:00", and means the newest version at that time. A resume
        reads the first start's version. This is `fit` with data="inPlace".
        """
        return cast(M, FUNCTIONS["fit_on_delta"](self, uri, version))

    def fitOnTable(self, name: str, version: int | str | None = None) -> M:
        """Trains on a table of a catalog, such as "catalog.schema.table", without a copy of its files.

        The table is in a catalog of Spark, and its format is Parquet or Delta, or it is an Iceberg table in a
        catalog of pyiceberg's configuration. `version` is as for `fitOnDelta`; for an Iceberg table, it is
        the ID of a snapshot or a time.
        """
        return cast(M, FUNCTIONS["fit_on_table"](self, name, version))

    def write(self) -> StageWriter:
        """Returns a writer; its `overwrite()` replaces an existing stage."""
        return StageWriter(self)

    @classmethod
    def read(cls: type[E]) -> MLReader[E]:
        return StageReader(cls)

    def _fit(self, dataset: DataFrame) -> M:
        prepared, fit = prepare_checked(self, dataset)
        choose_daemon(dataset.sparkSession, fit.config.use_gpu)
        return self._train(prepared, fit, SharedShards({fit.data: prepared.dataset}, [fit.data]))

    def _train(self, prepared: PreparedFit, fit: CheckedFit, shards: SharedShards) -> M:
        spark, run = prepared.dataset.sparkSession, self._run_folder(fit.data.root)
        with ExitStack() as stack:
            if run.is_given:
                stack.enter_context(run.guarded())
                prepared.keep_plan(run.uri)
                if self._source is not None:
                    FUNCTIONS["keep_source"](run.uri, self._source)
                manifest = run_shards(prepared.dataset, fit.data, run)
            else:
                # The shards stay until the run has ended.
                manifest = stack.enter_context(shards.shards(fit.data))
                stack.enter_context(run.guarded())
            model = prepared.estimator._train_on(spark, run, fit, manifest, prepared)
            return cast(M, model._describe_columns(prepared.uses))

    def _run_uri(self, spark: SparkSession) -> str | None:
        given = self.getRunUri()
        run_uri = None if given is None else storage.normalize(resolve(spark, given))
        check_run_uri(run_uri, self.getResume())
        return run_uri

    def _storage_root(self, spark: SparkSession) -> str:
        return storage_root(spark, self.getStorageUri())

    def _run_folder(self, root: str) -> RunFolder:
        return RunFolder.new(root) if self.getRunUri() is None else RunFolder.given(root, self.getResume())

    def _train_on(
        self,
        spark: SparkSession,
        run: RunFolder,
        fit: CheckedFit,
        manifest: ShardManifest,
        prepared: PreparedFit | None = None,
    ) -> M:
        """Trains on shards. Given `prepared`, the fit that wrote them, techniques also complete the model."""
        training = fit.with_rows(self, spark, run, manifest)
        config = training.config
        changes = run.begin(config, identity_of(config, fit.objects, manifest))
        finished, last = run.result(), config
        start = RunStart(
            name=self.uid,
            run_uri=run.uri,
            settings=plain_values(self),
            data={
                "rows": manifest.select("train").num_rows,
                "validation_rows": manifest.select("validation").num_rows,
                "shards_uri": manifest.uri,
            },
            resumed=run.has_history(),
            surroundings=surroundings_of(self.getTracking()) or self._surroundings,
            changes=[str(change) for change in changes],
        )
        # Trackers have already followed a finished training.
        with RunWatcher(start, fit.trackers if finished is None else []) as watcher:
            if finished is None:
                states = ShardStates(manifest, run.uri)
                states.record()
                weights = fit.packed.write_weights(run.uri)
                supervisor = Supervisor(
                    spark=spark,
                    config=config,
                    make_work=lambda c: TrainTask(config=c, objects=fit.packed.pickled, weights=weights),
                    token=run.token,
                    check_data=states.check,
                )
                finished = FinishedRun(
                    result=TrainResult.from_json(supervisor.run()[0]),
                    restarts=tuple(supervisor.restarts),
                    preemptions=tuple(supervisor.preemptions),
                    seconds_lost=supervisor.seconds_lost,
                    parallelism=config.parallelism.to_values(),
                    changes=run.changes(),
                ).to_json()
                run.finish(finished, config)
            else:
                last = run.last_config() or config
            model = self._trained_model(spark, run, fit, training, finished)
            if prepared is not None:
                # Before trackers log the model.
                prepared.complete_model(model)
            # Also cleans a finished run whose earlier driver died before this line.
            run.clean(keeps_checkpoints=last.keeps_state, keeps_all=last.certify)
            watcher.end(RunEnd(status="finished", model=model))
        return model

    def _trained_model(
        self, spark: SparkSession, run: RunFolder, fit: CheckedFit, training: CheckedTraining, finished: str
    ) -> M:
        config = training.config
        summary, result = TrainingSummary.of_run(finished, to_spark_uri(spark, run.uri))
        if config.keep == "best" and all(math.isnan(r.value(config.monitor)) for r in result.history):
            warnings.warn(
                f"keep='best' found no best: {config.monitor} was not a number in any epoch; "
                "the model is from the last epoch",
                UserWarning,
                stacklevel=5,
            )
        if result.lost_state:
            warnings.warn(
                f"training changed the buffers {list(result.lost_state)}, which are registered with "
                "persistent=False: no checkpoint holds them, and the model has their first values",
                UserWarning,
                stacklevel=5,
            )
        model = self._model_class()._set_trained(
            result.checkpoint_uri,
            training.shapes,
            summary,
            columns=training.manifest.columns,
            input_columns=fit.config.input_columns,
            label_columns=config.label_columns,
            ignored_label=training.heads[0].ignored,
        )
        # The model also gets the parent's uid, like every Spark ML model.
        model._resetUid(self.uid)
        self._copyValues(model)
        # Later changes of the user's module must not affect this model.
        own = fit.objects.module
        model._set(model=ModelSpec.from_json(config.model or "") if own is None else copy_to_meta(own))
        model._compare_on_shards(spark, training)
        return cast(M, model)

    def _complete(self: E) -> E:
        """Returns a copy with the settings that the stage decides itself. Each fit calls it first."""
        completed = self
        for technique in techniques_in(self):
            completed = technique.complete_estimator(completed)
        return completed

    def _label_columns(self) -> list[str]:
        """Returns one column per output; an estimator without `labelCol` returns input columns."""
        return [self.getOrDefault("labelCol")]

    def _label_param(self) -> str:
        return "labelCol"

    def _output_columns(self, num_outputs: int) -> list[str]:
        return self.predictionColumns(num_outputs)

    def _label_outputs(self) -> list[str]:
        """Returns the columns that the model adds for labels of strings."""
        return []

    def _check_outputs(self, shapes: Sequence[tuple[int, ...]], exact: bool) -> None:
        """Refuses, before the training, output shapes that `transform` would refuse."""
        check_distinct(self._output_columns(len(shapes)), exact)

    def _warn(self, on_shards: bool = False) -> None:
        for sentence in settings_without_effect(self, on_shards):
            warnings.warn(sentence, UserWarning, stacklevel=4)


class TorchEstimator(EstimatorKeywords, _TorchEstimator[TorchModel], MultiLabelParams):
    """Trains any network with any loss; the model's predictions are the network's outputs.

    The network returns one tensor, or a tuple with one tensor for each of `labelCols`.
    """

    def _label_columns(self) -> list[str]:
        columns = self.getLabelCols()
        if columns is not None and self.isSet(self.labelCol):
            raise ValueError(f"set labelCol or labelCols, not both; got {self.getLabelCol()!r} and {columns}")
        return columns or [self.getLabelCol()]

    def _label_param(self) -> str:
        return "labelCol" if self.getLabelCols() is None else "labelCols"


class TorchClassifier(
    ClassifierKeywords, _TorchEstimator[TorchClassificationModel], LabelParams, OffsetParams, ClassifierParams
):
    """Trains a network to predict classes 0..n-1.

    The network returns (batch, n) logits, or (batch, 1) or (batch,) for two classes.
    """

    _task: Task = "classification"
    _model_class = TorchClassificationModel

    def _output_columns(self, num_outputs: int) -> list[str]:
        names = [self.getRawPredictionCol(), self.getProbabilityCol(), *super()._output_columns(num_outputs)]
        return [name for name in names if name]

    def _label_outputs(self) -> list[str]:
        return [name for name in [self.getPredictedLabelCol()] if name]

    def _check_outputs(self, shapes: Sequence[tuple[int, ...]], exact: bool) -> None:
        super()._check_outputs(shapes, exact)
        thresholds = self.getThresholds()
        if thresholds is not None:
            (shape,) = shapes
            check_thresholds(thresholds, max(2, shape[-1] if shape else 1))


class TorchRegressor(
    RegressorKeywords, _TorchEstimator[TorchRegressionModel], LabelParams, OffsetParams, RegressorParams
):
    """Trains a network to predict numbers: (batch,) or (batch, 1), or (batch, k) for array labels."""

    _task: Task = "regression"
    _model_class = TorchRegressionModel
