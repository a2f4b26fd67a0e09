"""Trains on a table as it is: every column becomes an input, and a network for tables is built for it.

`fit` without a model and without input columns comes here. The columns of the table travel as one struct of
column type `TableRow`, which `transform` makes in the same way, so a model needs nothing but the table.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from ringspark.estimators.columns.inputs import table_struct
from ringspark.estimators.columns.schema import find_field
from ringspark.estimators.held_out_rows import HELD_OUT_COLUMN, hold_out, hold_out_newest
from ringspark.estimators.stages.declared import value_of
from ringspark.estimators.training.settings.data import VALIDATION_INDICATOR_COL, WEIGHT_COL
from ringspark.models import ModelSpec
from ringspark.models.tabm import RARE_FROM
from ringspark.pipelines.columns import check_frame, is_case_sensitive, quote
from ringspark.pipelines.table_plan import ColumnUse, TablePlan, plan_table

TABLE_COLUMN = "__ringspark_table"
"""Name of the struct with the table's columns."""

_MAX_CLASSES = 1_000
_ROWS_PER_STEP = 256
_STEPS = 6_000
_MIN_EPOCHS, _MAX_EPOCHS = 10, 200

Plans = dict[tuple[Any, ...], tuple[TablePlan, int, dict[str, Any]]]
"""Inputs, label and held-out rows -> the plan, the number of rows, the network's arguments of the label."""


@dataclass(frozen=True)
class PreparedFit:
    """A fit with a network and a choice of the rows to hold out.

    Attributes:
        estimator: The estimator, or a copy that has the network, the input and the recipe.
        dataset: The DataFrame, with the columns that the copy names.
        uses: What became of each column of the table; empty if the user gave a network.
    """

    estimator: Any
    dataset: DataFrame
    uses: tuple[ColumnUse, ...] = ()


def prepare_fit(estimator: Any, dataset: DataFrame, plans: Plans) -> PreparedFit:
    """Makes the network of an estimator without a model, and holds out the newest rows for `timeCol`.

    `plans` holds the plans of fits on the same DataFrame. Raises ValueError like `fit`.
    """
    check_frame(dataset, f"{type(estimator).__name__}.fit")
    if not estimator.isDefined(estimator.model):
        return _prepare_table(estimator, dataset, estimator._task, plans)
    time, share = estimator.getTimeCol(), estimator.getValidationFraction()
    if not time or share is None:
        return PreparedFit(estimator, dataset)
    copy = estimator.copy()
    copy.clear(copy.validationFraction)
    copy._set(validationIndicatorCol=HELD_OUT_COLUMN)
    return PreparedFit(copy, hold_out_newest(dataset, time, share))


def _prepare_table(estimator: Any, dataset: DataFrame, task: str, plans: Plans) -> PreparedFit:
    """Looks at the table, and returns the fit on it. Runs a few Spark jobs.

    Raises:
        ValueError: The labels or the columns cannot be used; the message says why.
    """
    if task == "any":
        raise ValueError(
            f"{type(estimator).__name__} needs a model; pass model=ModelSpec('mlp', {{...}}) or an nn.Module"
            ", or use TorchClassifier or TorchRegressor, which make one for a table"
        )
    schema, exact = dataset.schema, is_case_sensitive(dataset.sparkSession)
    label = find_field(estimator.getLabelCol(), "labelCol", schema, exact)
    indicator, weight = value_of(estimator, VALIDATION_INDICATOR_COL), value_of(estimator, WEIGHT_COL)
    others = {
        find_field(name, param, schema, exact).name
        for param, name in (("validationIndicatorCol", indicator), ("weightCol", weight))
        if name
    }
    names = [name for name in _input_names(estimator, schema, exact) if name not in {label.name, *others}]
    if not names:
        raise ValueError(f"the DataFrame has no column besides the label {label.name!r}; give it some inputs")
    split = hold_out(estimator, dataset, [label.name, *names])
    key = (*names, label.name, split.indicator, split.key)
    if key not in plans:
        rows = split.dataset.where(~F.coalesce(F.col(quote(split.indicator)).cast("boolean"), F.lit(False)))
        plans[key] = plan_table(rows, names), *_outputs(rows, label, task)
    plan, count, outputs = plans[key]
    left_out = [use.column for use in plan.uses if use.use == "left out"]
    if left_out:
        warnings.warn(
            f"left out of the table: {', '.join(left_out[:20])}; model.summary.columns says why",
            UserWarning,
            stacklevel=4,
        )
    arguments = {"edges": plan.edges, "cardinalities": plan.kind.cardinalities, **outputs}
    given: dict[str, Any] = {
        "model": ModelSpec("tabm", arguments),
        "inputCols": [TABLE_COLUMN],
        "columns": {TABLE_COLUMN: plan.kind},
        "validationIndicatorCol": split.indicator,
    }
    recipe = _recipe(count, plan.kind.cardinalities, task)
    given |= {name: value for name, value in recipe.items() if not estimator.isSet(estimator.getParam(name))}
    inner = estimator.copy()
    inner._resetUid(estimator.uid)
    for name in ("featuresCol", "validationFraction", "timeCol"):
        inner.clear(inner.getParam(name))
    inner._set(**given)
    frame = split.dataset.withColumn(TABLE_COLUMN, table_struct(plan.kind.sources))
    return PreparedFit(inner, frame, tuple(plan.uses))


