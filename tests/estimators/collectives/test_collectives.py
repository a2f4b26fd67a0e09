"""One contract over every collective, on real processes."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from ringspark.estimators import WorkerError
from ringspark.estimators.collectives import COLLECTIVES, Collective, Member, collective_class
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.collectives.network import environment, interface_of
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.training.status import Status

SIZES = [(name, 1 if name == "local" else size) for name in COLLECTIVES for size in (2, 3)]
GANGS = [name for name in COLLECTIVES if name != "local"]


def _operations(collective: Collective, device: str, status: Status) -> str:
    rank, size = collective.rank, collective.size
    mine = torch.tensor([float(rank), 1.0], dtype=torch.float64)
    shared = torch.full((3,), float(rank))
    collective.broadcast([shared], root=size - 1)
    collective.barrier()
    return json.dumps(
        {
            "sum": collective.all_reduce(mine).tolist(),
            "max": collective.all_reduce(mine, op="max").tolist(),
            "min": collective.all_reduce(mine, op="min").tolist(),
            "untouched": mine.tolist(),
            "shared": shared.tolist(),
            "rank": rank,
        }
    )


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "size"), sorted(set(SIZES)))
def test_operations_agree_on_all_ranks(name: str, size: int) -> None:
    results = [json.loads(text) for text in run_spawned(size, name, _operations)]
    for rank, result in enumerate(results):
        assert result["rank"] == rank
        assert result["sum"] == [size * (size - 1) / 2, size]
        assert result["max"] == [size - 1, 1.0]
        assert result["min"] == [0.0, 1.0]
        assert result["untouched"] == [float(rank), 1.0]
        assert result["shared"] == [float(size - 1)] * 3


def _fails_on_rank_one(collective: Collective, device: str, status: Status) -> str:
    for step in range(5):
        status.phase = f"step {step}"
        if step == 3 and collective.rank == 1:
            raise KeyError("lost")
        collective.all_reduce(torch.ones(4))
    return "unreachable"


@pytest.mark.distributed
@pytest.mark.parametrize("name", GANGS)
def test_a_failing_rank_ends_its_peers_and_is_named(name: str) -> None:
    with pytest.raises(
        WorkerError, match=r"rank 1 on host .* failed in phase 'step 3': KeyError: 'lost'"
    ) as caught:
        run_spawned(3, name, _fails_on_rank_one, timeout_seconds=60)
    peers = {failure.rank: failure.from_peer for failure in caught.value.failures}
    assert peers == {0: True, 1: False, 2: True}


def _environment_after(collective: Collective, device: str, status: Status) -> str:
    return json.dumps([k for k in os.environ if k.startswith(("HOROVOD_", "GLOO_", "MASTER_"))])


@pytest.mark.distributed
@pytest.mark.parametrize("name", GANGS)
def test_connecting_leaves_no_environment_variable(name: str) -> None:
    for text in run_spawned(2, name, _environment_after):
        assert json.loads(text) == []


def _gradients(collective: Collective, device: str, status: Status) -> str:
    """Rank r differentiates its share of the mean over 1 + 2 + ... rows; the last rank has none."""
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 1)
    sync = collective.synchronize(module, torch.optim.SGD(module.parameters(), lr=1.0), 1)
    counts = [r + 1 for r in range(collective.size)]
    counts[-1] = 0 if collective.size > 1 else counts[-1]
    rows = torch.arange(2.0 * sum(counts)).reshape(-1, 2)
    start = sum(counts[: collective.rank])
    mine = rows[start : start + counts[collective.rank]]
    if len(mine) or sync.needs_backward:
        with sync.micro_batch(last=True):
            (sync.module(mine).sum() / len(rows) * sync.loss_factor).backward()
    sync.reduce()
    gradient = [p.grad.flatten().tolist() for p in module.parameters()]  # type: ignore[union-attr]
    expected = [rows.mean(0).tolist(), [1.0]]
    return json.dumps([gradient, expected])


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "size"), sorted(set(SIZES)))
def test_gradients_are_the_mean_over_the_global_batch(name: str, size: int) -> None:
    for text in run_spawned(size, name, _gradients):
        gradient, expected = json.loads(text)
        for got, wanted in zip(gradient, expected, strict=True):
            assert got == pytest.approx(wanted, rel=1e-6)


def test_an_unknown_collective_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"collective must be one of \['horovod', 'local', 'torch'\], got 'mpi'"
    ):
        collective_class("mpi")


def test_a_missing_library_is_named_with_the_remedy(monkeypatch: Any) -> None:
    monkeypatch.setattr("ringspark.estimators.collectives.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'ringspark\[horovod\]' or set collective='torch'"):
        collective_class("horovod")


def test_local_refuses_more_than_one_worker() -> None:
    with pytest.raises(ValueError, match="serves one worker, got 2"):
        LocalCollective(Member(size=2))


def test_the_environment_is_put_back() -> None:
    os.environ["RINGSPARK_A"] = "old"
    try:
        with environment({"RINGSPARK_A": "new", "RINGSPARK_B": "new"}):
            assert os.environ["RINGSPARK_A"] == os.environ["RINGSPARK_B"] == "new"
        assert os.environ["RINGSPARK_A"] == "old"
        assert "RINGSPARK_B" not in os.environ
    finally:
        del os.environ["RINGSPARK_A"]


def test_the_interface_of_loopback_is_found() -> None:
    assert interface_of("127.0.0.1") is not None
    assert interface_of("203.0.113.7") is None
