"""Writes shards from NumPy columns with the package's writer, without Spark."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ringspark.pipelines import ShardManifest
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import Array, Scalar
from ringspark.pipelines.manifest import SPLITS, ShardFile
from ringspark.pipelines.typed_json import record
from ringspark.pipelines.writing.shard_writer import WritePlan, write_partition
from ringspark.pipelines.writing.task_reports import join_reports


def nested(values: np.ndarray) -> Any:
    """Returns the rows as Arrow lists, one level per dimension after the first."""
    made = pa.array(values.ravel())
    for size in reversed(values.shape[1:]):
        made = pa.ListArray.from_arrays(np.arange(0, len(made) + 1, size, dtype=np.int32), made)
    return made


def written(
    folder: Path,
    columns: dict[str, np.ndarray],
    *,
    row_group_rows: int | None = 64,
    num_files: int = 2,
    validation: np.ndarray | None = None,
) -> ShardManifest:
    """Writes the columns to a new folder."""
    (folder / "_shards-test").mkdir(parents=True)
    plan = WritePlan(
        uri=str(folder),
        folder="_shards-test",
        columns=tuple(
            Column(name=key, kind=(Scalar if value.ndim == 1 else Array)(value.dtype.name))
            for key, value in columns.items()
        ),
        handle_invalid=("error",) * len(columns),
        splits=validation is not None,
        row_group_rows=row_group_rows,
    )
    data = {key: nested(value) for key, value in columns.items()}
    if validation is not None:
        data["is_validation"] = pa.array(validation)
    table = pa.table(data)
    reports = []
    for part in np.array_split(np.arange(table.num_rows), num_files):
        batches = table.take(pa.array(part)).to_batches()
        (report,) = write_partition(plan, iter(batches))
        reports.append(json.loads(report.to_pydict()["report"][0]))
    files = [record(ShardFile, file) for report in reports for file in report["files"]]
    # Paths have no Spark task number here, so sorting by path would give a random order.
    files.sort(key=lambda file: SPLITS.index(file.split))
    manifest = join_reports(plan, reports, files)
    manifest.save()
    return manifest
