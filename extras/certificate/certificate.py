"""The certificate of a run: its hash chain, and the signature over its folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ringspark.estimators import run_layout
from ringspark.extras.certificate.chain import SIGNATURE, Chain, find_breaks, read_chain
from ringspark.pipelines import storage


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The hash chain of a run, and the file of its signature if it is signed.

    `head` is the hash of the last link. Publish it: nobody can change the chain afterwards.
    """

    run_uri: str
    chain: Chain
    signature: str | None

    @property
    def head(self) -> str:
        return self.chain.head

    @property
    def claims(self) -> dict[str, Any]:
        """Settings, data, code and versions of the last start."""
        return [link for link in self.chain.links if link.kind == "start"][-1].content

    def __str__(self) -> str:
        steps = [link.step for link in self.chain.checkpoints]
        signed = "not signed" if self.signature is None else f"signed in {self.signature}"
        return (
            f"{len(self.chain.links)} links, {len(steps)} checkpoints of steps {steps[0]} to {steps[-1]}, "
            f"head {self.head}, {signed}"
        )


def certify(run_uri: str, key: str | os.PathLike[str] | None = None) -> Certificate:
    """Returns the certificate of a run that was trained with `certify=True`, and signs the run's folder.

    Args:
        run_uri: Folder of the run.
        key: Private EC key as a PEM file; None leaves a present signature alone.

    Raises:
        ValueError: The run has no chain or a broken one, or a signature is not possible.
    """
    uri = storage.normalize(run_uri)
    chain = read_chain(uri)
    if breaks := find_breaks(chain):
        raise ValueError(f"the hash chain of {uri} is broken: {breaks[0]} Take another copy of the run")
    if key is not None:
        if chain.links[-1].kind != "end":
            raise ValueError(f"the training in {uri} has not finished; sign it after its end")
        sign_run(uri, key)
    path = storage.join(uri, run_layout.CERTIFICATE, SIGNATURE)
    return Certificate(run_uri=uri, chain=chain, signature=path if storage.exists(path) else None)


def sign_run(uri: str, key: str | os.PathLike[str]) -> None:
    """Signs all files of a run's folder by OpenSSF model-signing."""
    signing, hashing = _load_library("signing"), _load_library("hashing")
    folder = _local_folder(uri)
    signature = folder / run_layout.CERTIFICATE / SIGNATURE
    config = hashing.Config().set_ignored_paths(paths=[f"{run_layout.CERTIFICATE}/{SIGNATURE}"])
    try:
        signer = signing.Config().use_elliptic_key_signer(private_key=Path(key))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{key} is no private EC key in PEM form ({error}); give another key") from error
    signer.set_hashing_config(config).sign(folder, signature)


def check_signature(uri: str, key: str | os.PathLike[str]) -> str:
    """Returns a sentence if the run's signature is not by the public key `key`, or if a file differs."""
    verifying, folder = _load_library("verifying"), _local_folder(uri)
    signature = folder / run_layout.CERTIFICATE / SIGNATURE
    if not signature.exists():
        return f"The run has no signature {run_layout.CERTIFICATE}/{SIGNATURE}."
    try:
        verifying.Config().use_elliptic_key_verifier(public_key=Path(key)).verify(folder, signature)
    except FileNotFoundError:
        raise
    except Exception as error:  # the library and cryptography raise exceptions of several types
        return f"The signature does not hold: {error or type(error).__name__}."
    return ""


def _load_library(name: str) -> Any:
    try:
        return import_module(f"model_signing.{name}")
    except ImportError as error:
        raise ImportError(
            "a signature needs the package model-signing; pip install 'ringspark[certificate]'"
        ) from error


def _local_folder(uri: str) -> Path:
    if not storage.is_local(uri):
        raise ValueError(f"model-signing reads local files, got {uri}; copy the run to a local folder")
    return Path(uri)
