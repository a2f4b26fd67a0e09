"""Split-conformal prediction: corrects intervals so that they cover a share of the held-out labels.

An interval lies between two quantiles that the network has learned (Romano, Patterson and Candes 2019,
"Conformalized Quantile Regression"), or begins and ends at the prediction. The score of a held-out row is the
distance of its label from the interval, negative inside. The correction is the score of rank
ceil((n + 1) * coverage) among n rows. Rows that are exchangeable with the held-out rows are then covered with
at least this probability. Each group of rows may have a correction of its own.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, DateType, IntegralType, StringType, StructField

from ringspark.estimators.columns.schema import find_field
from ringspark.estimators.stages.declared import value_of
from ringspark.pipelines.columns import is_case_sensitive, quote

# Fewest scores of a group that reach its own correction. With fewer, chance would decide the correction.
LEAST_OUTSIDE = 5
_INTERVAL = "__ringspark_interval"


def check_rows(coverage: float, rows: int) -> None:
    """Raises ValueError if so few rows are held out that only an infinite interval has the coverage."""
    share = Fraction(str(coverage))
    least = math.ceil(share / (1 - share))
    if rows < least:
        raise ValueError(
            f"intervals={coverage:g} needs at least {least:,} held-out rows, and there are {rows:,}; raise "
            "validationFraction, or lower intervals"
        )


def check_group(field: StructField) -> None:
    """Raises ValueError if groups of this column cannot be compared as text."""
    if not isinstance(field.dataType, (StringType, IntegralType, BooleanType, DateType)):
        raise ValueError(
            f"intervalGroupCol {field.name!r} must hold strings, whole numbers, booleans or dates, but holds "
            f"{field.dataType.simpleString()}; cast it"
        )


def group_column(model: Any, dataset: DataFrame) -> Column:
    """Returns the text of each row's group; null without `intervalGroupCol`."""
    name = value_of(model, "intervalGroupCol")
    if not name:
        return F.lit(None).cast("string")
    field = find_field(name, "intervalGroupCol", dataset.schema, is_case_sensitive(dataset.sparkSession))
    check_group(field)
    return F.col(quote(field.name)).cast("string")


def calibrate(model: Any, dataset: DataFrame, indicator: str) -> dict[str, Any]:
    """Returns the value of `intervalCorrections`. Runs a Spark job over the held-out rows.

    Args:
        indicator: Column that is true in the held-out rows.
    """
    held = dataset.where(F.col(quote(indicator)).cast("boolean"))
    params: dict[str, Any] = {"handleInvalid": "skip", "intervalCol": _INTERVAL}
    params |= {"predictionCol": "", "quantilesCol": ""}
    # Contributions would cost many passes of the network per row.
    params |= {"contributionsCol": "", "innerCols": {}}
    bare = model.copy({model.getParam(name): value for name, value in params.items()})
    predicted = bare.transform(held)
    # The fit skips rows whose label is NaN, which would be the largest score.
    label = F.nanvl(F.col(quote(model.getLabelCol())).cast("double"), F.lit(None))
    score = F.greatest(F.col(f"{_INTERVAL}.lower") - label, label - F.col(f"{_INTERVAL}.upper"))
    # Each row counts twice: among all rows (group null) and in its own group.
    keys = F.array_distinct(F.array(F.lit(None).cast("string"), group_column(model, held)))
    scores = predicted.select(F.explode(keys).alias("group"), score.alias("score")).where("score IS NOT NULL")
    groups = Window.partitionBy("group")
    counted = scores.withColumns(
        {"rows": F.count("*").over(groups), "rank": F.row_number().over(groups.orderBy("score"))}
    )
    coverage = model.getIntervals()
    # Decimals, because 0.55 * 100 is above 55 in binary numbers.
    rank = F.ceil((F.col("rows") + 1) * F.lit(Decimal(str(coverage))))
    found = {row["group"]: row for row in counted.where(F.col("rank") == rank).collect()}
    if None not in found:
        check_rows(coverage, 0)
    if not math.isfinite(found[None]["score"]):
        raise ValueError(
            "intervals cannot be made, because the network predicts NaN or infinity for held-out rows; lower "
            "learningRate"
        )
    return {
        "all": found.pop(None)["score"],
        "groups": {
            group: row["score"]
            for group, row in found.items()
            if row["rows"] + 1 - row["rank"] >= LEAST_OUTSIDE and math.isfinite(row["score"])
        },
    }
