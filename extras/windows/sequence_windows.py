"""`SequenceWindows`: a Spark ML stage that turns rows of a table into sequences for a network, lazily."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from pyspark.ml import Transformer
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.util import MLReadable, MLReader, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, BooleanType, NumericType, StructField, StructType

from ringspark.estimators.columns.schema import find_field
from ringspark.estimators.stages.model_params import check_free
from ringspark.estimators.stages.persistence import StageReader, StageWriter
from ringspark.estimators.stages.storage_root import active_session
from ringspark.extras.windows.row_windows import MICROSECONDS_PER_DAY, WHOLE, RowWindows, numbers_of, value_of
from ringspark.extras.windows.window_params import WindowParams, days_and_microseconds
from ringspark.pipelines.columns import check_frame, is_case_sensitive


class SequenceWindows(WindowParams, Transformer, MLWritable, MLReadable["SequenceWindows"]):
    """Creates windows over the rows of a table; the keywords of the constructor are the Params.

    A row at which a window ends stays, with all its columns; `outputCol` (or `outputCols`) and `labelCol` are
    added. Other rows are dropped; `countWindows` counts them by reason. For example::

        SequenceWindows(keyCols=["origin"], timeCol="time_hour", valueCols=["flights", "temp"], steps=48,
                        targetCol="flights", maxGap="1 hour")
    """

    def countWindows(self, dataset: DataFrame) -> dict[str, int]:
        """Counts the rows at which a window ends, and all other rows by reason. Runs one or two Spark jobs.

        The reasons are "short" (fewer than `steps` rows since the start of the series or the last gap),
        "stride" (between two windows), "null" (in the window, the key or the time) and "unlabeled" (targets
        are missing).

        Raises:
            ValueError: For the same reasons as in `transform`.
        """
        counts = dict.fromkeys(("windows", "short", "stride", "null", "unlabeled"), 0)
        for reason, count in self._plan(dataset, "countWindows").counts(dataset).collect():
            counts[reason or "windows"] += count
        return counts

    def transformSchema(self, schema: StructType) -> StructType:
        return self._transform(active_session().createDataFrame([], schema)).schema

    def write(self) -> StageWriter:
        return StageWriter(self)

    @classmethod
    def read(cls) -> MLReader[SequenceWindows]:
        return StageReader(cls)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        plan = self._plan(dataset, "transform")
        outputs = [(self.getOutputCol(), numbers_of(plan.values))]
        if self.isSet(self.outputCols):
            names = self.getOutputCols()
            if len(names) != len(plan.values):
                raise ValueError(
                    f"outputCols must name a column for each of the {len(plan.values)} valueCols, got {names}"
                )
            outputs = list(zip(names, map(value_of, plan.values), strict=True))
        asked = [self.getLabelCol(), self.getTargetTimeCol()] if plan.target is not None else []
        targets = [name for name in asked if name is not None]
        added = [*(name for name, _ in outputs), *targets]
        check_free(dataset.schema, added, is_case_sensitive(dataset.sparkSession))
        return plan.over(dataset, dict(outputs), targets)

    def _plan(self, dataset: DataFrame, method: str) -> RowWindows:
        check_frame(dataset, method)
        if dataset.isStreaming:
            raise ValueError(
                "SequenceWindows takes no stream, because Spark cannot order its rows; store the last rows "
                "of each key, and call the stage in foreachBatch, on these rows and the batch"
            )
        schema, exact = dataset.schema, is_case_sensitive(dataset.sparkSession)
        for name in ("keyCols", "timeCol", "valueCols", "steps"):
            if not self.isSet(name):
                raise ValueError(f"SequenceWindows needs {name}: {self.getParam(name).doc}")

        def fields(param: str, names: Sequence[str]) -> tuple[StructField, ...]:
            return tuple(find_field(name, param, schema, exact) for name in names)

        (time,) = fields("timeCol", [self.getTimeCol()])
        values = fields("valueCols", self.getValueCols())
        if not values:
            raise ValueError("valueCols must name at least one column")
        _check_values(values)
        target_name = self.getTargetCol()
        target = fields("targetCol", [target_name]) if target_name else (None,)
        if target == (None,):
            unused = [name for name in ("horizon", "handleUnlabeled", "targetTimeCol") if self.isSet(name)]
            if unused:
                warnings.warn(f"{', '.join(unused)} has no effect: targetCol is not set", stacklevel=3)
        max_gap, gap_days = _ticks(self.getMaxGap(), time)
        return RowWindows(
            keys=fields("keyCols", self.getKeyCols()),
            time=time,
            values=values,
            target=target[0],
            steps=self.getSteps(),
            stride=self.getStride(),
            horizon=self.getHorizon(),
            max_gap=max_gap,
            gap_days=gap_days,
            skips_invalid=self.getHandleInvalid() == "skip",
            keeps_unlabeled=self.getHandleUnlabeled() == "keep",
        )


def _check_values(fields: Sequence[StructField]) -> None:
    for field in fields:
        leaf = field.dataType
        while isinstance(leaf, ArrayType):
            leaf = leaf.elementType
        if not isinstance(leaf, NumericType | BooleanType | VectorUDT):
            raise ValueError(
                f"valueCols {field.name!r} has type {field.dataType.simpleString()}, not a number, array or "
                "vector; convert it first, e.g. with StringIndexer"
            )


def _ticks(gap: str | int | None, time: StructField) -> tuple[int | None, int]:
    """Checks `timeCol` and `maxGap`; returns `max_gap` and `gap_days` of `RowWindows`."""
    name = time.dataType.typeName()
    if name not in (*WHOLE, "date", "timestamp", "timestamp_ntz"):
        raise ValueError(
            f"timeCol {time.name!r} has type {time.dataType.simpleString()}; make it a timestamp, a date "
            "or a whole number, e.g. with F.to_timestamp"
        )
    if gap is None:
        return None, 0
    if (name in WHOLE) != isinstance(gap, int):
        wanted = "a whole number" if name in WHOLE else "a duration such as '1 hour'"
        raise ValueError(
            f"maxGap must be {wanted}, because timeCol {time.name!r} has type "
            f"{time.dataType.simpleString()}, got {gap!r}"
        )
    if isinstance(gap, int):
        return gap, 0
    days, rest = days_and_microseconds(gap)
    micros = days * MICROSECONDS_PER_DAY + rest
    if name != "date":
        return micros, days if name == "timestamp" else 0
    if micros % MICROSECONDS_PER_DAY:
        raise ValueError(f"maxGap must be whole days, because timeCol {time.name!r} holds dates, got {gap!r}")
    return micros // MICROSECONDS_PER_DAY, 0
