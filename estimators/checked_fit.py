"""Checks a fit on the driver: settings and schema first, then the training against the written shards."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType, StructType

from ringspark.estimators.columns.schema import check_types, find_field, input_names, kinds_by_column
from ringspark.estimators.initial_model import check_rows, initial_kinds, start_of
from ringspark.estimators.launch.python_daemon import PRELOADED
from ringspark.estimators.launch.slots import check_slots
from ringspark.estimators.launch.train_task import PackedObjects
from ringspark.estimators.memory.available import Available
from ringspark.estimators.memory.pressure import check_on_driver, is_on_driver, limits_on_driver
from ringspark.estimators.options.mesh import AUTO
from ringspark.estimators.prepared_fit import Plans, PreparedFit, add_columns, prepare_fit, wants_table
from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.stages.declared import value_of
from ringspark.estimators.stages.fit_data import FitData
from ringspark.estimators.stages.model_params import check_distinct, check_free
from ringspark.estimators.stages.session import spark_conf
from ringspark.estimators.stages.to_config import config_of
from ringspark.estimators.techniques import techniques_in
from ringspark.estimators.tracking.base import Tracker
from ringspark.estimators.tracking.registry import make_trackers
from ringspark.estimators.training.arguments import list_arguments
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.check.schema import check_schema
from ringspark.estimators.training.check.training import CheckedTraining
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.columns import Column, check_batch, check_masks, is_case_sensitive
from ringspark.pipelines.kinds import Kind, Vocabulary
from ringspark.pipelines.spark_paths import is_remote, resolve
from ringspark.pipelines.writing.split import check_indicator_type


@dataclass(frozen=True, kw_only=True)
class CheckedFit:
    """A fit whose settings and schema were checked; no row has been read.

    `heads` is None in a fit on shards that exist already; `with_rows` then checks the columns of the shards.
    """

    config: TrainConfig
    objects: UserObjects
    packed: PackedObjects
    trackers: Sequence[Tracker]
    heads: tuple[Head, ...] | None
    data: FitData

    @classmethod
    def of(cls, estimator: Any, dataset: DataFrame, *, warns: bool = True) -> CheckedFit:
        check_batch(dataset, f"{type(estimator).__name__}.fit")
        spark = dataset.sparkSession
        run_uri = estimator._run_uri(spark)
        config, objects = config_of(estimator, estimator._task, estimator._label_columns())
        schema, exact = dataset.schema, is_case_sensitive(spark)
        config, columns, kinds = _find_columns(estimator, config, schema, exact)
        indicator, fraction = _indicator(estimator, columns, schema, exact), estimator.getValidationFraction()
        techniques = techniques_in(estimator)
        for technique in techniques:
            technique.check_columns(objects, kinds)
        outputs = estimator._output_columns(len(config.label_columns))
        if any(isinstance(kinds.get(label), Vocabulary) for label in config.label_columns):
            outputs += estimator._label_outputs()
        for technique in techniques:
            outputs += technique.output_columns(estimator)
        check_distinct(outputs, exact)
        check_free(schema, outputs, exact)
        trackers = make_trackers(estimator.getTracking(), estimator.getShowProgress())
        estimator._check_precision()
        if warns:
            estimator._warn()
        packed = PackedObjects.of(objects)
        is_split = indicator is not None or fraction is not None
        heads = check_schema(config, objects, columns, ("validation", "train") if is_split else ("train",))
        slots = check_slots(spark, config.num_workers, config.use_gpu, config.collective)
        data = FitData(
            columns=tuple(column.name for column in columns),
            validation_col=indicator,
            validation_fraction=fraction,
            seed=config.seed if fraction is not None else 0,
            drops_invalid=estimator.getHandleInvalid() != "error",
            kinds=json.dumps({name: kind.to_json() for name, kind in sorted(kinds.items())}),
            place=estimator.getData(),
            root=run_uri or estimator._storage_root(spark),
            # Only if the gang takes every slot: other processes would load torch and not use it.
            imports=PRELOADED if slots == config.num_workers else (),
        )
        return cls(config=config, objects=objects, packed=packed, trackers=trackers, heads=heads, data=data)

    @classmethod
    def of_shards(cls, estimator: Any, spark: SparkSession, uri: str) -> tuple[CheckedFit, ShardManifest]:
        run_uri = estimator._run_uri(spark)
        for technique in techniques_in(estimator):
            technique.check_estimator(estimator, is_table=False, is_on_shards=True)
        config, objects = config_of(estimator, estimator._task, estimator._label_columns())
        trackers = make_trackers(estimator.getTracking(), estimator.getShowProgress())
        estimator._check_precision()
        estimator._warn(on_shards=True)
        packed = PackedObjects.of(objects)
        check_slots(spark, config.num_workers, config.use_gpu, config.collective)
        manifest = ShardManifest.load(resolve(spark, uri))
        manifest.verify_files()
        config = _with_label_arrays(estimator, config, manifest.columns)
        data = FitData(columns=tuple(config.columns), root=run_uri or estimator._storage_root(spark))
        fit = cls(config=config, objects=objects, packed=packed, trackers=trackers, heads=None, data=data)
        return fit, manifest

    def with_rows(
        self, estimator: Any, spark: SparkSession, run: RunFolder, manifest: ShardManifest
    ) -> CheckedTraining:
        """Checks the training against the manifest of the shards. Techniques then choose open settings."""
        data, objects = self.data, self.objects
        is_split = data.validation_col is not None or data.validation_fraction is not None
        if is_split and not manifest.select("validation").num_rows:
            param = "validationFraction" if data.validation_col is None else "validationIndicatorCol"
            message = (
                f"{param} holds out none of the {manifest.num_rows} rows; hold out more, or leave it unset"
            )
            if self.config.looks_for_best:
                raise ValueError(message)
            warnings.warn(message, UserWarning, stacklevel=6)
        config = replace(self.config, run_uri=run.uri, shards_uri=manifest.uri, **start_of(estimator))
        check_rows(estimator, manifest)
        if config.pretrained is not None:
            uri = storage.normalize(resolve(spark, config.pretrained.uri))
            config = replace(config, pretrained=replace(config.pretrained, uri=uri))
        driver = Driver(estimator=estimator, run=run, spark=spark, objects=objects, manifest=manifest)
        # A network that the host cannot hold would kill the driver, so the memory is checked first. For
        # "auto", only the planner, which runs the network, knows how much of it a worker holds.
        check_memory = None if estimator.getParallelism() == AUTO else driver.check_memory
        training = check_training(config, objects, manifest, self.heads, check_memory)
        estimator._check_outputs(training.shapes, is_case_sensitive(spark))
        for technique in techniques_in(estimator):
            training = technique.settle(training, driver)
        return training


@dataclass(frozen=True, kw_only=True)
class Driver:
    """Arguments of `Technique.settle`: the estimator, the run's folder, and limits of the workers' memory."""

    estimator: Any
    run: RunFolder
    spark: SparkSession
    objects: UserObjects
    manifest: ShardManifest

    def limits(self, config: TrainConfig) -> list[Available | None]:
        return limits_on_driver(config.num_workers, spark_conf(self.spark), is_remote(self.spark))

    def check_memory(self, config: TrainConfig) -> None:
        """Raises ValueError for a training that cannot fit, as far as the driver knows."""
        check_on_driver(config, self.objects, self.manifest, spark_conf(self.spark), is_remote(self.spark))

    @property
    def is_on_workers_host(self) -> bool:
        return is_on_driver(spark_conf(self.spark), is_remote(self.spark))


def check_settings(estimator: Any, dataset: DataFrame) -> PreparedFit:
    """Refuses wrong settings and columns before the jobs that plan a table or find the newest rows.

    Returns the fit, with placeholders for the results of these jobs.
    """
    known = prepare_fit(estimator, dataset, Plans(is_dry_run=True))
    if known.dataset is not dataset:
        CheckedFit.of(known.estimator, known.dataset, warns=False)
    return known


def prepare_checked(estimator: Any, dataset: DataFrame) -> tuple[PreparedFit, CheckedFit]:
    """Prepares and checks a fit. Runs no Spark job if a setting or column is wrong."""
    known = check_settings(estimator, dataset)
    # If the settings alone decide the fit, the dry run had no placeholders.
    prepared = add_columns(known) if known.dataset is dataset else prepare_fit(estimator, dataset)
    return prepared, CheckedFit.of(prepared.estimator, prepared.dataset)


def check_evaluated(estimator: Any, dataset: DataFrame) -> None:
    """Raises ValueError if a DataFrame lacks columns to evaluate an estimator's model."""
    if wants_table(estimator):
        # Only the plan of a table says which other columns the model needs.
        inputs = estimator.inputColumns() if estimator.isSet(estimator.inputCols) else []
        labels = estimator._label_columns() if estimator.hasParam("labelCol") else []
        for name, param in (
            *((each, "labelCol") for each in labels),
            *((each, "inputCols") for each in inputs),
        ):
            find_field(name, param, dataset.schema, is_case_sensitive(dataset.sparkSession))
        return
    config, _ = config_of(estimator, estimator._task, estimator._label_columns())
    # An evaluation gives every row the weight 1, so it needs no weight column.
    config = replace(config, weight_column=None)
    _find_columns(estimator, config, dataset.schema, is_case_sensitive(dataset.sparkSession))


