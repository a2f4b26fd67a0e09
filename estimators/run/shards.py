"""The shards of a run: written once, read again by a resume, and checked at every restart.

A DataFrame may return its rows in another order each time, so a resume reads the shards of the first start.
The resume also writes new shards, and compares them with the first shards.
"""

from __future__ import annotations

import json
import logging
import uuid
from contextlib import suppress
from dataclasses import replace

from pyspark.sql import DataFrame

from ringspark.estimators import run_layout
from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.run.identity import list_data_differences
from ringspark.estimators.stages.fit_data import FitData
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.manifest import MANIFEST_NAME
from ringspark.pipelines.table_files import path_states
from ringspark.pipelines.typed_json import fit, parse
from ringspark.pipelines.writing.commit import discard_abandoned, discard_shards

_logger = logging.getLogger(__name__)


def run_shards(dataset: DataFrame, data: FitData, run: RunFolder) -> ShardManifest:
    """Returns the run's shards, which it writes if there are none."""
    uri = storage.join(run.uri, run_layout.SHARDS)
    if run.identity() is None:
        return data.write(dataset, uri)
    if not storage.exists(storage.join(uri, MANIFEST_NAME)):
        raise run.refusal(["data: shards given to fitOnShards -> a DataFrame"])
    manifest = ShardManifest.load(uri)
    prefix = storage.join(run.uri, f"{run_layout.SHARDS}-")
    discard_abandoned(prefix)
    written = data.write(dataset, f"{prefix}{uuid.uuid4().hex[:12]}")
    discard_shards(written)
    if changed := list_data_differences(manifest, written):
        raise run.refusal(changed[:5])
    if _digests(manifest) != _digests(written):
        _logger.warning(
            "the DataFrame has the same counts and statistics as the run in %r, but its files differ: the "
            "rows came in another order, or changed without changing the statistics; the training continues "
            "with the rows that the run wrote first",
            run.uri,
        )
    if run.result() is None or run.has_checkpoint():
        manifest.verify_files()
    return manifest


def _digests(manifest: ShardManifest) -> list[tuple[str, str]]:
    return sorted((file.split, file.sha256) for file in manifest.files)


class ShardStates:
    """The recorded times or versions of a manifest's files. Runs on the driver."""

    def __init__(self, manifest: ShardManifest, run_uri: str) -> None:
        self._manifest = manifest
        self._uri = storage.join(run_uri, run_layout.SHARD_STATES)

    def record(self) -> None:
        """Records the states; if they were recorded before, calls `check` instead."""
        if storage.exists(self._uri):
            self.check()
            return
        storage.write_atomic(self._uri, json.dumps(self._states()).encode())

    def check(self) -> None:
        """Raises ValueError if the manifest or a file has changed; reads files of another time or version."""
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
        elif self._manifest.file_columns is not None:
            self._manifest.verify_files()  # also compares the table's files

    def _states(self) -> dict[str, str]:
        """Returns path -> text that changes with the file; empty if the store has no such text."""
        paths = [file.path for file in self._manifest.files]
        try:
            folder = storage.normalize(self._manifest.files_uri)
            states = path_states([storage.join(folder, path) for path in paths])
        except (FileNotFoundError, ValueError):
            return {}
        return {path: f"{size} {marks}" for path, (_, size, marks) in zip(paths, states, strict=True)}
