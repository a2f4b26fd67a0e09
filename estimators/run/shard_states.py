"""Whether a run's shards are still those that it began with, whenever its workers start again.

Shards hold the digest of every file, and no reader can afford to compute it. What a file system or a store
tells of a file, its time or its version, says which files were touched since the run began; these alone are
read whole and compared with their digests. A copy of the shards elsewhere is touched, and so is read once.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

from ringspark.estimators import run_layout
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.manifest import MANIFEST_NAME
from ringspark.pipelines.reuse.source_files import path_states
from ringspark.pipelines.typed_json import fit, parse


class ShardStates:
    """The states of the files of `manifest`, known to the run in `run_uri`. Runs on the driver."""

    def __init__(self, manifest: ShardManifest, run_uri: str) -> None:
        self._manifest = manifest
        self._uri = storage.join(run_uri, run_layout.SHARD_STATES)

    def note(self) -> None:
        """Writes down the states, or checks the files where they were written down before.

        Raises:
            ValueError: See `check`.
        """
        if storage.exists(self._uri):
            self.check()
            return
        storage.write_atomic(self._uri, json.dumps(self._states()).encode())

    def check(self) -> None:
        """Reads what was touched since, and compares it with what was written.

        Raises:
            ValueError: Files hold other bytes than were written, or are missing; names them. Or the manifest,
                which every worker reads again, says something else than it did.
        """
        # As text: of two NaN among the statistics, neither is the other's equal.
        if ShardManifest.load(self._manifest.uri).to_json() != self._manifest.to_json():
            raise ValueError(
                f"{storage.join(self._manifest.uri, MANIFEST_NAME)!r} changed during the training; put back "
                "what it was, or train these shards in a run of their own"
            )
        known = self._known()
        now = self._states()
        touched = [file for file in self._manifest.files if known.get(file.path) != now.get(file.path)]
        if touched:
            replace(self._manifest, files=tuple(touched)).verify()

    def _known(self) -> dict[str, str]:
        """The states written down; what cannot be read as such is none, and its file is read whole."""
        with suppress(FileNotFoundError, ValueError):
            states: dict[str, str] = fit(
                dict[str, str], parse(storage.read_bytes(self._uri)), run_layout.SHARD_STATES
            )
            return states
        return {}

    def _states(self) -> dict[str, str]:
        """Path of each file in the shards' folder -> what changes with its bytes; empty if nobody can tell.

        A file that is missing is `check`'s to name.
        """
        paths = [file.path for file in self._manifest.files]
        try:
            states = path_states([storage.join(self._manifest.uri, path) for path in paths])
        except (FileNotFoundError, ValueError):
            return {}
        return {path: f"{size} {marks}" for path, (_, size, marks) in zip(paths, states, strict=True)}
