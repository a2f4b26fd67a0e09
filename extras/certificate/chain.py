"""The hash chain of a training, `<run>/certificate/chain.json`.

A chain has three kinds of links. "start" holds the claims of one start of the ranks. "checkpoint" holds the
SHA-256 of a checkpoint's `training.json`, which holds the SHA-256 of its files. "end" holds the SHA-256 of
the final weights. Each link contains the hash of the link before it, so the last hash stands for all links.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ringspark.estimators import run_layout
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import JsonText, record, versioned

FORMAT_VERSION = 1
CHAIN = "chain.json"
SIGNATURE = "run.sig"

Kind = Literal["start", "checkpoint", "end"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link.

    Attributes:
        step: Optimizer steps before this link.
        previous: Hash of the link before; empty for the first link.
        content: The claims of a start, or the hashes of a checkpoint or of the final weights.
    """

    kind: Kind
    step: int
    previous: str
    content: dict[str, Any]
    hash: str = ""

    def digest(self) -> str:
        values = {name: value for name, value in vars(self).items() if name != "hash"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Chain(JsonText):
    links: tuple[Link, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def head(self) -> str:
        return self.links[-1].hash if self.links else ""

    @property
    def checkpoints(self) -> list[Link]:
        return [link for link in self.links if link.kind == "checkpoint"]

    def add(self, kind: Kind, step: int, content: Mapping[str, Any]) -> Chain:
        link = Link(kind=kind, step=step, previous=self.head, content=dict(content))
        return Chain(links=(*self.links, replace(link, hash=link.digest())))

    def find_start(self, step: int) -> Link:
        """Returns the start that trained the last step up to `step`; for step 0, the first start."""
        starts = [link for link in self.links if link.kind == "start"]
        if not starts:
            raise ValueError("the hash chain has no start; it is damaged, or was not written by a training")
        return next((link for link in reversed(starts) if link.step < step), starts[0])


def reseal(links: Sequence[Link]) -> Chain:
    """Returns a chain with the contents of `links` and correct hashes."""
    chain = Chain()
    for link in links:
        chain = chain.add(link.kind, link.step, link.content)
    return chain


def chain_uri(run_uri: str) -> str:
    return storage.join(run_uri, run_layout.CERTIFICATE, CHAIN)


def read_chain(run_uri: str) -> Chain:
    """Returns the chain of a run. Raises ValueError if the run has none, or if it is damaged."""
    uri = chain_uri(storage.normalize(run_uri))
    if not storage.exists(uri):
        raise ValueError(f"{run_uri} has no hash chain; train with certify=True")
    try:
        return record(Chain, versioned(storage.read_bytes(uri), FORMAT_VERSION, allow_nan=True))
    except ValueError as error:
        raise ValueError(f"{uri} is damaged: {error}; take another copy of the run") from error


def write_chain(run_uri: str, chain: Chain) -> None:
    storage.write_atomic(chain_uri(run_uri), chain.to_json().encode())


def find_breaks(chain: Chain) -> list[str]:
    """Returns one sentence per link whose hash, order or claim does not fit the links before it."""
    found, previous, step = [], "", -1
    if not chain.links or chain.links[0].kind != "start":
        found.append("The chain does not begin with a start of the training.")
    for number, link in enumerate(chain.links):
        name = f"Link {number} ({link.kind}, step {link.step})"
        if link.previous != previous or link.hash != link.digest():
            found.append(f"{name} does not have the hash of its content and of the link before it.")
        if link.kind == "checkpoint":
            if link.step <= step:
                found.append(f"{name} is not after the checkpoint of step {step}.")
            step = link.step
        previous = link.hash
    return found
