"""The part of `write_shards` that runs in a Spark task: writes Arrow batches to Parquet.

A task writes at most one file per split, and returns a report as JSON. Each attempt of a task uses different
file names. The driver keeps the files of the attempt whose report it received.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from threading import Thread
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringspark.pipelines.column_stats import ColumnStats, measure
from ringspark.pipelines.columns import MASK, Column
from ringspark.pipelines.kinds import Array, Image, Scalar
from ringspark.pipelines.kinds.base import Shape, numbers
from ringspark.pipelines.manifest import SPLITS, Split
from ringspark.pipelines.nulls import fill_nulls, null_rows
from ringspark.pipelines.table_files import FILE, NUM_BYTES, ROW, FileColumn, RowsDifferError, in_place
from ringspark.pipelines.writing.shard_file import ShardFileWriter

HandleInvalid = Literal["error", "skip", "keep"]

PIECE_BYTES = 16 << 20
"""Bytes of rows that are encoded at once.

Encoding makes several copies, and a batch from Spark may have gigabytes.
"""

REPORT_SCHEMA = "report string"


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """Settings of a write, which the driver sends to every task.

    Attributes:
        folder: Folder of this write's files, relative to `uri`.
        handle_invalid: How to treat nulls, for each column.
        splits: Whether batches have an additional column that is true for validation rows.
        filters: Whether batches have an additional last column that is true for rows to write.
        row_group_rows: Rows per row group; None sizes row groups by bytes.
        imports: Modules that a task imports because a later Spark stage in the same process needs them.
        references: The columns that stay in files, by name. If set, the shards refer to rows of the files,
            and the last columns are `REFERENCES`.
    """

    uri: str
    folder: str
    columns: tuple[Column, ...]
    handle_invalid: tuple[HandleInvalid, ...]
    splits: bool = False
    filters: bool = False
    row_group_rows: int | None = None
    compression: str = "zstd"
    only_measures: bool = False
    imports: tuple[str, ...] = ()
    references: dict[str, FileColumn] | None = None

    @property
    def stored_columns(self) -> tuple[Column, ...]:
        stored = []
        for column, handling in zip(self.columns, self.handle_invalid, strict=True):
            stored.append(column)
            if handling == "keep":
                stored.append(Column(name=column.name + MASK, kind=Scalar("bool"), source="boolean"))
        return tuple(stored)

    @property
    def stored_types(self) -> dict[str, Any]:
        stored: dict[str, Any] = {}
        for column in self.stored_columns:
            if self.references is None or column.name not in self.references:
                stored |= column.kind.stored(column.name)
        return stored if self.references is None else stored | {NUM_BYTES: pa.int64()}

    def new_writer(self, task: int, split: Split) -> ShardFileWriter:
        """Returns a writer for rows of Spark; `new_file` returns a writer for rows of other shards."""
        if self.references is None:
            return self.new_file(task, split)
        writer: ShardFileWriter = in_place("reference_file").ReferenceFileWriter(
            self.uri,
            self._new_path(task, split),
            self.columns,
            self.references,
            row_group_rows=self.row_group_rows,
            compression=self.compression,
        )
        return writer

    def new_file(self, task: int, split: Split) -> ShardFileWriter:
        return ShardFileWriter(
            self.uri,
            self._new_path(task, split),
            self.stored_types,
            row_group_rows=self.row_group_rows,
            compression=self.compression,
        )

    def _new_path(self, task: int, split: Split) -> str:
        return f"{self.folder}/part-{task:05d}-{uuid.uuid4().hex[:12]}-{split}.parquet"


def write_structs(plan: WritePlan, batches: Iterator[Any]) -> Iterator[Any]:
    """Calls `write_partition` with the fields of the structs in the only column of `batches`."""
    return write_partition(plan, (pa.RecordBatch.from_struct_array(batch.column(0)) for batch in batches))


def write_partition(plan: WritePlan, batches: Iterator[Any]) -> Iterator[Any]:
    """Writes one partition; yields one record batch that holds the JSON report."""
    writer = PartitionWriter(plan)
    importing = Thread(target=_import, args=(plan.imports,), daemon=True)
    try:
        for number, batch in enumerate(batches):
            for piece in _pieces(batch, plan.columns):
                writer.add(piece)
            # Not earlier: two threads that import modules of one package may see half of it.
            if number == 0:
                importing.start()
        report = writer.finish()
    except BaseException:
        writer.discard()
        raise
    if importing.ident is not None:
        importing.join()
    yield pa.RecordBatch.from_pydict({"report": [json.dumps(report, default=vars)]})


def _import(names: Sequence[str]) -> None:
    for name in names:
        # A broken library may raise anything; the stage that needs it will see the error.
        with suppress(Exception):
            import_module(name)


def _pieces(batch: Any, columns: Sequence[Column]) -> Iterator[Any]:
    # Decoded images are much larger than compressed ones.
    images = sum(column.kind.held_bytes for column in columns if isinstance(column.kind, Image))
    references = sum(
        array.nbytes
        for column, array in zip(columns, batch.columns, strict=False)
        if column.name in (FILE, ROW)
    )
    row_bytes = images + (batch.nbytes - references) // max(1, batch.num_rows)
    rows = max(1, PIECE_BYTES // max(1, row_bytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


class PartitionWriter:
    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        self._number = 0
        with suppress(ModuleNotFoundError):  # benchmarks on a GPU write shards without Spark
            from pyspark import TaskContext

            context = TaskContext.get()
            self._number = 0 if context is None else int(context.partitionId())
        names = {column.name: index for index, column in enumerate(plan.stored_columns)}
        # Index of a stored column whose nulls are kept -> index of its mask.
        self._masks = {
            names[column.name]: names[column.name + MASK]
            for column, handling in zip(plan.columns, plan.handle_invalid, strict=True)
            if handling == "keep"
        }
        self._writers = {split: plan.new_writer(self._number, split) for split in SPLITS}
        self._stats = {split: [ColumnStats()] * len(plan.stored_columns) for split in SPLITS}
        self._indicator = ColumnStats()
        self._indicator_nulls = 0
        self._rows = 0
        self._skipped = 0
        self._nulls = [0] * len(plan.columns)
        # Per column: number of rows that cannot be read, and the reason and place of the first.
        self._unread: list[tuple[int, str]] = [(0, "")] * len(plan.columns)
        self._shapes: list[tuple[Shape, Shape] | None] = [None] * len(plan.columns)
        self._problem: str | None = None
        self._differs = False
        # Set when the driver will refuse the data: the task stops writing but counts for the message.
        self._refused = plan.only_measures

    def add(self, batch: Any) -> None:
        columns, nulls, chosen = self._without_nulls(batch)
        if self._problem is not None:
            return
        arrays: list[list[Any]] = []
        for index, column in enumerate(self._plan.columns):
            keeps = self._plan.handle_invalid[index] == "keep"
            values, null, valid = columns[index], nulls[index], None
            if keeps:
                # A null row has no shape; a row that holds a null has one.
                valid = values.is_valid().to_numpy(zero_copy_only=False)
                values = fill_nulls(values)
            try:
                encoded = column.kind.encode(values, valid)
            except ValueError as error:
                self._refuse(f"column {column.name!r} {error}")
                return
            arrays.append(encoded.arrays)
            self._shapes[index] = merged = merge_shapes(self._shapes[index], encoded.shapes)
            if isinstance(column.kind, Array) and merged is not None and len(set(merged)) > 1:
                self._refuse(None)  # `settle` reports the sizes of all tasks
            if keeps:
                mask = np.zeros(len(values), dtype=bool) if null is None else null
                arrays.append([pa.array(mask)])
        if chosen is None or not chosen.any():
            self._write("train", arrays)
        else:
            for split, rows in (("train", ~chosen), ("validation", chosen)):
                mask = pa.array(rows)
                self._write(split, [[array.filter(mask) for array in group] for group in arrays])  # type: ignore[arg-type]

    def finish(self) -> dict[str, Any]:
        files: list[Any] = []
        with self._report_difference():
            if not self._refused:
                files = [file for split in SPLITS if (file := self._writers[split].finish(split)) is not None]
        return {
            "files": [vars(file) for file in files],
            "task": self._number,
            "value_bytes": {split: self._writers[split].value_bytes for split in SPLITS},
            "stats": {split: list(map(vars, stats)) for split, stats in self._stats.items()},
            "indicator": vars(self._indicator),
            "indicator_nulls": self._indicator_nulls,
            "rows": self._rows,
            "skipped": self._skipped,
            "nulls": self._nulls,
            "unread": self._unread,
            "shapes": self._shapes,
            "problem": self._problem,
            "differs": self._differs,
        }

    def discard(self) -> None:
        for writer in self._writers.values():
            writer.discard()

    def _without_nulls(self, batch: Any) -> tuple[list[Any], list[Any], Any]:
        """Drops rows that cannot be read, and rows with nulls unless the column keeps nulls.

        Returns the columns, the mask of each column's kept nulls (or None), and the mask of validation rows.
        """
        places = np.arange(self._rows, self._rows + batch.num_rows)
        self._rows += batch.num_rows
        columns = list(batch.columns)
        if self._plan.filters:
            valid = columns.pop().fill_null(False)
            columns = [values.filter(valid) for values in columns]
            places = places[valid.to_numpy(zero_copy_only=False)]
            self._skipped += batch.num_rows - len(places)
        chosen = None
        if self._plan.splits:
            # The driver raises an error for null indicators; until then their rows count as training rows.
            indicator = columns.pop()
            self._indicator_nulls += indicator.null_count
            found = measure(len(indicator), numbers(indicator.drop_null()), is_scalar=True)
            self._indicator = self._indicator.merge(found)
            chosen = indicator.cast(pa.bool_()).fill_null(False).to_numpy(zero_copy_only=False)
        nulls = [null_rows(values) for values in columns]
        dropped = self._read(columns, places)
        for index, mask in enumerate(nulls):
            if mask is None:
                continue
            self._nulls[index] += int(mask.sum())
            if self._plan.handle_invalid[index] != "keep":
                dropped = mask if dropped is None else dropped | mask
            if self._plan.handle_invalid[index] == "error":
                self._refuse(None)
        if dropped is not None:
            self._skipped += int(dropped.sum())
            kept = pa.array(~dropped)
            columns = [values.filter(kept) for values in columns]
            nulls = [None if mask is None else mask[~dropped] for mask in nulls]
            chosen = None if chosen is None else chosen[~dropped]
        nulls = [
            mask if handling == "keep" else None
            for mask, handling in zip(nulls, self._plan.handle_invalid, strict=True)
        ]
        return columns, nulls, chosen

    def _read(self, columns: list[Any], places: Any) -> Any:
        """Replaces columns by the results of `Kind.read`; returns a mask of the rows to drop, or None.

        `places` has the number of each row among the rows of the task.
        """
        dropped = None
        if self._problem is not None:
            return dropped
        rows = len(columns[0])
        for index, column in enumerate(self._plan.columns):
            columns[index], problems = column.kind.read(columns[index])
            if not problems:
                continue
            row, why = next(iter(problems.items()))
            place = f"row {places[row]} (counted from 0) of write task {self._number}"
            if self._plan.handle_invalid[index] != "skip":
                # A null may have a meaning, so "keep" keeps it; unreadable bytes have none.
                self._refuse(
                    f"column {column.name!r} {why}, in {place}; repair or drop it, or skip such rows: "
                    "handle_invalid='skip' of write_shards, handleInvalid='skip' of an estimator"
                )
                return None
            count, first = self._unread[index]
            self._unread[index] = count + len(problems), first or f"{why}, in {place}"
            dropped = np.zeros(rows, dtype=bool) if dropped is None else dropped
            dropped[list(problems)] = True
        return dropped

    def _write(self, split: Split, arrays: list[list[Any]]) -> None:
        if not len(arrays[0][0]):
            return
        stats = self._stats[split]
        for index, column in enumerate(self._plan.stored_columns):
            stored = measured = arrays[index]
            if (mask := self._masks.get(index)) is not None and pc.any(arrays[mask][0]).as_py():
                # The fill value of a null is not a value of the column.
                present = pc.invert(arrays[mask][0])
                measured = [array.filter(present) for array in stored]
            is_scalar = isinstance(column.kind, Scalar)
            found = measure(len(stored[0]), column.kind.measure(measured), is_scalar=is_scalar)
            stats[index] = stats[index].merge(found)
        with self._report_difference():
            if not self._refused:
                self._writers[split].add([array for group in arrays for array in group])

    @contextmanager
    def _report_difference(self) -> Iterator[None]:
        try:
            yield
        except RowsDifferError as error:
            self._differs = True
            self._refuse(str(error))

    def _refuse(self, problem: str | None) -> None:
        self._problem = self._problem or problem
        if not self._refused:
            self.discard()
        self._refused = True


def merge_shapes(
    left: tuple[Shape, Shape] | None, right: tuple[Shape, Shape] | None
) -> tuple[Shape, Shape] | None:
    if left is None or right is None:
        return left or right
    return (tuple(map(min, left[0], right[0])), tuple(map(max, left[1], right[1])))
