"""Writes the rows of a run once into its folder, if the user may come back to it, and reads them again.

A resumed training reads the very files that it began with, because another write of the same DataFrame may
order its rows differently. Within one Spark application, plan and source files prove that the DataFrame still
has those rows (`pipelines.reuse`); otherwise it is written once more and compared. Equal digests of the files
prove equal rows; where they differ, only counts and statistics can be compared.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import asdict

from pyspark.sql import DataFrame

from ringspark.estimators import run_layout
from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.run.identity import data_differences
from ringspark.estimators.stages.fit_data import FitData, discard
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.reuse.cached_shards import rows_key

_logger = logging.getLogger(__name__)


def run_shards(dataset: DataFrame, data: FitData, run: RunFolder) -> tuple[ShardManifest, str | None]:
    """Returns the run's shards, after writing them if there are none, and the key of the DataFrame's rows.

    Raises:
        ValueError: The DataFrame has other rows than the run (the message says how), or the shards are
            damaged.
    """
    uri = storage.join(run.uri, run_layout.SHARDS)
    settings = asdict(data)
    for name in ("root", "imports"):
        settings.pop(name)
    key = rows_key(dataset, **settings)
    known = run.identity()
    if known is None:
        return data.write(dataset, uri), key
    if not storage.exists(storage.join(uri, "manifest.json")):
        raise run.refusal(["data: shards given to fitOnShards -> a DataFrame"])
    manifest = ShardManifest.load(uri)
    if key is None or key != known.rows_key:
        for name in storage.list_names(run.uri):
            if name.startswith(f"{run_layout.SHARDS}-"):
                discard(storage.join(run.uri, name))  # of a driver that was killed while it compared
        again = storage.join(run.uri, f"{run_layout.SHARDS}-{uuid.uuid4().hex[:12]}")
        try:
            written = data.write(dataset, again)
        finally:
            discard(again)
        changed = data_differences(manifest, written)
        if changed:
            raise run.refusal(changed[:5])
        if _digests(manifest) != _digests(written):
            _logger.warning(
                "the DataFrame has counts and statistics of the run in %r, but gave files with other bytes: "
                "its rows came in another order, or changed where statistics do not show it; the training "
                "goes on with the rows that it began with",
                run.uri,
            )
    if run.result() is None:
        manifest.verify_files()
    return manifest, key


def _digests(manifest: ShardManifest) -> list[tuple[str, str]]:
    return sorted((file.split, file.sha256) for file in manifest.files)
