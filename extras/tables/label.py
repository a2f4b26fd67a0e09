"""Looks at the label of a table: its type, its range, and its classes."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, NumericType, StringType, StructField

from ringspark.estimators.training.objective.deviance import check_range, family_of, find_power
from ringspark.extras.tables.tabm import IGNORED
from ringspark.pipelines.columns import quote

_MAX_CLASSES = 1_000
# If the deviation is a smaller share of the mean, float32 rounds off more than 1 % of it.
_FEW_DIGITS = 100 * 2.0**-24
_LARGEST_LABEL = float(np.finfo(np.float32).max)
_LEAST_LABEL = float(np.finfo(np.float32).tiny)
# Largest magnitude of an offset with a log link.
_FARTHEST = 80.0


def check_label_type(label: StructField, task: str) -> None:
    types: tuple[Any, ...] = (NumericType, BooleanType)
    advice = "TorchRegressor without a model predicts one number, so give a column of numbers, or a model"
    if task == "classification":
        types = (*types, StringType)
        advice = "TorchClassifier predicts one class per row, so give a column of strings or of class numbers"
    if not isinstance(label.dataType, types):
        raise ValueError(f"label {label.name!r} holds {label.dataType.simpleString()}; {advice}")


def look_at_label(
    dataset: DataFrame, held: Column, label: StructField, task: str, loss: Any = "", offset: str | None = None
) -> tuple[Column, dict[str, Any]]:
    """Returns the label as a number of mean 0 and variance 1, and network arguments that depend on it."""
    value, rows = F.col(quote(label.name)), dataset.where(~held)
    if task == "regression":
        number, power = value.cast("double"), find_power(loss)
        known, given = F.lit(0.0), number
        if offset is not None:  # the fit refuses or skips rows without an offset or a label
            known = F.when(number.isNotNull(), F.nanvl(F.col(quote(offset)).cast("double"), F.lit(None)))
            given = F.when(known.isNotNull(), number)
        number = given if power else given - known
        found = rows.agg(
            *(F.avg(number), F.stddev_pop(number), F.max(F.abs(given)), F.min(number)),
            *(F.avg(F.exp(known)), F.max(F.abs(known)), F.avg(F.abs(known))),
        ).head()
        assert found is not None
        mean, deviation, largest, least, exposure, farthest, usual = (each or 0.0 for each in found)
        if farthest == math.inf:
            raise ValueError(f"offsetCol {offset!r} has infinite values; drop these rows")
        if power and farthest > _FARTHEST:
            raise ValueError(
                f"offsetCol {offset!r} has values up to {farthest:g}, and their exponentials are too large "
                "for float32; give the logarithm of the exposure"
            )
        if not largest < math.inf:  # NaN is the largest for Spark
            raise ValueError(
                f"label {label.name!r} has NaN or infinite values; drop these rows, for example by "
                f"df.where(\"abs({quote(label.name)}) < double('inf')\")"
            )
        if largest > _LARGEST_LABEL:
            raise ValueError(
                f"label {label.name!r} has values up to {largest:.3g}, but networks compute in float32, "
                f"which ends at {_LARGEST_LABEL:.3g}; divide the label by a constant before fit"
            )
        if 0 < largest < _LEAST_LABEL:
            raise ValueError(
                f"label {label.name!r} has values only up to {largest:.3g}, but networks compute in float32, "
                f"which begins at {_LEAST_LABEL:.3g}; multiply the label by a constant before fit"
            )
        if 0 < deviation < abs(mean) * _FEW_DIGITS:
            warnings.warn(
                f"label {label.name!r} varies by only {deviation:.3g} around {mean:.7g}, and predictions "
                "have 7 digits; subtract a constant from the label",
                UserWarning,
                stacklevel=7,
            )
        elif not power and 0 < deviation < usual * _FEW_DIGITS:
            warnings.warn(
                f"label {label.name!r} differs from offsetCol {offset!r} by only {deviation:.3g} around "
                f"{mean:.7g}, and predictions have 7 digits; train on the difference without offsetCol",
                UserWarning,
                stacklevel=7,
            )
        arguments = {"out_features": 1, "center": mean, "scale": deviation or 1.0}
        if power:
            check_range(label.name, loss, least)
            if mean == 0:
                raise ValueError(
                    f"label {label.name!r} is 0 in all training rows, and loss {family_of(loss)!r} needs a "
                    "mean above 0; give rows with larger labels"
                )
            arguments |= {"center": math.log(mean / exposure), "scale": mean ** (2 - power), "link": "log"}
        return F.coalesce((number - mean) / (deviation or 1.0), F.lit(0.0)), arguments
    # Held-out rows count, too, so that the choice of held-out rows does not change the number of classes.
    is_class = value.isNotNull()
    if isinstance(label.dataType, StringType):
        value = value.cast("string")  # drops the collation, like the class ids
    if isinstance(label.dataType, NumericType):
        number = value.cast("double")
        is_class &= ~F.isnan(number) & (F.abs(number) < math.inf) & (value != F.lit(IGNORED))
    counts = (
        dataset.where(is_class)
        .groupBy(value.alias("label"))
        .agg(F.count(F.lit(1)).alias("rows"))
        .orderBy(F.desc("rows"), "label")
        .limit(_MAX_CLASSES + 1)
        .collect()
    )
    if not 1 < len(counts) <= _MAX_CLASSES:
        many = (
            f"over {_MAX_CLASSES:,} different values" if counts[1:] else "one value" if counts else "no value"
        )
        raise ValueError(
            f"label {label.name!r} has {many}; a classification "
            f"takes 2 to {_MAX_CLASSES:,} classes"
            + ("; for a number that is no class use TorchRegressor" if counts[1:] else "")
        )
    is_text = isinstance(label.dataType, StringType)
    classes = len(counts) if is_text else int(max(row["label"] for row in counts)) + 1
    if classes > _MAX_CLASSES:
        raise ValueError(
            f"label {label.name!r} has the class {classes - 1}, and class numbers must lie in 0 to "
            f"{_MAX_CLASSES - 1}; cast it to a string: the values of strings are numbered automatically"
        )
    share = counts[0]["rows"] / sum(row["rows"] for row in counts)
    target = ((value == F.lit(counts[0]["label"])).cast("double") - share) / (share * (1 - share)) ** 0.5
    return F.coalesce(target, F.lit(0.0)), {"out_features": classes, "averages": "probabilities"}
