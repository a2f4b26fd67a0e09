"""The rows of a search, written once for all trials that read the same rows.

If a search has a folder, the rows stay there. A resumed search compares its DataFrame with these rows.
"""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from dataclasses import asdict

from pyspark.sql import DataFrame

from ringspark.estimators.run.identity import list_data_differences
from ringspark.estimators.stages.fit_data import FitData
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.manifest import MANIFEST_NAME
from ringspark.pipelines.writing.commit import discard_abandoned, discard_shards

# In the folder of a search: its rows.
SHARDS = "shards"


class TrialData:
    """Shards of the training rows of a search."""

    def __init__(self, dataset: DataFrame, run_uri: str | None) -> None:
        self.dataset = dataset
        self.run_uri = run_uri
        self._lock = threading.Lock()
        self._written: dict[FitData, ShardManifest] = {}

    def manifest(self, data: FitData) -> ShardManifest:
        """Returns the shards of a fit; the first call writes them. Thread-safe."""
        with self._lock:
            if data not in self._written:
                if self.run_uri is None:
                    uri = storage.join(data.root, f"{SHARDS}-{uuid.uuid4().hex[:12]}")
                    self._written[data] = data.write(self.dataset, uri)
                else:
                    self._written[data] = self._kept(data, self.run_uri)
            return self._written[data]

    def close(self) -> None:
        if self.run_uri is None:
            for manifest in self._written.values():
                discard_shards(manifest)

    def _kept(self, data: FitData, run_uri: str) -> ShardManifest:
        settings = asdict(data)
        for name in ("root", "imports"):
            settings.pop(name)
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        uri = storage.join(run_uri, f"{SHARDS}-{digest}")
        if not storage.exists(storage.join(uri, MANIFEST_NAME)):
            return data.write(self.dataset, uri)
        manifest = ShardManifest.load(uri)
        discard_abandoned(f"{uri}-")
        # Another driver of this search may compare its rows, too.
        again = data.write(self.dataset, f"{uri}-{uuid.uuid4().hex[:12]}")
        discard_shards(again)
        if changed := list_data_differences(manifest, again):
            raise ValueError(
                f"cannot resume the search in {run_uri!r}, because its data differ: "
                f"{'; '.join(changed[:5])}; fit the same rows, or set another runUri"
            )
        manifest.verify_files()
        return manifest
