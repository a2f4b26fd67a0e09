"""Keeps which version of a Delta or Iceberg table a run reads, so that a resume reads the same version."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from ringspark.estimators import run_layout
from ringspark.estimators.run.folder import RunFolder
from ringspark.pipelines import storage
from ringspark.pipelines.table_files import TableSource
from ringspark.pipelines.typed_json import parse_object, record


def pinned_source(run_uri: str | None) -> TableSource | None:
    """Returns the version of a table that a run's first start read; None if there is no such run."""
    if run_uri is None or not storage.exists(uri := storage.join(run_uri, run_layout.SOURCE)):
        return None
    return record(TableSource, parse_object(storage.read_bytes(uri)))


def check_pinned(run_uri: str | None, source: TableSource) -> None:
    """Raises RunRefusedError if a run began with another table, or another version of the table."""
    known = pinned_source(run_uri)
    # If an explicit version has other names, the checks of the columns say so.
    if run_uri is not None and known is not None and replace(known, schema_id=source.schema_id) != source:
        before, now = (f"{table.uri!r} version {table.version}" for table in (known, source))
        raise RunFolder(run_uri, is_given=True).refusal([f"data: the table {before} -> {now}"])


def keep_source(run_uri: str, source: TableSource) -> None:
    """Writes which version of a table a run reads, so that a resume reads the same version."""
    storage.write_atomic(storage.join(run_uri, run_layout.SOURCE), json.dumps(asdict(source)).encode())
