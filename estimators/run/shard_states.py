"""Checks, whenever a run's workers start again, that its shards are still those that it began with.

The manifest holds the digest of every file, but no reader can afford to compute it. A file's time or version,
from the file system or the store, says whether it was touched since the run began. Only touched files are
read whole and compared with their digests. A copy of the shards elsewhere counts as touched and is read once.
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
    """States of the files of `manifest`, as noted in the run in `run_uri`. Runs on the driver."""

    def __init__(self, manifest: ShardManifest, run_uri: str) -> None:
        self._manifest = manifest
        self._uri = storage.join(run_uri, run_layout.SHARD_STATES)

    def note(self) -> None:
        """Notes the states; if they were noted before, checks the files instead.

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
            ValueError: Files hold other bytes than were written, or are missing; the message names them. Or
                the manifest, which every worker reads again, has changed.
        """
        # Compared as text, because a NaN among the statistics does not equal itself.
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
        """Returns the noted states; none if they cannot be read, and then every file is read whole."""
        with suppress(FileNotFoundError, ValueError):
            states: dict[str, str] = fit(
                dict[str, str], parse(storage.read_bytes(self._uri)), run_layout.SHARD_STATES
            )
            return states
        return {}

    def _states(self) -> dict[str, str]:
        """Returns path -> text that changes with the file's bytes; empty if the store tells nothing.

        It is also empty if a file is missing, which `check` names.
        """
        paths = [file.path for file in self._manifest.files]
        try:
            folder = storage.normalize(self._manifest.files_uri)
            states = path_states([storage.join(folder, path) for path in paths])
        except (FileNotFoundError, ValueError):
            return {}
        return {path: f"{size} {marks}" for path, (_, size, marks) in zip(paths, states, strict=True)}