def _input_names(estimator: Any, schema: StructType, exact: bool) -> list[str]:
    if estimator.isSet(estimator.inputCols):
        return [find_field(name, "inputCols", schema, exact).name for name in estimator.getInputCols()]
    if estimator.isSet(estimator.featuresCol):
        return [find_field(estimator.getFeaturesCol(), "featuresCol", schema, exact).name]
    return list(schema.names)


def _outputs(rows: DataFrame, label: StructField, task: str) -> tuple[int, dict[str, Any]]:
    """Returns the number of rows, and the network's arguments that depend on the label."""
    value = F.col(quote(label.name))
    if task == "regression":
        number = value.cast("double")
        found = rows.agg(F.count(number), F.avg(number), F.stddev_pop(number)).head()
        assert found is not None
        count, mean, deviation = found
        return count, {"out_features": 1, "center": mean or 0.0, "scale": deviation or 1.0}
    if isinstance(label.dataType, StringType):
        found = rows.agg(F.count(value), F.count_distinct(value)).head()
        assert found is not None
        count, classes = found
    else:
        found = rows.agg(F.count(value), F.max(value.cast("double"))).head()
        assert found is not None
        count, classes = found[0], int(found[1] or 0) + 1
    if not 1 < classes <= _MAX_CLASSES:
        raise ValueError(
            f"label {label.name!r} has {classes} classes; a classification takes 2 to {_MAX_CLASSES}"
            + ("; for a number that is no class use TorchRegressor" if classes > _MAX_CLASSES else "")
        )
    return count, {"out_features": classes, "averages": "probabilities"}


def _recipe(rows: int, cardinalities: Sequence[int], task: str) -> dict[str, Any]:
    """Returns the settings of the training for a table of `rows` rows."""
    batch = _ROWS_PER_STEP
    while batch > 32 and rows < 20 * batch:
        batch //= 2
    steps = max(1, rows // batch)
    undecayed = ["*bias*", "*.inputs", "*.outputs", *(["embeddings.*"] if cardinalities else [])]
    if any(n > RARE_FROM for n in cardinalities):
        undecayed.append("effects.*")
    epochs = max(_MIN_EPOCHS, min(_MAX_EPOCHS, _STEPS // steps))
    is_regression = task == "regression"
    return {
        "loss": "mse_per_member" if is_regression else "cross_entropy_per_member",
        "metrics": [] if is_regression else ["temperature"],
        "optimizer": "adamw",
        "learningRate": 2e-3,
        "weightDecay": 1e-2,
        "maxGradNorm": 1.0,
        "lrSchedule": "cosine",
        "warmupSteps": steps * epochs // 30,
        "batchSize": batch,
        "epochs": epochs,
        "patience": max(8, epochs // 3),
        "keep": "best",
        "emaDecay": 0.995,
        "parameterGroups": [{"params": undecayed, "weightDecay": 0.0}],
    }
