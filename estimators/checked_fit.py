"""One fit of a DataFrame, checked as far as its schema and the settings tell: no row has been looked at."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StringType, StructType

from ringspark.estimators.columns.schema import (
    check_types,
    field_named,
    input_names,
    kinds_by_column,
)
from ringspark.estimators.launch.python_daemon import PRELOADED
from ringspark.estimators.launch.slots import check_slots
from ringspark.estimators.launch.train_task import PackedObjects
from ringspark.estimators.stages.declared import value_of
from ringspark.estimators.stages.fit_data import FitData
from ringspark.estimators.stages.model_params import check_distinct, check_free
from ringspark.estimators.stages.to_config import config_of
from ringspark.estimators.training.check.schema import check_schema
from ringspark.estimators.training.settings.columns import VALIDATION_INDICATOR_COL
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.pipelines.columns import Column, check_frame, check_masks, is_case_sensitive
from ringspark.pipelines.kinds import Kind, Vocabulary


@dataclass(frozen=True, kw_only=True)
class CheckedFit:
    """What one fit writes and trains."""

    config: TrainConfig
    objects: UserObjects
    packed: PackedObjects
    data: FitData

    @classmethod
    def of(cls, estimator: Any, dataset: DataFrame) -> CheckedFit:
        """Checks an estimator with a DataFrame. Runs on the driver and starts no job.

        Raises:
            ValueError: The settings or the columns cannot be used; the message says why.
        """
        check_frame(dataset, f"{type(estimator).__name__}.fit")
        run_uri = estimator._run_uri(dataset.sparkSession)
        config, objects = config_of(estimator, estimator._task, estimator._label_columns())
        schema, exact = dataset.schema, is_case_sensitive(dataset.sparkSession)
        config, columns, kinds = _found(estimator, config, schema, exact)
        indicator, fraction = _indicator(estimator, columns, schema, exact), estimator.getValidationFraction()
        _check_free_names(estimator, config, kinds, schema, exact)
        estimator._trackers()  # refuses what cannot work
        estimator._warn()
        packed = PackedObjects.of(objects)
        is_split = indicator is not None or fraction is not None
        check_schema(config, objects, columns, ("validation", "train") if is_split else ("train",))
        slots = check_slots(dataset.sparkSession, config.num_workers, config.use_gpu, config.collective)
        data = FitData(
            columns=tuple(column.name for column in columns),
            validation_col=indicator,
            validation_fraction=fraction,
            seed=config.seed if fraction is not None else 0,
            drops_invalid=estimator.getHandleInvalid() != "error",
            kinds=json.dumps({name: kind.to_json() for name, kind in sorted(kinds.items())}),
            root=run_uri or estimator._storage_root(dataset.sparkSession),
            # Only where the gang takes every slot: other processes would hold torch for nothing.
            imports=PRELOADED if slots == config.num_workers else (),
        )
        return cls(config=config, objects=objects, packed=packed, data=data)


def check_evaluated(estimator: Any, dataset: DataFrame) -> None:
    """Checks that a DataFrame has the columns to evaluate an estimator's model. Starts no job.

    Raises:
        ValueError: An input or a label is missing, or has a type that the model cannot take.
    """
    config, _ = config_of(estimator, estimator._task, estimator._label_columns())
    # An evaluation weighs every row 1, so it needs no weight column.
    config = replace(config, weight_column=None)
    _found(estimator, config, dataset.schema, is_case_sensitive(dataset.sparkSession))


def _found(
    estimator: Any, config: TrainConfig, schema: StructType, exact: bool
) -> tuple[TrainConfig, tuple[Column, ...], dict[str, Kind]]:
    """Returns config, columns to read and their chosen kinds, with the names as the DataFrame has them."""
    kinds = kinds_by_column(estimator.getColumns(), schema, exact)
    sources, inputs = input_names(config.input_columns, kinds, schema, exact)
    check_types(schema, sources, kinds)
    param, weight = estimator._label_param(), config.weight_column
    labels = tuple(field_named(name, param, schema, exact).name for name in config.label_columns)
    weight = weight and field_named(weight, "weightCol", schema, exact).name
    config = replace(config, input_columns=inputs, label_columns=labels, weight_column=weight)
    names = list(dict.fromkeys([*sources, *labels, *filter(None, [weight])]))
    check_masks(names)
    if useless := kinds.keys() - {*sources, *labels}:
        raise ValueError(f"columns names {min(useless)!r}, which is neither an input nor a label; drop it")
    if config.task == "classification":
        # Classes learn their names, so that they can be told apart; all other strings need a choice.
        strings = [name for name in labels if isinstance(schema[name].dataType, StringType)]
        kinds = {name: Vocabulary(order="alphabet") for name in strings} | kinds
    return config, check_types(schema, names, kinds), kinds


def _indicator(estimator: Any, columns: Sequence[Column], schema: StructType, exact: bool) -> str | None:
    """Returns the column that tells the held-out rows apart, as the DataFrame has it."""
    given = value_of(estimator, VALIDATION_INDICATOR_COL)
    if given is None:
        return None
    name = field_named(given, "validationIndicatorCol", schema, exact).name
    if any(column.name == name for column in columns):
        raise ValueError(
            f"validationIndicatorCol {name!r} must be a column of its own, not an input, label "
            "or weight; copy it under another name"
        )
    return name


def _check_free_names(
    estimator: Any, config: TrainConfig, kinds: Mapping[str, Kind], schema: StructType, exact: bool
) -> None:
    """Refuses names of the model's output columns that are taken."""
    outputs = estimator._output_columns(len(config.label_columns))
    if any(isinstance(kinds.get(label), Vocabulary) for label in config.label_columns):
        outputs += estimator._label_outputs()
    check_distinct(outputs, exact)
    # As in Spark's own fit, a column whose name differs in case is for transform to refuse.
    check_free(schema, outputs, exact=True)
