"""Weights on a store: safetensors + JSON in one folder, the JSON written last.

    checkpoint/
      model.safetensors   the state dict; nothing in it can run code
      checkpoint.json     format version, tensor count, bytes, epoch and step: its presence commits

Weights are streamed through a local temporary file, so the size is bounded by the disk only.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ringspark.pipelines import storage

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
COMMIT = "checkpoint.json"


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """The committed record of a checkpoint; `checkpoint_id` tells it from any other."""

    epoch: int
    step: int
    num_bytes: int
    num_tensors: int
    checkpoint_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    format_version: int = FORMAT_VERSION


def save_checkpoint(uri: str, module: nn.Module, *, epoch: int = 0, step: int = 0) -> CheckpointInfo:
    """Writes the module's state dict to the folder `uri`; a reader sees all of it or none."""
    # safetensors refuses tensors that share memory: tied weights are stored once per name.
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in module.state_dict().items()}
    with tempfile.TemporaryDirectory(prefix="ringspark-") as folder:
        path = Path(folder) / WEIGHTS
        save_file(state, path)
        num_bytes = path.stat().st_size
        storage.make_dirs(uri)
        with path.open("rb") as source, storage.open_file(storage.join(uri, WEIGHTS), "wb") as target:
            shutil.copyfileobj(source, target, 16 << 20)
    info = CheckpointInfo(epoch=epoch, step=step, num_bytes=num_bytes, num_tensors=len(state))
    storage.write_atomic(storage.join(uri, COMMIT), json.dumps(asdict(info)).encode())
    return info


def read_info(uri: str) -> CheckpointInfo:
    """The record of the checkpoint in folder `uri`.

    Raises:
        ValueError: There is none, or a newer version of the format wrote it.
    """
    commit = storage.join(uri, COMMIT)
    if not storage.exists(commit):
        raise ValueError(f"{uri} holds no checkpoint ({COMMIT} is missing); give the folder that a fit wrote")
    values = json.loads(storage.read_bytes(commit))
    if values["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"{uri} has checkpoint format {values['format_version']}, this ringspark reads up to "
            f"{FORMAT_VERSION}; upgrade ringspark"
        )
    return CheckpointInfo(**values)


def load_checkpoint(uri: str, module: nn.Module, device: str = "cpu") -> CheckpointInfo:
    """Fills the module from the checkpoint in folder `uri`.

    Raises:
        ValueError: No checkpoint, a damaged file, or tensors that are not this module's.
    """
    info = read_info(uri)
    with tempfile.TemporaryDirectory(prefix="ringspark-") as folder:
        path = Path(folder) / WEIGHTS
        with storage.open_file(storage.join(uri, WEIGHTS), "rb") as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, 16 << 20)
        if path.stat().st_size != info.num_bytes:
            raise ValueError(
                f"{uri}/{WEIGHTS} has {path.stat().st_size} bytes, {info.num_bytes} were written; "
                "the file is damaged, take another checkpoint"
            )
        state: dict[str, torch.Tensor] = load_file(path, device=device)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint {uri} is not of this model: {error}") from error
    return info
