"""Weights on a store: safetensors + JSON in one folder, the JSON written last.

    checkpoint/
      model.safetensors   the state dict; nothing in it can run code
      checkpoint.json     format version, tensor count, bytes, epoch and step: its presence commits

Weights are streamed out and mapped in (see `tensor_file`): the size is bounded by the disk only.
A file that is there is never written into, a new one takes its place: whoever has mapped the old one
keeps it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import torch
from torch import nn

from ringspark.estimators.parallel.optimizer_state import part_of
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.models.skeleton import fill
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import NewerFormatError, record, versioned

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
COMMIT = "checkpoint.json"


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """The committed record of a checkpoint; `checkpoint_id` tells it from any other.

    Attributes:
        training_sha256: Of `training.json` beside it, None where there are weights only.
    """

    epoch: int
    step: int
    num_bytes: int
    num_tensors: int
    checkpoint_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    format_version: int = FORMAT_VERSION
    training_sha256: str | None = None


def save_checkpoint(uri: str, module: nn.Module, *, epoch: int = 0, step: int = 0) -> CheckpointInfo:
    """Writes the module's state dict to the folder `uri`; a reader sees all of it or none.

    Runs on rank 0, while the other ranks run `assist_checkpoint`: of weights that are cut over the ranks
    it gets the others' parts from them.

    Raises:
        ValueError: The state dict holds something else than dense tensors of numbers.
    """
    state = module.state_dict()
    with replacing(uri, WEIGHTS) as target:
        num_bytes = tensor_file.write(state, target)
    info = CheckpointInfo(epoch=epoch, step=step, num_bytes=num_bytes, num_tensors=len(state))
    commit_checkpoint(uri, info)
    return info


def commit_checkpoint(uri: str, info: CheckpointInfo) -> None:
    """Makes the files in folder `uri` a checkpoint, atomically."""
    storage.write_atomic(storage.join(uri, COMMIT), json.dumps(asdict(info)).encode())


def assist_checkpoint(module: nn.Module) -> None:
    """What the other ranks do while rank 0 runs `save_checkpoint` on its copy or part of the module."""
    tensor_file.assist(module.state_dict())


@contextmanager
def replacing(uri: str, name: str) -> Iterator[IO[bytes]]:
    """A file to write; when it is complete, it takes the place of `name` in the folder `uri`."""
    storage.make_dirs(uri)
    if not storage.is_local(uri):
        # A store keeps what is there until the new object is complete.
        with storage.open_file(storage.join(uri, name), "wb") as file:
            yield file
        return
    # Never into the old file: a process that has mapped it would be killed, or read the new numbers.
    temporary = os.path.join(uri, f".{name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, os.path.join(uri, name))
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_info(uri: str) -> CheckpointInfo:
    """The record of the checkpoint in folder `uri`.

    Raises:
        ValueError: There is none, it is damaged, or a newer version of the format wrote it.
    """
    commit = storage.join(uri, COMMIT)
    if not storage.exists(commit):
        raise ValueError(f"{uri} holds no checkpoint ({COMMIT} is missing); give the folder that a fit wrote")
    return parse_info(storage.read_bytes(commit), uri)


def parse_info(text: bytes, uri: str) -> CheckpointInfo:
    """The record from the bytes of its file.

    Raises:
        ValueError: They are damaged, or a newer version of the format wrote them.
    """
    try:
        return record(CheckpointInfo, versioned(text, FORMAT_VERSION))
    except NewerFormatError as error:
        raise ValueError(f"{uri}/{COMMIT} cannot be read: {error}") from None
    except ValueError as error:
        raise ValueError(f"{uri}/{COMMIT} is damaged ({error}); take another checkpoint") from error


def load_checkpoint(uri: str, module: nn.Module, device: str = "cpu") -> CheckpointInfo:
    """Copies the checkpoint in folder `uri` into the module's own tensors.

    Raises:
        ValueError: No checkpoint, a damaged file, or tensors that are not this module's.
    """
    info = read_info(uri)
    with weights_file(uri) as path:
        state = _read(uri, path, info, device)
        for name, own in module.state_dict().items():
            if hasattr(own, "full_tensor") and name in state and state[name].shape == own.shape:
                # Cut over the ranks: each takes its part of the file.
                state[name] = part_of(state[name], own)
        with _of_this_model(uri):
            module.load_state_dict(state)
    return info


def map_checkpoint(
    uri: str,
    module: nn.Module,
    device: str = "cpu",
    cache: str | None = None,
    expected_id: str | None = None,
) -> CheckpointInfo:
    """Makes the tensors of the checkpoint in folder `uri` the module's own; on the CPU nothing is copied.

    Args:
        uri: A local folder is mapped where it is; from another store the file is copied first.
        module: May be a skeleton. What no checkpoint holds stays where it is, so it goes to `device` too.
        device: Where the module is afterwards.
        cache: Local folder for that copy, which processes then share and its owner removes; without it
            the copy is this process's own and vanishes with it.
        expected_id: The `checkpoint_id` that the folder had when it was looked at last; None takes what
            is there.

    Raises:
        ValueError: No checkpoint, a damaged file, or tensors that are not this module's; or the folder
            holds another checkpoint than the expected one.
    """
    info = read_info(uri)
    if expected_id is not None and info.checkpoint_id != expected_id:
        raise _replaced(uri)
    with weights_file(uri, info, cache) as path:
        state = _read(uri, path, info, device)
        # Record and tensors are two files: the folder may have been replaced between them.
        _check_still(uri, info)
        with _of_this_model(uri):
            fill(module, state)
    if device != "cpu":
        module.to(device)
    return info


@contextmanager
def weights_file(uri: str, info: CheckpointInfo | None = None, cache: str | None = None) -> Iterator[str]:
    """A local path of the checkpoint's tensors; may be gone afterwards, what was mapped stays."""
    if cache is not None and info is not None and not storage.is_local(uri):
        yield _shared_copy(uri, info, cache)
        return
    with local_file(uri, WEIGHTS) as path:
        yield path