def _find_columns(
    estimator: Any, config: TrainConfig, schema: StructType, exact: bool
) -> tuple[TrainConfig, tuple[Column, ...], dict[str, Kind]]:
    kinds = kinds_by_column(estimator.getColumns(), schema, exact)
    kinds = initial_kinds(estimator, kinds, schema, exact)
    sources, inputs = input_names(config.input_columns, kinds, schema, exact)
    check_types(schema, sources, kinds)
    param, weight = estimator._label_param(), config.weight_column
    labels = tuple(find_field(name, param, schema, exact).name for name in config.label_columns)
    weight = weight and find_field(weight, "weightCol", schema, exact).name
    config = replace(config, input_columns=inputs, label_columns=labels, weight_column=weight)
    names = list(dict.fromkeys([*sources, *labels, *filter(None, [weight, config.soft_label_column])]))
    check_masks(names)
    if useless := kinds.keys() - {*sources, *labels}:
        raise ValueError(
            f"the setting columns names {min(useless)!r}, which is neither an input nor a label; drop it"
        )
    if config.task == "classification":
        # The classes of string labels are their distinct strings; other string columns need a choice.
        strings = [name for name in labels if isinstance(schema[name].dataType, StringType)]
        kinds = {name: Vocabulary(order="alphabet") for name in strings} | kinds
    columns = check_types(schema, names, kinds)
    return _with_label_arrays(estimator, config, columns), columns, kinds


def _with_label_arrays(estimator: Any, config: TrainConfig, columns: Sequence[Column]) -> TrainConfig:
    """Replaces labels that are inputs by the first array of each input."""
    if estimator.hasParam("labelCol"):
        return config
    labels = [arrays[0] for arrays in list_arguments(columns, config.label_columns)]
    return replace(config, label_columns=tuple(labels))


def _indicator(estimator: Any, columns: Sequence[Column], schema: StructType, exact: bool) -> str | None:
    given = value_of(estimator, "validationIndicatorCol")
    if given is None:
        return None
    field = find_field(given, "validationIndicatorCol", schema, exact)
    check_indicator_type(field)
    name = field.name
    if any(column.name == name for column in columns):
        raise ValueError(
            f"validationIndicatorCol {name!r} must not also be an input, label or "
            "weight; copy it under another name"
        )
    return name
