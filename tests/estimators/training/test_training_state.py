"""A training resumes from its saved state with other rank counts and shardings."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peak_memory import memory_use
from ranks import run_ranks
from registries import optimizer_names
from short_sync import sync_of
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.parallel import STRATEGIES, SyncSettings
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.shard_spec import CheckpointShards, ShardSpec
from ringspark.estimators.training.build import build_optimizer
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.reading import load_training_state, read_record
from ringspark.estimators.training.checkpoint.record import Position
from ringspark.estimators.training.checkpoint.shards import map_shards, name_files, report_shard
from ringspark.estimators.training.checkpoint.snapshot import take_snapshot, write_shard, write_snapshot
from ringspark.estimators.training.checkpoint.weights import WEIGHTS, load_state
from ringspark.estimators.training.precision import LossScaler
from ringspark.pipelines import storage

CASES = [
    ("none", "torch", "adamw"),
    ("optimizer", "horovod", "adamw"),
    ("gradients", "torch", "adamw"),
    ("gradients", "horovod", "adafactor"),
    ("parameters", "torch", "adamw"),
]


def _net() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(3, 5), nn.Sequential(*blocks), nn.BatchNorm1d(5), nn.Linear(5, 1))


def _prepare(
    collective: Collective, sharding: str, optimizer: str, module: nn.Module | None = None
) -> GradientSync:
    make = partial(build_optimizer, optimizer, groups=None, learning_rate=0.01, weight_decay=0.1)
    strategy = STRATEGIES[sync_of(sharding=sharding).strategy]
    return strategy.prepare(module or _net(), make, RankMesh.of(collective), SyncSettings())


def _steps(sync: GradientSync, collective: Collective, first: int, last: int) -> None:
    # Evaluation mode: batch statistics would depend on the rows of each rank.
    sync.network.eval()
    scaler = LossScaler("fp32", torch.device("cpu"))
    for step in range(first, last):
        rows = torch.rand(6, 3, generator=torch.Generator().manual_seed(step))
        mine = rows[collective.rank :: collective.size]
        sync.optimizer.zero_grad()
        with sync.micro_batch(last=True):
            loss = (sync.module(mine) - mine.sum(1, keepdim=True)).square().sum() / len(rows)
            (loss * sync.loss_factor).backward()  # type: ignore[no-untyped-call]
        sync.reduce()
        sync.step(scaler)


def _mesh(sharding: str, collective: Collective) -> RankMesh:
    return replace(RankMesh.of(collective), shards_state=sharding != "none")


def _write(uri: str, sync: GradientSync, step: int, mesh: RankMesh | None = None) -> None:
    snapshot = take_snapshot(sync, Position(epoch=step // 10, step=step), mesh=mesh)
    if snapshot is None:
        return
    if snapshot.shard.number:
        report_shard(uri, snapshot.shard, write_shard(uri, snapshot))
    else:
        write_snapshot(uri, snapshot)


def _save(sharding: str, optimizer: str, uri: str, collective: Collective) -> None:
    sync = _prepare(collective, sharding, optimizer)
    _steps(sync, collective, 0, 10)
    _write(uri, sync, 10, _mesh(sharding, collective))


def _resume(sharding: str, optimizer: str, uri: str, target: str, collective: Collective) -> Any:
    sync = _prepare(collective, sharding, optimizer)
    with torch.no_grad():
        for parameter in sync.network.parameters():
            parameter.mul_(0.0)
    record, _ = load_training_state(uri, sync)
    _steps(sync, collective, record.position.step, 20)
    _write(target, sync, 20, _mesh(sharding, collective))
    return [record.position.epoch, record.position.step]


def _both(
    sharding: str, optimizer: str, saved_to: str, resumed_from: str, target: str, collective: Collective
) -> Any:
    """Trains and saves ten steps, then resumes another training for the last ten."""
    _save(sharding, optimizer, saved_to, collective)
    return _resume(sharding, optimizer, resumed_from, target, collective)


def _weights(uri: str) -> torch.Tensor:
    record = read_record(uri)
    names = name_files(WEIGHTS, record.num_parts, record.token)
    tensors = map_shards([f"{uri}/{name}" for name in names], {})
    return torch.cat([tensors[name].flatten() for name, _ in _net().named_parameters()])


def _whole_run(optimizer: str) -> torch.Tensor:
    local = LocalCollective()
    sync = _prepare(local, "none", optimizer)
    _steps(sync, local, 0, 20)
    return torch.cat([p.detach().flatten() for p in sync.network.parameters()])


@pytest.mark.telling
@pytest.mark.extras
@pytest.mark.distributed
@pytest.mark.parametrize(("sharding", "collective", "optimizer"), CASES)
def test_ten_steps_at_two_workers_and_ten_at_one_are_twenty_at_one_and_back(
    tmp_path: Path, sharding: str, collective: str, optimizer: str
) -> None:
    expected = _whole_run(optimizer)
    local = LocalCollective()
    one, two, at_one, at_two = (str(tmp_path / name) for name in ("one", "two", "at_one", "at_two"))
    _save("none", optimizer, one, local)
    work = partial(_both, sharding, optimizer, two, one, at_two)
    run_ranks(2, collective, work)
    assert _resume("none", optimizer, two, at_one, local) == [1, 10]
    assert (_weights(at_one) - expected).abs().max() < 1e-5
    assert (_weights(at_two) - expected).abs().max() < 1e-5


WIDTH, DEPTH = 256, 12


def _gather(sharding: str, collective: Collective) -> Any:
    """Returns the peak memory of a snapshot on this rank, the bytes kept, and the bytes sent."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    sync = _prepare(collective, sharding, "adamw", module)
    with sync.micro_batch(last=True):
        sync.module(torch.ones(1, WIDTH)).sum().backward()
    sync.reduce()
    sync.step(LossScaler("fp32", torch.device("cpu")))
    position, mesh, before = Position(epoch=1, step=1), _mesh(sharding, collective), collective.bytes_sent
    use = memory_use(lambda: take_snapshot(sync, position, mesh=mesh))
    return [use.peak, use.kept, collective.bytes_sent - before]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("sharding", "collective"),
    [
        pytest.param("gradients", "horovod", marks=pytest.mark.slow),
        ("gradients", "torch"),
        ("parameters", "torch"),
    ],
)
def test_each_rank_of_a_sharded_training_copies_its_share_of_tensors(sharding: str, collective: str) -> None:
    """Weights and two Adam moments, 256 KiB each; each of three ranks copies a third of all tensors."""
    one = WIDTH * WIDTH * 4
    share = 3 * DEPTH * one // 3
    sends = (3 if sharding == "parameters" else 2) * DEPTH * one // 3  # at most the rank's shard
    described = 16384
    for peak, kept, sent in run_ranks(3, collective, partial(_gather, sharding)):
        assert share <= kept <= share + described
        assert peak <= share + 3 * one + described  # a tensor, its pieces, and this rank's own piece
        assert sent <= sends + described


