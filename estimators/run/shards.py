"""The rows of a run that the user may come back to: written once into its folder, and read again.

A resumed training reads the very files that it began with: another write of the same DataFrame may put
its rows in another order. That the DataFrame still has those rows is known by its plan and source files
within one Spark application (`pipelines.reuse`); otherwise it is written once more and compared.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict

from pyspark.sql import DataFrame

from ringspark.estimators import run_layout
from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.run.identity import data_differences
from ringspark.estimators.stages.fit_data import FitData, discard
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.reuse.cached_shards import rows_key


def run_shards(dataset: DataFrame, data: FitData, run: RunFolder) -> tuple[ShardManifest, str | None]:
    """The run's shards, written where there are none; and what tells the DataFrame's rows from others.

    Raises:
        ValueError: The DataFrame has other rows than the run, says how; or the shards are damaged.
    """
    uri = storage.join(run.uri, run_layout.SHARDS)
    settings = asdict(data)
    settings.pop("root")
    key = rows_key(dataset, **settings)
    known = run.identity()
    if known is None:
        return data.write(dataset, uri), key
    if not storage.exists(storage.join(uri, "manifest.json")):
        raise run.refusal(["data: shards given to fitOnShards -> a DataFrame"])
    manifest = ShardManifest.load(uri)
    if key is None or key != known.rows_key:
        again = storage.join(run.uri, f"{run_layout.SHARDS}-{uuid.uuid4().hex[:12]}")
        try:
            changed = data_differences(manifest, data.write(dataset, again))
        finally:
            discard(again)
        if changed:
            raise run.refusal(changed[:5])
    if run.result() is None:
        manifest.verify_files()
    return manifest, key
