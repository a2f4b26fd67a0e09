"""The columns that a model of a regressor adds for `quantiles` and `intervals`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyspark.ml.linalg import VectorUDT
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DoubleType, StructField, StructType

from ringspark.estimators.inference.results import Values
from ringspark.estimators.stages.declared import value_of
from ringspark.estimators.stages.model_params import check_free
from ringspark.estimators.training.feed import Array
from ringspark.extras.quantiles.conformal import group_column
from ringspark.models.quantiles import quantile_columns
from ringspark.pipelines.columns import is_case_sensitive, quote

_SIDES = ("lower", "upper")
_TYPE = StructType([StructField(side, DoubleType()) for side in _SIDES])


@dataclass(frozen=True, kw_only=True)
class QuantileResults(Values):
    """The columns of `quantile_columns`."""

    quantiles: tuple[float, ...]
    coverage: float | None
    correction: float

    @property
    def types(self) -> list[DataType]:
        ends = [DoubleType()] * 2 if self.coverage is not None else []
        return [DoubleType(), *([VectorUDT()] if self.quantiles else []), *ends]

    @property
    def widths(self) -> list[int]:
        return [len(self.quantiles) if isinstance(each, VectorUDT) else 1 for each in self.types]

    def arrays(self, outputs: Array) -> list[Array]:
        return quantile_columns(outputs, self.quantiles, self.coverage, self.correction)


def quantile_outputs(model: Any) -> tuple[list[str], QuantileResults]:
    """Returns names and contents of the columns; the ends of intervals are columns of their own.

    With `intervalGroupCol`, the ends are not corrected yet; `add_intervals` corrects them by group.
    """
    coverage, quantiles = model.getIntervals(), model._quantiles
    names = model.predictionColumns(1) + ([model.getQuantilesCol()] if quantiles else [])
    correction = 0.0
    if coverage is not None:
        names += _end_names(model)
        if not value_of(model, "intervalGroupCol"):
            correction = corrections_of(model)["all"]
    results = QuantileResults(
        shapes=model._output_shapes, quantiles=quantiles, coverage=coverage, correction=correction
    )
    return names, results


def corrections_of(model: Any) -> dict[str, Any]:
    """Returns `intervalCorrections`, or corrections of 0 before `fit` has measured them."""
    return model.getIntervalCorrections() or {"all": 0.0, "groups": {}}


def check_apart(model: Any, format: str = "mlflow") -> None:
    """Raises ValueError if a model cannot predict its intervals without Spark, or in a format of `export`."""
    if not model.hasParam("intervals") or model.getIntervals() is None or not model.getIntervalCol():
        return
    if format != "mlflow":
        raise ValueError(
            f"format {format!r} has only the network, not the correction of its intervals; take "
            "format='mlflow', or leave the intervals out by setIntervalCol('')"
        )
    if value_of(model, "intervalGroupCol"):
        raise ValueError(
            "only transform predicts intervals with intervalGroupCol; clear it by setIntervalGroupCol(None) "
            "to give all rows the common correction"
        )


def _end_names(model: Any) -> list[str]:
    name = model.getIntervalCol()
    return [name and f"{name}.{side}" for side in _SIDES]


def interval_fields(model: Any, schema: StructType) -> StructType:
    """Returns the schema with `intervalCol` in place of the ends."""
    name, ends = model.getIntervalCol(), _end_names(model)
    if not name:
        return schema
    fields = StructType([field for field in schema.fields if field.name not in ends])
    check_free(fields, [name], exact=True)
    return fields.add(StructField(name, _TYPE))


def add_intervals(model: Any, dataset: DataFrame, transform: Callable[[DataFrame], DataFrame]) -> DataFrame:
    """Returns the transformed rows with `intervalCol`, a struct of the ends, in place of the ends."""
    name = model.getIntervalCol()
    if not name:
        return transform(dataset)
    check_free(
        dataset.schema, [name, *filter(None, model._outputs()[0])], is_case_sensitive(dataset.sparkSession)
    )
    group, rows = group_column(model, dataset), transform(dataset)
    lower, upper = ends = [F.col(quote(each)) for each in _end_names(model)]
    if value_of(model, "intervalGroupCol"):
        corrections = corrections_of(model)
        # Text, which Spark parses once, because an expression with thousands of literals compiles slowly.
        known = F.from_json(F.lit(json.dumps(corrections["groups"])), "map<string,double>")
        correction = F.coalesce(known[group], F.lit(corrections["all"]))
        middle, lower, upper = (lower + upper) / 2, lower - correction, upper + correction
        lower, upper = F.least(lower, middle), F.greatest(upper, middle)
    made = F.struct(*(value.alias(side) for value, side in zip((lower, upper), _SIDES, strict=True)))
    return rows.withColumn(name, F.when(lower.isNotNull(), made)).drop(*ends)