LAYERS = 8


def _load(folder: str, collective: Collective) -> int:
    """Returns the peak memory of loading this rank's share of weights from two shards."""
    module = nn.Sequential(*(nn.Linear(256, 512, bias=False) for _ in range(LAYERS)))
    sync = _prepare(collective, "parameters", "sgd", module)
    spread = CheckpointShards(ShardSpec("tensor", 0), (512, 256), (0, 1))
    joined = map_shards([f"{folder}/{part}" for part in (0, 1)], dict.fromkeys(module.state_dict(), spread))
    return memory_use(lambda: load_state(folder, sync.network, joined)).peak


@pytest.mark.distributed
def test_a_rank_that_keeps_a_part_puts_one_tensor_together_at_a_time(tmp_path: Path) -> None:
    """Weights of 512 KiB each; three ranks keep a third of them and must not load everything first."""
    one = 512 * 256 * 4
    for part in (0, 1):
        half = {f"{layer}.weight": torch.full((256, 256), float(layer)) for layer in range(LAYERS)}
        with (tmp_path / str(part)).open("wb") as file:
            tensor_file.write(half, file)
    for peak in run_ranks(3, "torch", partial(_load, str(tmp_path))):
        assert peak < LAYERS * one / 3 + 3 * one


def test_what_is_not_there_or_is_of_another_network_is_refused(tmp_path: Path) -> None:
    local = LocalCollective()
    sync = _prepare(local, "none", "adamw")
    with pytest.raises(ValueError, match=r"holds no training state \(training.json is missing\)"):
        load_training_state(str(tmp_path), sync)
    _steps(sync, local, 0, 1)
    _write(str(tmp_path), sync, 1)
    for optimizer, words in (
        ("adam", "with optimizer AdamW in 1 parameter groups, this one has Adam in 1"),
        ("adamw", "another network: it has '0.bias', which this one lacks"),
    ):
        with pytest.raises(ValueError, match=words):
            load_training_state(str(tmp_path), _prepare(local, "none", optimizer, nn.Linear(3, 1)))
    with open(tmp_path / "optimizer.safetensors", "ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="the file is damaged, use another checkpoint"):
        load_training_state(str(tmp_path), sync)


def test_each_block_that_a_remote_store_gives_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow store must not look like a hang: each loaded block counts as progress."""
    local, uri = LocalCollective(), "memory://states/step"
    sync = _prepare(local, "none", "adamw")
    _steps(sync, local, 0, 1)
    _write(uri, sync, 1)
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 64)
    ticks: list[None] = []
    load_training_state(uri, sync, lambda: ticks.append(None))
    files = [name for name in storage.list_names(uri) if name.endswith(".safetensors")]
    assert len(files) == 3
    assert len(ticks) == sum(-(-storage.size(storage.join(uri, name)) // 64) for name in files)


@pytest.mark.parametrize("optimizer", optimizer_names())
def test_every_optimizer_goes_on_to_the_bit(tmp_path: Path, optimizer: str) -> None:
    torch.manual_seed(0)
    # Only a parameter of more than 4,096 numbers has moments of 8 bits.
    module = nn.Sequential(nn.Linear(3, 80), nn.BatchNorm1d(80), nn.Linear(80, 64), nn.Linear(64, 1))
    local = LocalCollective()
    expected, first, second = (_prepare(local, "none", optimizer, copy.deepcopy(module)) for _ in range(3))
    _steps(expected, local, 0, 8)
    _steps(first, local, 0, 5)
    _write(str(tmp_path), first, 5)
    load_training_state(str(tmp_path), second)
    _steps(second, local, 5, 8)
    wanted, got = expected.network.state_dict(), second.network.state_dict()
    assert [name for name in wanted if not wanted[name].equal(got[name])] == []
    assert not wanted["0.weight"].equal(first.network.state_dict()["0.weight"])
