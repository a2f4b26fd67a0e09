"""`TrainTask`: the work of one rank in the form that Spark ships to the workers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ringspark.estimators import run_layout, user_code
from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.memory.pressure import check_on_rank
from ringspark.estimators.training.checkpoint.tensor_file import check_state
from ringspark.estimators.training.checkpoint.weights import map_checkpoint, save_checkpoint
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import train_worker
from ringspark.models.network_copy import weight_storages
from ringspark.pipelines import ShardManifest, storage

# Up to this size, Spark's closure holds the whole network: reading a file of a store would take longer.
CLOSURE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PackedObjects:
    """The `UserObjects` for Spark's closure, which some clients limit to 128 MiB.

    If `network` is set, `pickled` lacks its weights, which are sent through the store.
    """

    pickled: bytes
    network: nn.Module | None

    @classmethod
    def of(cls, objects: UserObjects) -> PackedObjects:
        network = objects.module
        if network is None or not _ships_through_store(network):
            return cls(pickled=user_code.dumps(objects), network=None)
        # Of all objects together, because a callback or a loss may also refer to the network.
        return cls(pickled=user_code.dumps(objects, empty=weight_storages(network)), network=network)

    def write_weights(self, run_uri: str) -> str | None:
        """Writes the weights into the run's folder and returns their URI; None if they are pickled."""
        if self.network is None:
            return None
        uri = storage.join(run_uri, run_layout.FIRST_WEIGHTS)
        save_checkpoint(uri, self.network)
        return uri


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """Trains on one rank. If `objects` lack the initial weights, the folder `weights` has them."""

    config: TrainConfig
    objects: bytes
    weights: str | None = None

    def __call__(self, collective: Collective, device: str, status: Status) -> str:
        status.phase = "loading the model"
        objects = user_code.loads(self.objects)
        status.phase = "checking the memory"
        config = check_on_rank(self.config, objects, ShardManifest.load(self.config.shards_uri), collective)
        if self.weights is not None:
            status.phase = "loading the initial weights"
            map_checkpoint(self.weights, objects.module, tick=status.tick)
        return train_worker(config, collective, objects, device, status).to_json()


def _ships_through_store(network: nn.Module) -> bool:
    # Only a large network, if a meta-device module plus a checkpoint restore all of its tensors.
    tensors = [*network.parameters(), *network.buffers()]
    if any(is_lazy(tensor) for tensor in tensors) or num_bytes(tensors) <= CLOSURE_BYTES:
        return False
    if any(type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta for tensor in tensors):
        return False
    # The file records neither memory order nor shared memory. Plain attributes may share memory as well.
    if not all(tensor.layout == torch.strided and tensor.is_contiguous() for tensor in tensors):
        return False
    plain = [v for owner in network.modules() for v in vars(owner).values() if isinstance(v, torch.Tensor)]
    filled = [tensor for tensor in (*tensors, *plain) if tensor.layout == torch.strided and tensor.numel()]
    if len({tensor.untyped_storage().data_ptr() for tensor in filled}) < len(filled):
        return False
    try:
        check_state(network.state_dict())
    except ValueError:
        return False
    return True
