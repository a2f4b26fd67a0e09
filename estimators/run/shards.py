"""The shards of a run: written once, read again by a resume, and checked at every restart.

A resumed training reads the files that it began with, because another write of the same DataFrame may
order its rows differently. Within one Spark application, plan and source files prove that the DataFrame still
has those rows (`pipelines.reuse`); otherwise it is written again and compared. Equal digests of the files
prove equal rows; if they differ, only counts and statistics can be compared.

The manifest holds the digest of every file, but no reader can afford to compute it. The time or version of a
file, from the file system or the store, shows whether it was touched since the run began. Only touched files
are read whole and compared with their digests. A copy of the shards elsewhere counts as touched.
"""

from __future__ import annotations

import json
import logging
import uuid
from contextlib import suppress
from dataclasses import asdict, replace

from pyspark.sql import DataFrame

from ringspark.estimators import run_layout
from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.run.identity import list_data_differences
from ringspark.estimators.stages.fit_data import FitData, discard
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.manifest import MANIFEST_NAME
from ringspark.pipelines.reuse.cached_shards import rows_key
from ringspark.pipelines.reuse.source_files import path_states
from ringspark.pipelines.typed_json import fit, parse

_logger = logging.getLogger(__name__)


def run_shards(dataset: DataFrame, data: FitData, run: RunFolder) -> tuple[ShardManifest, str | None]:
    """Returns the run's shards, which it writes if there are none, and the key of the DataFrame's rows.

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
    if not storage.exists(storage.join(uri, MANIFEST_NAME)):
        raise run.refusal(["data: shards given to fitOnShards -> a DataFrame"])
    manifest = ShardManifest.load(uri)
    if key is None or key != known.rows_key:
        for name in storage.list_names(run.uri):
            if name.startswith(f"{run_layout.SHARDS}-"):
                discard(storage.join(run.uri, name))  # of a driver that was killed during the comparison
        again = storage.join(run.uri, f"{run_layout.SHARDS}-{uuid.uuid4().hex[:12]}")
        try:
            written = data.write(dataset, again)
        finally:
            discard(again)
        changed = list_data_differences(manifest, written)
        if changed:
            raise run.refusal(changed[:5])
        if _digests(manifest) != _digests(written):
            _logger.warning(
                "the DataFrame has counts and statistics of the run in %r, but gave files with other bytes: "
                "its rows came in another order, or changed without changing the statistics; the training "
                "continues with its first rows",
                run.uri,
            )
    if run.result() is None:
        manifest.verify_files()
    return manifest, key


def _digests(manifest: ShardManifest) -> list[tuple[str, str]]:
    return sorted((file.split, file.sha256) for file in manifest.files)


class ShardStates:
    """The recorded states of a manifest's files in the folder of a run. Runs on the driver."""

    def __init__(self, manifest: ShardManifest, run_uri: str) -> None:
        self._manifest = manifest
        self._uri = storage.join(run_uri, run_layout.SHARD_STATES)

    def record(self) -> None:
        """Records the states; if they were recorded before, checks the files instead.

        Raises:
            ValueError: See `check`.
        """
        if storage.exists(self._uri):
            self.check()
            return
        storage.write_atomic(self._uri, json.dumps(self._states()).encode())

    def check(self) -> None:
        """Reads the files that were touched since, and compares their digests.

        Raises:
            ValueError: Files were changed or are missing; the message names them. Or the manifest, which
                every worker reads again, has changed.
        """
        # Compared as text, because a NaN among the statistics does not equal itself.
        if ShardManifest.load(self._manifest.uri).to_json() != self._manifest.to_json():
            raise ValueError(
                f"{storage.join(self._manifest.uri, MANIFEST_NAME)!r} changed during the training; restore "
                "it, or train on these shards in another run"
            )
        known: dict[str, str] = {}
        # If the record cannot be read, every file is read whole.
        with suppress(FileNotFoundError, ValueError):
            known = fit(dict[str, str], parse(storage.read_bytes(self._uri)), run_layout.SHARD_STATES)
        now = self._states()
        touched = [file for file in self._manifest.files if known.get(file.path) != now.get(file.path)]
        if touched:
            replace(self._manifest, files=tuple(touched)).verify()

    def _states(self) -> dict[str, str]:
        """Returns path -> text that changes with the file's bytes; empty if the store has none.

        It is also empty if a file is missing, which `check` reports.
        """
        paths = [file.path for file in self._manifest.files]
        try:
            folder = storage.normalize(self._manifest.files_uri)
            states = path_states([storage.join(folder, path) for path in paths])
        except (FileNotFoundError, ValueError):
            return {}
        return {path: f"{size} {marks}" for path, (_, size, marks) in zip(paths, states, strict=True)}
