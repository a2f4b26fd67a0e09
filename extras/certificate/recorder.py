"""Writes the hash chain while a training runs, on the rank that writes its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringspark.estimators import run_layout
from ringspark.estimators.training.checkpoint.folders import checkpoints_uri, step_uri
from ringspark.estimators.training.checkpoint.weights import COMMIT, CheckpointInfo, read_info
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.certificate.chain import Chain, Link, chain_uri, read_chain, reseal, write_chain
from ringspark.extras.certificate.claims import list_claims
from ringspark.pipelines import ShardManifest, storage

_FILES = {
    *(run_layout.IDENTITY, run_layout.CONFIG, run_layout.CHANGES, run_layout.PARALLELISM, run_layout.PRIVACY),
    *(run_layout.ENVIRONMENT, run_layout.TABLE, run_layout.SOURCE, run_layout.DATA, run_layout.HISTORY),
    *(run_layout.PROGRESS, run_layout.RESULT),
}


class Recorder:
    """The chain of one start of a training; the thread that writes checkpoints calls `add`."""

    def __init__(
        self, config: TrainConfig, objects: UserObjects, manifest: ShardManifest, device: torch.device
    ) -> None:
        self._run_uri = config.run_uri
        self._claims = list_claims(config, objects, manifest, device)
        self._chain = Chain()

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
    names = [name for name in storage.list_names(uri) if not name.startswith(".")]
    return {name: storage.sha256(storage.join(uri, name)) for name in names if name.endswith(".safetensors")}


def bind_files(run_uri: str) -> None:
    """Adds the SHA-256 of the run's files to the end of the chain. Runs on the driver, at the end."""
    *links, end = read_chain(run_uri).links
    if end.kind == "end":
        content = end.content | {"run": digest_run(run_uri, end.content["folder"])}
        write_chain(run_uri, Chain(links=tuple(links)).add("end", end.step, content))


def digest_run(run_uri: str, weights: str) -> dict[str, str]:
    """Returns the SHA-256 of each file that a resume, a report or a load reads, and the chain has not yet."""
    folders = (run_layout.STEPS, run_layout.TIMELINE)
    names = [name for name in storage.list_names(run_uri) if name in _FILES]
    names += [
        f"{each}/{name}" for each in folders for name in storage.list_names(storage.join(run_uri, each))
    ]
    return {name: storage.sha256(storage.join(run_uri, name)) for name in (*names, f"{weights}/{COMMIT}")}
