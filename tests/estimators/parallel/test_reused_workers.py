"""Processes that train again with other ranks, as Spark's reused Python workers do."""

import multiprocessing
import secrets
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from small_training import columns_of, config_of, weights_of

from ringspark.estimators import user_code
from ringspark.estimators.collectives import RendezvousInfo
from ringspark.estimators.collectives.torch_collective import TorchCollective
from ringspark.estimators.launch import local
from ringspark.estimators.launch.gang_task import assign_ranks, work_and_leave
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.launch.train_task import TrainTask
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

# The last bias has one element, so only one rank holds it.
SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [16, 6, 16], "out_features": 1, "dropout": 0.0})
ZERO = {"sync": Zero(stage=3), "checkpoint_every_steps": 2}


def _rank_in_turn(
    process: int, infos: Sequence[RendezvousInfo], tasks: Sequence[TrainTask]
) -> list[tuple[int, str]]:
    """Trains each task with the next rank; returns ranks and results."""
    size, results = tasks[0].config.num_workers, []
    for turn, (info, task) in enumerate(zip(infos, tasks, strict=True)):
        member = assign_ranks(["127.0.0.1"] * size)[(process + turn) % size]
        collective = TorchCollective.connect(member, info)
        results.append((member.rank, work_and_leave(collective, task, "cpu", Status())))
    return results


def _train_in_reused_processes(configs: Sequence[TrainConfig]) -> list[TrainResult]:
    """Trains in the same processes, which change their ranks; returns rank 0's results."""
    manifest, objects = ShardManifest.load(configs[0].shards_uri), UserObjects()
    checked = [check_training(config, objects, manifest).config for config in configs]
    tasks = [TrainTask(config=config, objects=user_code.dumps(objects)) for config in checked]
    size, secret = configs[0].num_workers, secrets.token_bytes(32)
    opened = [TorchCollective.open_rendezvous(assign_ranks(["127.0.0.1"] * size)[0], secret) for _ in tasks]
    infos = [RendezvousInfo(address=r.address, secret=secret, timeout_seconds=60.0) for r in opened]
    try:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(local._PRELOADED)
        with ProcessPoolExecutor(size, context) as pool:
            futures = [pool.submit(_rank_in_turn, process, infos, tasks) for process in range(size)]
            texts = [future.result() for future in futures]
    finally:
        for rendezvous in opened:
            rendezvous.close()
    first = [dict(by_rank)[0] for by_rank in zip(*texts, strict=True)]
    return [TrainResult.from_json(text) for text in first]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"num_workers": 2, **ZERO}, id="zero3"),
        pytest.param({"num_workers": 2, "parallelism": {"tensor": 2}}, id="tensor"),
        pytest.param({"num_workers": 2, "parallelism": {"pipeline": 2}}, id="pipeline"),
        pytest.param({"num_workers": 2, "parallelism": {"shard": 2}, "sync": Zero(stage=2)}, id="shard"),
        pytest.param({"num_workers": 4, "parallelism": {"data": 2, "shard": 2}, **ZERO}, id="hybrid"),
        pytest.param({"num_workers": 4, "parallelism": {"data": 2, "tensor": 2}, **ZERO}, id="zero3-tensor"),
    ],
)
def test_a_process_with_another_rank_trains_the_same_weights(make_shards, tmp_path, changes):
    manifest = make_shards(columns_of(96))

    def config(name: str, **changes: Any) -> TrainConfig:
        return config_of(manifest, tmp_path / name, model=SPEC.to_json(), optimizer="momentum", **changes)

    expected = weights_of(train_here(config("one")), SPEC.build())
    turns = [config(f"turn {turn}", collective="torch", **changes) for turn in range(2)]
    results = _train_in_reused_processes(turns)
    for result in results:
        assert (weights_of(result, SPEC.build()) - expected).abs().max() < 1e-5
