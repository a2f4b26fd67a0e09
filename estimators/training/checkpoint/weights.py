"""Saves and loads weights as safetensors and JSON in one folder.

model.safetensors   the state dict, adapters merged; nothing in it can run code
adapter.safetensors the parameters that a training with `lora` trained
checkpoint.json     `CheckpointInfo`; written last, its presence commits the checkpoint
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import torch
from fsspec.spec import AbstractBufferedFile
from torch import nn

from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.optimizer_state import shard_like
from ringspark.estimators.techniques import FUNCTIONS
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.rank_zero import RankZeroSection
from ringspark.estimators.training.checkpoint.streamed_file import StreamedFile
from ringspark.models.lora import adapter_state, find_adapters, merged_state
from ringspark.models.meta_device import fill
from ringspark.pipelines import storage
from ringspark.pipelines.typed_json import OtherFormatError, record, versioned

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
ADAPTER = "adapter.safetensors"
COMMIT = "checkpoint.json"


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """The committed record of a checkpoint; `training_sha256` is None if it has only weights."""

    epoch: int
    step: int
    num_bytes: int
    num_tensors: int
    checkpoint_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    format_version: int = FORMAT_VERSION
    training_sha256: str | None = None


def save_together(
    uri: str, module: nn.Module, mesh: RankMesh, tick: Callable[[], None], *, epoch: int, step: int
) -> None:
    """Writes like `save_checkpoint`; other ranks send rank 0 their shards. Runs on every rank."""
    section = RankZeroSection(mesh, tick)
    if mesh.writes:
        save_checkpoint(uri, module, epoch=epoch, step=step, section=section)
    else:
        for state in _collect_states(module).values():
            tensor_file.write(state, None, section)
    section.end()


def save_checkpoint(
    uri: str, module: nn.Module, *, epoch: int = 0, step: int = 0, section: RankZeroSection | None = None
) -> CheckpointInfo:
    """Atomically writes the state dict to the folder `uri`; `lora` adapters also get a file of their own."""
    states, num_bytes = _collect_states(module), {}
    for name, state in states.items():
        with replacing(uri, name) as target:
            num_bytes[name] = tensor_file.write(state, target, section)
    tensors, size = len(states[WEIGHTS]), num_bytes[WEIGHTS]
    info = CheckpointInfo(epoch=epoch, step=step, num_bytes=size, num_tensors=tensors)
    commit_checkpoint(uri, info)
    return info


def _collect_states(module: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    layout = layout_of(module)
    # A stage of a pipeline may have no adapters, but every rank must collect the same files.
    is_adapted = bool(find_adapters(module)) if layout is None else layout.is_adapted
    states = {ADAPTER: adapter_state(module)} if is_adapted else {}
    states[WEIGHTS] = merged_state(module)
    if layout is not None:
        states = {name: layout.make_fetchable(state) for name, state in states.items()}
    return states


def read_adapter(uri: str) -> dict[str, torch.Tensor]:
    """Returns copies of the adapter's tensors in folder `uri`. Raises ValueError if there is none."""
    if not storage.exists(storage.join(uri, ADAPTER)):
        raise ValueError(f"{uri} holds no adapter; fit with lora={{'rank': ..., 'targets': [...]}}")
    with local_file(uri, ADAPTER) as path:
        return {name: tensor.clone() for name, tensor in tensor_file.read(path).items()}


def commit_checkpoint(uri: str, info: CheckpointInfo) -> None:
    storage.write_atomic(storage.join(uri, COMMIT), json.dumps(asdict(info)).encode())


