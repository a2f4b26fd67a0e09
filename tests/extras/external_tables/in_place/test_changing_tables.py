"""Files replaced while an epoch reads them: a reader raises and never mixes rows silently."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringspark.pipelines import ShardManifest
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import Scalar
from ringspark.pipelines.manifest import ShardFile
from ringspark.pipelines.readers import open_reader
from ringspark.pipelines.source_files import path_states
from ringspark.pipelines.table_files import TableFile, TableSource


def _write(path: Path, first: float) -> None:
    """Replaces the file with two row groups of two rows each."""
    new = path.with_name("_new")
    table = pa.table({"x": first + np.arange(4.0)})
    pq.write_table(table, new, row_group_size=2, use_dictionary=False, compression="none")
    os.replace(new, path)


def _table(folder: Path, num_files: int) -> ShardManifest:
    files = []
    for number in range(num_files):
        path = folder / f"{number:02}.parquet"
        _write(path, 4.0 * number)
        ((_, num_bytes, state),) = path_states([str(path)])
        table = TableFile(state=state, window_rows=0, values={})
        files.append(
            ShardFile(
                path=path.name, split="train", num_bytes=num_bytes, sha256="", row_groups=(2, 2), table=table
            )
        )
    return ShardManifest(
        uri=str(folder),
        columns=(Column(name="x", kind=Scalar("float64"), source="double"),),
        files=tuple(files),
        table=TableSource(uri=str(folder)),
    )


@pytest.mark.parametrize("num_files", [2, 70])
def test_a_file_replaced_within_an_epoch_is_an_error(tmp_path: Path, num_files: int) -> None:
    """With 70 files, the reader closes and reopens the file; with 2, it keeps the file open."""
    reader = open_reader(_table(tmp_path, num_files), engine="arrow")
    order = [*range(0, 2 * num_files, 2), *range(1, 2 * num_files, 2)]
    tables = reader._tables(order)  # without read-ahead threads, so the file changes at an exact point
    found = [next(tables).column("x").to_pylist() for _ in range(num_files)]
    _write(tmp_path / "00.parquet", -100.0)
    with pytest.raises(RuntimeError, match=r"00\.parquet' has changed since .*do not change a table"):
        found.extend(table.column("x").to_pylist() for table in tables)
    assert min(min(rows) for rows in found) == 0
    assert len(found) < 2 * num_files
