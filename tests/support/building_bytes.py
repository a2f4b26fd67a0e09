"""Peak bytes of tensors while the driver checks a network, and while the ranks build it."""

from functools import partial

import torch
from peak_memory import peak_bytes
from ranks import run_ranks

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.rank_network import RankNetwork
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.pipelines import ShardManifest


def driver_bytes(config: TrainConfig, objects: UserObjects) -> int:
    """Returns the peak of the driver's checks before a gang starts, without a module in `objects`."""
    manifest = ShardManifest.load(config.shards_uri)
    check_training(config, objects, manifest)  # torch keeps some tensors after first calls
    return peak_bytes(lambda: check_training(config, objects, manifest))


def rank_bytes(config: TrainConfig, objects: UserObjects) -> list[int]:
    """Returns each rank's peak until its first step: building, sharding, and sending initial weights."""
    work = partial(_building, config, objects)
    return run_ranks(config.num_workers, config.collective, work, timeout_seconds=300)


def _building(config: TrainConfig, objects: UserObjects, collective: Collective) -> int:
    manifest, mesh = ShardManifest.load(config.shards_uri), RankMesh.of(collective, config.axes)

    def build() -> RankNetwork:
        network = RankNetwork(config, objects, manifest, mesh, torch.device("cpu"), Status())
        network.build()
        network.shard()
        network.recompute()
        network.wrap()
        return network

    return peak_bytes(build)
