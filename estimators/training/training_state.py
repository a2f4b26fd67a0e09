"""A training as it stands, to go on from at any number of ranks and under any sharding.

    folder/
      optimizer.safetensors   the whole optimizer state: "<parameter>/<key>" -> tensor
      training.json           its plain numbers, and the step it is of
      model.safetensors       the weights, a checkpoint like any other;
      checkpoint.json         written last, so its presence commits

Invariant: what is written does not depend on the number of ranks or on what each of them holds, up to the
order of additions. Nothing in the files can run code.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from ringspark.estimators.collectives import GradientSync
from ringspark.estimators.training import safetensors_file
from ringspark.estimators.training.checkpoint import (
    CheckpointInfo,
    assist_checkpoint,
    load_checkpoint,
    read_info,
    replacing,
    save_checkpoint,
)
from ringspark.estimators.training.optimizer_state import OptimizerState, StateValue
from ringspark.pipelines import storage

OPTIMIZER = "optimizer.safetensors"
RECORD = "training.json"


@dataclass(frozen=True, kw_only=True)
class _Record:
    """What the JSON file holds.

    Attributes:
        values: Parameter -> key -> what is no tensor.
        num_bytes: Of the optimizer's file.
    """

    step: int
    num_bytes: int
    values: dict[str, dict[str, StateValue]]


def save_training_state(uri: str, sync: GradientSync, *, rank: int, epoch: int = 0, step: int = 0) -> None:
    """Writes weights and optimizer state to the folder `uri`; rank 0 does. Runs on every rank.

    Raises:
        ValueError: The network or the optimizer keeps something that cannot be saved.
    """
    state = sync.optimizer_state()
    if rank:
        assist_checkpoint(sync.network)
        return
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, StateValue]] = {}
    for name, own in state.items():
        values[name] = {}
        for key, value in own.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{key}"] = value
            else:
                values[name][key] = value
    with replacing(uri, OPTIMIZER) as target:
        num_bytes = safetensors_file.write(tensors, target)
    record = _Record(step=step, num_bytes=num_bytes, values=values)
    storage.write_atomic(storage.join(uri, RECORD), json.dumps(asdict(record)).encode())
    save_checkpoint(uri, sync.network, epoch=epoch, step=step)


def load_training_state(uri: str, sync: GradientSync) -> CheckpointInfo:
    """Puts weights and optimizer state of the folder `uri` in the place of this rank's. Runs on every rank.

    Raises:
        ValueError: There is none, it is damaged, or it is of another network.
    """
    if not storage.exists(storage.join(uri, RECORD)):
        raise ValueError(f"{uri} holds no training state ({RECORD} is missing); give one that was saved")
    info = read_info(uri)
    try:
        record = _Record(**json.loads(storage.read_bytes(storage.join(uri, RECORD))))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{uri}/{RECORD} is damaged ({error}); take another training state") from error
    if record.step != info.step:
        raise ValueError(
            f"{uri} holds the weights of step {info.step} and the optimizer state of step {record.step}; "
            "the writer was interrupted, take another training state"
        )
    with _local(uri, OPTIMIZER) as path:
        if os.path.getsize(path) != record.num_bytes:
            raise ValueError(
                f"{uri}/{OPTIMIZER} has {os.path.getsize(path)} bytes, {record.num_bytes} were written; the "
                "file is damaged, take another training state"
            )
        state: OptimizerState = {name: dict(own) for name, own in record.values.items()}
        # Mapped, not read: a rank looks at its own part only.
        for name, tensor in safetensors_file.read(path).items():
            parameter, key = name.rsplit("/", 1)
            state[parameter][key] = tensor
        sync.load_optimizer_state(state)
    return load_checkpoint(uri, sync.network)


@contextmanager
def _local(uri: str, name: str) -> Iterator[str]:
    """A local path of a file in the folder `uri`."""
    if storage.is_local(uri):
        yield os.path.join(uri, name)
        return
    with tempfile.TemporaryDirectory(prefix="ringspark-") as folder:
        path = os.path.join(folder, name)
        with storage.open_file(storage.join(uri, name), "rb") as source, open(path, "wb") as target:
            while block := source.read(safetensors_file.BLOCK_BYTES):
                target.write(block)
        yield path
