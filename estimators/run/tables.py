"""Fits on tables that another program wrote: a manifest of the table's files replaces the shards."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from pyspark.sql import SparkSession

from ringspark.estimators import run_layout
from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.stages.fit_data import FitData, discard
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.external.listing import Listing
from ringspark.pipelines.external.table_manifest import table_manifest
from ringspark.pipelines.kinds import kind_from_json
from ringspark.pipelines.manifest import MANIFEST_NAME


def pinned_version(run_uri: str | None) -> int | None:
    """Returns the Delta table's version that a run's first start read; None if there is no such run."""
    if run_uri is None:
        return None
    folder = storage.join(run_uri, run_layout.SHARDS)
    if not storage.exists(storage.join(folder, MANIFEST_NAME)):
        return None
    table = ShardManifest.load(folder).table
    return None if table is None else table.version


def check_table(data: FitData) -> None:
    """Raises ValueError for settings that select single rows, because a table's files are read whole."""
    if data.validation_fraction is not None:
        raise ValueError(
            "validationFraction selects single rows, but a table that is read in place holds out whole "
            "files; name a partition column by validationIndicatorCol, or write the table with write_shards"
        )
    if data.drops_invalid:
        raise ValueError(
            "handleInvalid='skip' leaves rows out, but a table in place is read whole; use fit(df), or "
            "write it with write_shards"
        )


@contextmanager
def table_rows(
    spark: SparkSession, listing: Listing, data: FitData, run: RunFolder
) -> Iterator[tuple[ShardManifest, str]]:
    """Yields a manifest of a table's files, and a key that a resume uses to recognize the rows."""
    facts = [asdict(listing.source), listing.files, data.columns, data.validation_col, data.kinds]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    if not run.is_given:
        folder = storage.join(data.root, f"table-{uuid.uuid4().hex[:12]}")
        try:
            yield _write_manifest(spark, listing, data, folder), key
        finally:
            discard(folder)
        return
    folder, known = storage.join(run.uri, run_layout.SHARDS), run.identity()
    if known is None:
        yield _write_manifest(spark, listing, data, folder), key
        return
    if not storage.exists(storage.join(folder, MANIFEST_NAME)):
        raise run.refusal(["data: shards given to fitOnShards -> a table"])
    manifest = ShardManifest.load(folder)
    if known.rows_key != key:
        raise run.refusal([_describe_change(manifest, listing)])
    yield manifest, key


def _write_manifest(spark: SparkSession, listing: Listing, data: FitData, folder: str) -> ShardManifest:
    kinds = {name: kind_from_json(kind) for name, kind in json.loads(data.kinds).items()}
    manifest = table_manifest(spark, listing, data.columns, kinds, data.validation_col)
    manifest = replace(manifest, uri=folder)
    manifest.save()
    return manifest


def _describe_change(manifest: ShardManifest, listing: Listing) -> str:
    if manifest.table is None:
        return f"data: a DataFrame -> the table {listing.source.uri!r}"
    if manifest.table != listing.source:
        tables = [f"{t.uri!r}" + ("" if t.version is None else f" version {t.version}")
                  for t in (manifest.table, listing.source)]  # fmt: skip
        return f"data: the table {tables[0]} -> {tables[1]}"
    before = {f.path: (f.num_bytes, f.state) for f in manifest.files}
    now = {path: (num_bytes, state) for path, num_bytes, state in listing.files}
    differ = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
    if not differ:
        return "data: columns, their types or validationIndicatorCol of the table"
    return f"data: {len(differ)} files of the table were added, changed or removed, such as {differ[0]!r}"
