"""Checks a fit on the driver: settings and schema first, then the training against the written shards."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType

from ringspark.estimators.columns.schema import (
    FieldIndex,
    check_types,
    find_field,
    input_names,
    kinds_by_column,
)
from ringspark.estimators.launch.python_daemon import PRELOADED
from ringspark.estimators.launch.slots import check_slots
from ringspark.estimators.launch.train_task import PackedObjects
from ringspark.estimators.memory.available import Available
from ringspark.estimators.memory.pressure import check_memory, limits_on_driver
from ringspark.estimators.options.mesh import AUTO
from ringspark.estimators.prepared_fit import Plans, PreparedFit, add_columns, prepare_fit, wants_table
from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.stages.declared import value_of
from ringspark.estimators.stages.fit_data import FitData
from ringspark.estimators.stages.model_params import check_free
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
from ringspark.pipelines.spark_paths import is_local, is_remote, resolve
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
        exact = is_case_sensitive(spark)
        fields = FieldIndex(dataset.schema, exact)
        config, columns, kinds = _find_columns(estimator, config, fields)
        indicator, fraction = value_of(estimator, "validationIndicatorCol"), estimator.getValidationFraction()
        if indicator is not None:
            indicator = _find_indicator(indicator, columns, fields)
        techniques = techniques_in(estimator)
        for technique in techniques:
            technique.check_columns(objects, kinds)
        outputs = estimator._output_columns(len(config.label_columns))
        if any(isinstance(kinds.get(label), Vocabulary) for label in config.label_columns):
            outputs += estimator._label_outputs()
        for technique in techniques:
            outputs += technique.output_columns(estimator)
        check_free(dataset.schema, outputs, exact)
        trackers = make_trackers(estimator.getTracking(), estimator.getShowProgress())
        estimator._check_precision()
        if warns:
            estimator._warn()
        packed = PackedObjects.of(objects)
        is_split = indicator is not None or fraction is not None
        heads = check_schema(config, objects, columns, ("validation", "train") if is_split else ("train",))
        slots = _find_slots(spark, config)
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
        _find_slots(spark, config)
        manifest = ShardManifest.load(resolve(spark, uri))
        manifest.verify_files()
        if not estimator.hasParam("labelCol"):
            config = _with_label_arrays(config, manifest.columns)
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
        techniques, config = techniques_in(estimator), self.config
        for technique in techniques:
            technique.check_rows(estimator, config, manifest)
        if config.pretrained is not None:
            uri = storage.normalize(resolve(spark, config.pretrained.uri))
            config = config.with_values(pretrained=replace(config.pretrained, uri=uri))
        config = config.with_values(run_uri=run.uri, shards_uri=manifest.uri)
        conf = spark_conf(spark)
        is_here = is_local(conf) and not is_remote(spark)
        limits = limits_on_driver(config.num_workers, conf, is_here=is_here)
        # A network that the host cannot hold would kill the driver, so the memory is checked first. For
        # "auto", only the planner, which runs the network, knows how much of it a worker holds.
        limited = None if estimator.getParallelism() == AUTO else partial(check_memory, limits=limits)
        training = check_training(config, objects, manifest, self.heads, limited)
        estimator._check_outputs(training.shapes, is_case_sensitive(spark))
        driver = Driver(estimator=estimator, run=run, limits=limits, is_here=is_here)
        for technique in techniques:
            training = technique.settle(training, driver)
        return training


@dataclass(frozen=True, kw_only=True)
class Driver:
    """Arguments of `Technique.settle`.

    Attributes:
        limits: The limits of a worker's memory that the driver knows.
        is_here: Whether all workers are on the driver's host.
    """

    estimator: Any
    run: RunFolder
    limits: list[Available | None]
    is_here: bool


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
        estimator._find_offset(FieldIndex(dataset.schema, is_case_sensitive(dataset.sparkSession)))
        for name, param in (
            *((each, "labelCol") for each in labels),
            *((each, "inputCols") for each in inputs),
        ):
            find_field(name, param, dataset.schema, is_case_sensitive(dataset.sparkSession))
        return
    config, _ = config_of(estimator, estimator._task, estimator._label_columns())
    # An evaluation gives every row the weight 1, so it needs no weight column.
    config = config.with_values(weight_column=None)
    _find_columns(estimator, config, FieldIndex(dataset.schema, is_case_sensitive(dataset.sparkSession)))


def _find_columns(
    estimator: Any, config: TrainConfig, fields: FieldIndex
) -> tuple[TrainConfig, tuple[Column, ...], dict[str, Kind]]:
    kinds = kinds_by_column(estimator.getColumns(), fields)
    for technique in techniques_in(estimator):
        kinds = technique.choose_kinds(estimator, kinds, fields)
    sources, inputs = input_names(config.input_columns, kinds, fields)
    check_types(fields.schema, sources, kinds)
    param, weight = estimator._label_param(), config.weight_column
    labels = tuple(fields.find(name, param).name for name in config.label_columns)
    weight = weight and fields.find(weight, "weightCol").name
    config = config.with_values(input_columns=inputs, label_columns=labels, weight_column=weight)
    names = list(dict.fromkeys([*sources, *labels, *filter(None, [weight, config.soft_label_column])]))
    check_masks(names)
    if useless := kinds.keys() - {*sources, *labels}:
        raise ValueError(
            f"the setting columns names {min(useless)!r}, which is neither an input nor a label; drop it"
        )
    if config.task == "classification":
        # The classes of string labels are their distinct strings; other string columns need a choice.
        strings = [name for name in labels if isinstance(fields.schema[name].dataType, StringType)]
        kinds = {name: Vocabulary(order="alphabet") for name in strings} | kinds
    columns = check_types(fields.schema, names, kinds)
    if not estimator.hasParam("labelCol"):
        config = _with_label_arrays(config, columns)
    return config, columns, kinds


def _find_slots(spark: SparkSession, config: TrainConfig) -> int | None:
    patience = config.timeout_seconds
    if config.max_workers is not None:
        config.with_workers(config.max_workers)  # refuses a size that the other settings exclude
    return check_slots(spark, config.num_workers, config.use_gpu, config.collective, config.launch, patience)


def _with_label_arrays(config: TrainConfig, columns: Sequence[Column]) -> TrainConfig:
    """Replaces labels that are inputs by the first array of each input."""
    labels = [arrays[0] for arrays in list_arguments(columns, config.label_columns)]
    return config.with_values(label_columns=tuple(labels))


def _find_indicator(given: str, columns: Sequence[Column], fields: FieldIndex) -> str:
    field = fields.find(given, "validationIndicatorCol")
    check_indicator_type(field)
    name = field.name
    if any(column.name == name for column in columns):
        raise ValueError(
            f"validationIndicatorCol {name!r} must not also be an input, label or "
            "weight; copy it under another name"
        )
    return name