@contextmanager
def local_file(uri: str, name: str) -> Iterator[str]:
    """A local path of the file `name` in folder `uri`; a copy is gone afterwards, what was mapped stays."""
    if storage.is_local(uri):
        storage.check_inside(uri, name)
        yield os.path.join(uri, name)
        return
    with tempfile.TemporaryDirectory(prefix="ringspark-") as folder:
        path = os.path.join(folder, name)
        _download(storage.join(uri, name), path)
        yield path


def _shared_copy(uri: str, info: CheckpointInfo, cache: str) -> str:
    """The copy that the processes with this cache folder share; the first one to come makes it."""
    import fcntl

    path = os.path.join(cache, f"ringspark-{info.checkpoint_id}.safetensors")
    with open(f"{path}.lock", "wb") as lock:
        # Released when the file is closed, also by the death of the process.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            _download(storage.join(uri, WEIGHTS), f"{path}.part")
            # The copy serves under this id from now on.
            _check_still(uri, info)
            os.replace(f"{path}.part", path)
    return path


def _check_still(uri: str, info: CheckpointInfo) -> None:
    """Refuses a folder that another checkpoint has been put in since `info` was read."""
    if read_info(uri).checkpoint_id != info.checkpoint_id:
        raise _replaced(uri)


def _replaced(uri: str) -> ValueError:
    return ValueError(f"{uri} holds the weights of another model by now; load the model again")


def _download(uri: str, path: str) -> None:
    with storage.open_file(uri, "rb") as source, open(path, "wb") as target:
        shutil.copyfileobj(source, target, tensor_file.BLOCK_BYTES)


def _read(uri: str, path: str, info: CheckpointInfo, device: str) -> dict[str, torch.Tensor]:
    if not os.path.exists(path):
        raise ValueError(f"{uri} holds no {WEIGHTS} any more; take another checkpoint")
    size = os.path.getsize(path)
    if size != info.num_bytes:
        raise ValueError(
            f"{uri}/{WEIGHTS} has {size} bytes, {info.num_bytes} were written; "
            "the file is damaged, take another checkpoint"
        )
    return tensor_file.read(path, device)


@contextmanager
def _of_this_model(uri: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # torch puts each difference on a line of its own.
        differences = " ".join(str(error).split())
        raise ValueError(
            f"the checkpoint {uri} is not of this model: {differences}; take the model that it was made of"
        ) from error
