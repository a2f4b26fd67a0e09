"""The part of `write_shards` that runs inside a Spark task: Arrow batches to Parquet.

Knows nothing of Spark. One call writes at most one file per split and returns
one JSON report: the files it finished and the statistics of every column. Each
attempt of a task writes under a name of its own, so a retried or speculative
attempt never touches another's file; the driver keeps the files of the attempt
whose report it received.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ringspark.pipelines import storage
from ringspark.pipelines.columns import Column, arrow_type
from ringspark.pipelines.manifest import Split
from ringspark.pipelines.stats import ColumnStats, measure

DEFAULT_ROW_GROUP_ROWS = 16_384
MAX_DEFAULT_ROW_GROUP_BYTES = 4 << 20
"""Wide rows get fewer rows per group: a reader holds up to about 100 row groups (see epoch_plan)."""

REPORT_SCHEMA = "report string"


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """What every task needs to know; travels from the driver with the function.

    Attributes:
        uri: Folder of the shards.
        run_id: Part of every file name of this write.
        columns: Columns to store, without lengths. Batches hold them in this order, under any name.
        validation_col: Name of one more, last column that sends rows to the validation split; not stored.
        row_group_rows: Rows per row group; None to choose by the width of a row.
        compression: Parquet codec.
    """

    uri: str
    run_id: str
    columns: tuple[Column, ...]
    validation_col: str | None
    row_group_rows: int | None
    compression: str


def write_partition(plan: WritePlan, batches: Iterator[Any]) -> Iterator[Any]:
    """Writes one partition and yields one record batch with its JSON report. Runs in a Spark task."""
    attempt = f"part-{_partition_id():05d}-{plan.run_id}-{uuid.uuid4().hex[:12]}"
    writers: dict[Split, _SplitWriter] = {
        "train": _SplitWriter(plan, f"{attempt}-train.parquet"),
        "validation": _SplitWriter(plan, f"{attempt}-validation.parquet"),
    }
    indicator = ColumnStats()
    try:
        for batch in batches:
            if plan.validation_col is None:
                writers["train"].add(batch)
                continue
            values = batch.column(len(plan.columns))
            indicator = indicator.merge(measure(values))
            # A null indicator is an error that the driver reports; until then the row goes to train.
            chosen = values.cast(pa.bool_()).fill_null(False)
            writers["train"].add(batch.filter(pc.invert(chosen)))
            writers["validation"].add(batch.filter(chosen))
        report = {
            "files": [file for split, writer in writers.items() for file in writer.finish(split)],
            "stats": {split: writer.stats_json() for split, writer in writers.items()},
            "indicator": indicator.to_json(),
        }
    except BaseException:
        for writer in writers.values():
            writer.discard()
        raise
    yield pa.RecordBatch.from_pydict({"report": [json.dumps(report)]})


class _SplitWriter:
    """Buffers the batches of one split and writes row groups of an exact number of rows."""

    def __init__(self, plan: WritePlan, name: str) -> None:
        self._plan = plan
        self._name = name
        self._uri = storage.join(plan.uri, name)
        self._schema = pa.schema([pa.field(c.name, arrow_type(c), nullable=False) for c in plan.columns])
        self._stats = {column.name: ColumnStats() for column in plan.columns}
        self._row_group_rows = plan.row_group_rows
        self._buffer: list[Any] = []
        self._buffered_rows = 0
        self._row_groups: list[int] = []
        self._file: Any = None
        self._parquet: Any = None
        self._refused = False

    def add(self, batch: Any) -> None:
        """Measures a batch, and writes the row groups that it fills."""
        if batch.num_rows == 0:
            return
        for column, values in zip(self._plan.columns, batch.columns, strict=False):
            self._stats[column.name] = self._stats[column.name].merge(measure(values))
        if any(stats.nulls or stats.min_length != stats.max_length for stats in self._stats.values()):
            # The driver will refuse this data: go on counting for its message, stop writing.
            self.discard()
            self._refused = True
        if self._refused:
            return
        if self._row_group_rows is None:
            self._row_group_rows = _default_row_group_rows(batch)
        names = [column.name for column in self._plan.columns]
        self._buffer.append(pa.RecordBatch.from_arrays(batch.columns[: len(names)], names=names))
        self._buffered_rows += batch.num_rows
        if self._buffered_rows >= self._row_group_rows:
            self._flush(keep_remainder=True)

    def finish(self, split: Split) -> list[dict[str, Any]]:
        """Closes the file and returns its entry for the manifest; none when no row came."""
        if self._refused or (not self._buffered_rows and not self._row_groups):
            return []
        if self._buffered_rows:
            self._flush(keep_remainder=False)
        self._close()
        num_bytes = storage.size(self._uri)
        return [{"path": self._name, "split": split, "num_bytes": num_bytes, "row_groups": self._row_groups}]

    def stats_json(self) -> dict[str, Any]:
        """Returns column name -> statistics."""
        return {name: stats.to_json() for name, stats in self._stats.items()}

    def discard(self) -> None:
        """Closes and removes what was written so far."""
        self._buffer, self._buffered_rows = [], 0
        if self._parquet is not None:
            self._close()
            storage.remove(self._uri)
            self._parquet = None

    def _flush(self, *, keep_remainder: bool) -> None:
        assert self._row_group_rows is not None
        table = pa.Table.from_batches(self._buffer)
        if self._parquet is None:
            self._open()
        start = 0
        while table.num_rows - start >= self._row_group_rows or (
            not keep_remainder and start < table.num_rows
        ):
            group = table.slice(start, self._row_group_rows)
            self._parquet.write_table(group.cast(self._schema), row_group_size=self._row_group_rows)
            self._row_groups.append(group.num_rows)
            start += group.num_rows
        self._buffer, self._buffered_rows = [], table.num_rows - start
        if self._buffered_rows:
            # At most the batch that came last is kept alive by these views.
            self._buffer = table.slice(start).to_batches()

    def _open(self) -> None:
        self._file = storage.open_file(self._uri, "wb")
        self._parquet = pq.ParquetWriter(
            self._file,
            self._schema,
            compression=self._plan.compression,
            # Numbers that hardly repeat gain nothing from a dictionary and read slower with one.
            use_dictionary=[
                c.name for c in self._plan.columns if c.kind == "scalar" and "float" not in c.dtype
            ],
        )

    def _close(self) -> None:
        self._parquet.close()
        self._file.close()


def _default_row_group_rows(batch: Any) -> int:
    row_bytes = max(1, batch.nbytes // batch.num_rows)
    return int(max(1, min(DEFAULT_ROW_GROUP_ROWS, MAX_DEFAULT_ROW_GROUP_BYTES // row_bytes)))


def _partition_id() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else int(context.partitionId())
