"""Writes the hash chain while a training runs, on the rank that writes its checkpoints."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import torch

from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.folders import checkpoints_uri, step_uri
from ringspark.estimators.training.checkpoint.weights import CheckpointInfo, read_info
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.certificate.chain import Chain, Link, chain_uri, read_chain, reseal, write_chain
from ringspark.extras.certificate.claims import list_claims
from ringspark.pipelines import ShardManifest, storage


class Recorder:
    """The chain of one start of a training; the thread that writes checkpoints calls `add`."""

    def __init__(
        self, config: TrainConfig, objects: UserObjects, manifest: ShardManifest, device: torch.device
    ) -> None:
        self._run_uri = config.run_uri
        self._claims = list_claims(config, objects, manifest, device)
        self._chain = Chain()
        self._lock = threading.Lock()

    def start(self, step: int | None) -> None:
        """Adds a start from the checkpoint of `step`, or from the initial weights if there is none.

        Drops links of later steps. A driver that was killed between a checkpoint and its link left a
        checkpoint without a link; the resume has just checked its hashes.
        """
        has_chain = step is not None and storage.exists(chain_uri(self._run_uri))
        links = _list_before(read_chain(self._run_uri).links, step or 0) if has_chain else []
        self._chain = reseal(links)
        known = [link.step for link in self._chain.checkpoints]
        if step is not None and (not known or known[-1] < step):
            if not links:  # the run was not certified before
                self._chain = self._chain.add("start", step, self._claims)
            self.add(read_info(step_uri(checkpoints_uri(self._run_uri), step)))
        self._write(self._chain.add("start", step or 0, self._claims))

    def add(self, info: CheckpointInfo) -> None:
        """Adds a committed checkpoint."""
        content = {"epoch": info.epoch, "training_sha256": info.training_sha256}
        self._write(self._chain.add("checkpoint", info.step, content))

    def end(self, weights_uri: str) -> None:
        """Adds the final weights, in a folder of the run."""
        folder, step = weights_uri.rpartition("/")[2], read_info(weights_uri).step
        content = {"folder": folder, "files": digest_weights(weights_uri)}
        self._write(self._chain.add("end", step, content))

    def _write(self, chain: Chain) -> None:
        with self._lock:
            write_chain(self._run_uri, chain)
            self._chain = chain


def _list_before(links: Sequence[Link], step: int) -> list[Link]:
    """Returns the links of everything that led to the checkpoint of `step`."""
    kept = [
        link
        for link in links
        if (link.kind == "checkpoint" and link.step <= step) or (link.kind == "start" and link.step < step)
    ]
    if step == 0:
        kept = [*links[:1], *kept]
    return kept


def digest_weights(uri: str) -> dict[str, str]:
    """Returns the SHA-256 of each file of tensors in the folder `uri`."""
    found = {}
    for name in sorted(storage.list_names(uri)):
        if name.endswith(".safetensors") and not name.startswith("."):
            digest = hashlib.sha256()
            with storage.open_file(storage.join(uri, name)) as file:
                while block := file.read(tensor_file.BLOCK_BYTES):
                    digest.update(block)
            found[name] = digest.hexdigest()
    return found