@contextmanager
def replacing(uri: str, name: str) -> Iterator[IO[bytes]]:
    """Yields a file to write; when it is complete, it replaces `name` in the folder `uri`."""
    storage.make_dirs(uri)
    if not storage.is_local(uri):
        # An object store keeps the old object until the new one is complete.
        with storage.open_file(storage.join(uri, name), "wb") as file:
            try:
                yield file
            except BaseException:
                # fsspec would upload the part when the file is closed.
                if isinstance(file, AbstractBufferedFile):
                    with suppress(Exception):  # store clients raise exceptions of any type
                        file.discard()
                    file.closed = True
                raise
        return
    # Never into the old file: a process that has mapped it would crash or read the new numbers.
    temporary = os.path.join(uri, f".{name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, os.path.join(uri, name))
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_info(uri: str) -> CheckpointInfo:
    """Returns the record in folder `uri`. Raises ValueError if it is missing, damaged or too new."""
    commit = storage.join(uri, COMMIT)
    if not storage.exists(commit):
        raise ValueError(f"{uri} holds no checkpoint ({COMMIT} is missing); give the folder that a fit wrote")
    return parse_info(storage.read_bytes(commit), uri)


def parse_info(text: bytes, uri: str) -> CheckpointInfo:
    """Parses the content of `checkpoint.json`; error messages name its folder `uri`."""
    try:
        return record(CheckpointInfo, versioned(text, FORMAT_VERSION))
    except OtherFormatError as error:
        raise OtherFormatError(f"{uri}/{COMMIT} cannot be read: {error}") from None
    except ValueError as error:
        raise ValueError(f"{uri}/{COMMIT} is damaged ({error}); use another checkpoint") from error


def load_state(uri: str, module: nn.Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Copies the whole network's tensors into the module, which may hold only shards; messages name `uri`."""
    layout, held, state = layout_of(module), module.state_dict(), {}
    # By name: each access may join a tensor from pieces, and a rank may need only its shard.
    for name in whole:
        if layout is not None and name not in held:
            continue
        tensor = whole[name] if layout is None else layout.shard(name, whole[name])
        own = held.get(name)
        if own is not None and hasattr(own, "full_tensor") and tensor.shape == own.shape:
            # Each rank takes its own shard.
            tensor = shard_like(tensor, own)
        state[name] = tensor
        del tensor
    with _model_errors(uri):
        module.load_state_dict(state)


def map_checkpoint(
    uri: str,
    module: nn.Module,
    device: str = "cpu",
    cache: str | None = None,
    expected_id: str | None = None,
    tick: Callable[[], None] | None = None,
) -> None:
    """Replaces the module's tensors with tensors of the checkpoint `uri`, memory-mapped on the CPU.

    Args:
        module: May be a meta-device module. Non-persistent buffers also move to `device`.
        cache: Local folder for a download that processes share; its owner removes it.
        expected_id: `checkpoint_id` that the folder must have; None accepts any.
    """
    with _open_weights(uri, cache, expected_id, tick) as (info, path):
        state = tensor_file.read(path, device)
        # Record and tensors are two files; the folder may have been replaced between reading them.
        _check_id(uri, info.checkpoint_id)
        with _model_errors(uri):
            fill(module, state)
    if device != "cpu":
        module.to(device)


def stream_checkpoint(
    uri: str, module: nn.Module, device: str = "cpu", cache: str | None = None, expected_id: str | None = None
) -> None:
    """Lets the module's forward pass read each tensor of the checkpoint when it is used.

    Small tensors are read once and kept. The module is a meta-device module; see `map_checkpoint`.
    """
    with _open_weights(uri, cache, expected_id) as (info, path):
        file = StreamedFile(path)
        _check_id(uri, info.checkpoint_id)
        with _model_errors(uri):
            fill(module, file.small())
    FUNCTIONS["offload_to_disk"](module, file, device)


def map_file(path: str, module: nn.Module, uri: str) -> None:
    """Replaces the module's tensors with a local file's, on the CPU; messages call the file `uri`."""
    state = tensor_file.read(path)
    with _model_errors(uri):
        fill(module, state)


@contextmanager
def local_file(uri: str, name: str, tick: Callable[[], None] | None = None) -> Iterator[str]:
    """Yields a local path of file `name` in folder `uri`; deletes a downloaded copy at exit."""
    if storage.is_local(uri):
        storage.check_inside(uri, name)
        yield os.path.join(uri, name)
        return
    with tempfile.TemporaryDirectory(prefix="ringspark-") as folder:
        path = os.path.join(folder, name)
        _download(storage.join(uri, name), path, tick)
        yield path


@contextmanager
def _open_weights(
    uri: str, cache: str | None = None, expected_id: str | None = None, tick: Callable[[], None] | None = None
) -> Iterator[tuple[CheckpointInfo, str]]:
    """Yields the record of the checkpoint and a local path of its tensors, after checking id and size."""
    info = _check_id(uri, expected_id)
    copied = None if cache is None or storage.is_local(uri) else _shared_copy(uri, info, cache)
    with local_file(uri, WEIGHTS, tick) if copied is None else nullcontext(copied) as path:
        if not os.path.exists(path):
            raise ValueError(f"{uri} holds no {WEIGHTS}; use another checkpoint")
        size = os.path.getsize(path)
        if size != info.num_bytes:
            raise ValueError(
                f"{uri}/{WEIGHTS} has {size} bytes, but {info.num_bytes} were written; "
                "the file is damaged, use another checkpoint"
            )
        yield info, path


def _check_id(uri: str, expected_id: str | None) -> CheckpointInfo:
    """Returns the record in folder `uri`; raises ValueError if its checkpoint is not the expected one."""
    info = read_info(uri)
    if expected_id is not None and info.checkpoint_id != expected_id:
        raise ValueError(f"{uri} now has the weights of another model; load the model again")
    return info


def _shared_copy(uri: str, info: CheckpointInfo, cache: str) -> str:
    """Returns the download that all processes with this cache folder share."""
    import fcntl

    path = os.path.join(cache, f"ringspark-{info.checkpoint_id}.safetensors")
    with open(f"{path}.lock", "wb") as lock:
        # Released when the file is closed, even if the process dies.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            _download(storage.join(uri, WEIGHTS), f"{path}.part")
            # Checked before the rename: from then on, all processes use the download under this id.
            _check_id(uri, info.checkpoint_id)
            os.replace(f"{path}.part", path)
    return path


def _download(uri: str, path: str, tick: Callable[[], None] | None = None) -> None:
    with storage.open_file(uri, "rb") as source, open(path, "wb") as target:
        while block := source.read(tensor_file.BLOCK_BYTES):
            target.write(block)
            if tick is not None:
                tick()


@contextmanager
def _model_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # torch puts each difference on its own line.
        differences = " ".join(str(error).split())
        raise ValueError(
            f"the checkpoint {uri} is not of this model: {differences}; use the model that was saved"
        ) from error
