"""Which rows a fit holds out: those of an indicator, the newest ones, or a random share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import AtomicType, DateType, NumericType, TimestampNTZType, TimestampType

from ringspark.estimators.columns.schema import find_field
from ringspark.estimators.stages.declared import value_of
from ringspark.estimators.training.settings.data import VALIDATION_INDICATOR_COL
from ringspark.pipelines.columns import is_case_sensitive, quote

HELD_OUT_COLUMN = "__ringspark_held_out"
"""Name of the indicator that `hold_out` adds."""

_SHARE = 0.15
_BUCKETS = 1_000_000


@dataclass(frozen=True)
class HeldOut:
    """A DataFrame with a column that is true in the rows that are held out.

    Attributes:
        indicator: Name of the column.
        key: What chose the rows, for comparing two splits.
    """

    dataset: DataFrame
    indicator: str
    key: tuple[Any, ...]


def hold_out(estimator: Any, dataset: DataFrame, names: Sequence[str]) -> HeldOut:
    """Returns the split that the estimator's Params ask for; unset, 15 % of the rows, chosen by the seed.

    Equal rows, in the columns `names`, are on the same side.
    """
    given, fraction = value_of(estimator, VALIDATION_INDICATOR_COL), estimator.getValidationFraction()
    time = estimator.getTimeCol()
    if given and (time or fraction is not None):
        other = "timeCol" if time else "validationFraction"
        raise ValueError(
            f"set validationIndicatorCol or {other}, not both; each chooses the rows to hold out"
        )
    if given:
        return HeldOut(dataset, given, ())
    share = _SHARE if fraction is None else fraction
    if time:
        return HeldOut(hold_out_newest(dataset, time, share), HELD_OUT_COLUMN, (time, share))
    schema = dataset.schema
    plain = [F.col(quote(name)) for name in names if isinstance(schema[name].dataType, AtomicType)]
    bucket = F.pmod(F.xxhash64(F.lit(estimator.getSeed()), *plain), F.lit(_BUCKETS))
    held = dataset.withColumn(HELD_OUT_COLUMN, bucket < F.lit(int(share * _BUCKETS)))
    return HeldOut(held, HELD_OUT_COLUMN, (estimator.getSeed(), share))


def hold_out_newest(dataset: DataFrame, name: str, share: float) -> DataFrame:
    """Adds `HELD_OUT_COLUMN`, true in about the newest `share` of the rows by column `name`.

    Rows of the same time are on the same side. Runs one Spark job.

    Raises:
        ValueError: The column is no time or number, or has no two values.
    """
    field = find_field(name, "timeCol", dataset.schema, is_case_sensitive(dataset.sparkSession))
    if not isinstance(field.dataType, (DateType, TimestampType, TimestampNTZType, NumericType)):
        raise ValueError(
            f"timeCol {name!r} must hold dates, timestamps or numbers, "
            f"it holds {field.dataType.simpleString()}"
        )
    time = F.col(quote(field.name))
    number = time.cast("timestamp").cast("double")
    if isinstance(field.dataType, NumericType):
        number = time.cast("double")
    found = dataset.agg(F.percentile_approx(number, 1 - share, 10_000), F.min(number), F.max(number)).head()
    assert found is not None
    cut, first, last = found
    if first == last:
        raise ValueError(f"timeCol {name!r} is {first} in every row; give validationFraction instead")
    # If the newest rows all have the time of the cut, they are held out, and the others train.
    newest = number > F.lit(cut) if cut < last else number >= F.lit(cut)
    return dataset.withColumn(HELD_OUT_COLUMN, F.coalesce(newest, F.lit(False)))
