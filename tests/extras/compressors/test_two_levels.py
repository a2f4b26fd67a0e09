"""Hierarchical all-reduce: exact within a host, compressed between hosts; this host acts as two."""

from __future__ import annotations

import hashlib
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from registries import list_available, names_of
from small_training import config_of, train_gang, weights_of
from torch import nn

from ringspark.estimators.collectives import Collective, Member
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.launch.gang_task import assign_ranks
from ringspark.estimators.options.compression import Compression
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.parallel import STRATEGIES, SyncSettings
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.extras.compressors import COMPRESSORS
from ringspark.extras.compressors.compressed_all_reduce import all_reduce_by_host, find_levels

SHAPES = [torch.Size((40, 30)), torch.Size((33, 40))]
ELEMENTS = sum(shape.numel() for shape in SHAPES)
STEPS = 4
HERE, THERE = "127.0.0.1", "127.0.0.2"
SMALL: dict[str, Any] = {"gradiveq": {"slice": 64, "components": 4, "samples": 2, "refresh": 3}}

GANGS = [
    pytest.param(("torch", (HERE, THERE, THERE)), id="torch1+2"),
    pytest.param(("horovod", (HERE, HERE, THERE)), id="horovod2+1", marks=pytest.mark.slow),
    pytest.param(("torch", (HERE, HERE, THERE, THERE)), id="torch2+2", marks=pytest.mark.slow),
    pytest.param(("horovod", (HERE, HERE, THERE, THERE)), id="horovod2+2", marks=pytest.mark.slow),
]
Gang = tuple[str, tuple[str, ...]]
distributed = pytest.mark.distributed
# CpSGD hides the gradient of a worker, so it refuses sums of a host.
TWO_LEVELS = [name for name in COMPRESSORS if name != "cpsgd"]


def test_the_place_among_some_ranks_is_that_of_a_gang_of_them_alone() -> None:
    hosts = ["a", "b", "b", "c", "c", "c"]
    members = assign_ranks(hosts)
    assert [member.leaders for member in members] == [(0, 1, 3)] * 6
    assert [members[0].host_of(rank) for rank in range(6)] == [0, 1, 1, 2, 2, 2]
    for ranks in ([0, 1, 3], [1, 2], [2, 3, 5], list(range(6))):
        alone = assign_ranks([hosts[rank] for rank in ranks])
        assert [members[rank].within(ranks) for rank in ranks] == alone


@pytest.mark.parametrize(
    ("hosts", "has_levels"), [("aa", False), ("ab", False), ("aab", True), ("abb", True), ("a", False)]
)
def test_there_are_two_levels_where_a_host_has_several_ranks_and_others_exist(
    hosts: str, has_levels: bool
) -> None:
    assert [member.has_levels for member in assign_ranks(list(hosts))] == [has_levels] * len(hosts)


def _gradient(rank: int, step: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(100 * rank + step)
    return (
        torch.randn(ELEMENTS, generator=drawn, dtype=torch.float64) * torch.logspace(-3, 1, ELEMENTS).double()
    )


def _contract(collective: Collective) -> Any:
    levels, rank = find_levels(collective), collective.rank
    found: dict[str, Any] = {}
    for name in list_available(COMPRESSORS):
        if name not in TWO_LEVELS:
            continue
        kind = COMPRESSORS[name]
        options = Compression.of({"name": name, **SMALL.get(name, {}), "feedback": True})
        compressor, residual = kind(SHAPES, 7, options), torch.zeros(ELEMENTS, dtype=torch.float64)
        sent, digest = torch.zeros_like(residual), hashlib.sha256()
        for step in range(STEPS):
            total, error = all_reduce_by_host(_gradient(rank, step) + residual, compressor, levels, step)
            assert error is not None
            residual = error
            sent += total
            digest.update(total.numpy().tobytes())
        lost = collective.all_reduce(residual)
        wanted = sum(_gradient(r, step) for r in range(collective.size) for step in range(STEPS))
        found[name] = {
            "telescopes": float((sent + lost - wanted).abs().max()),
            "digest": digest.hexdigest(),
            "keeps": bool(residual.any()),
            "leads": collective.member.local_rank == 0,
        }
        if levels.between is not None:
            alone = kind(SHAPES, 7, options)
            alone.load({key: tensor.clone() for key, tensor in compressor.state().items()})
            levels.between.traffic.bytes_sent = 0
            all_reduce_by_host(_gradient(rank, STEPS), compressor, levels, STEPS)
            two = levels.between.bytes_sent
            levels.between.traffic.bytes_sent = 0
            alone.sum(_gradient(rank, STEPS), levels.between, STEPS)
            found[name] |= {"between": two, "of a rank a host": levels.between.bytes_sent}
        else:
            all_reduce_by_host(_gradient(rank, STEPS), compressor, levels, STEPS)
    return found


@cache
def _results(gang: Gang) -> list[dict[str, Any]]:
    name, hosts = gang
    return run_ranks(len(hosts), name, _contract, hosts=hosts)


@distributed
@pytest.mark.parametrize("gang", GANGS)
@pytest.mark.parametrize("compressor", names_of(COMPRESSORS, TWO_LEVELS))
def test_what_hosts_sent_and_what_their_first_ranks_keep_is_the_sum_of_all_gradients(
    gang: Gang, compressor: str
) -> None:
    ranks = [rank[compressor] for rank in _results(gang)]
    assert max(rank["telescopes"] for rank in ranks) < 1e-11
    assert len({rank["digest"] for rank in ranks}) == 1
    assert not any(rank["keeps"] for rank in ranks if not rank["leads"])


@distributed
@pytest.mark.parametrize("gang", GANGS)
def test_a_host_sends_what_a_single_rank_of_it_would(gang: Gang) -> None:
    for rank in _results(gang):
        for name, found in rank.items():
            if found["leads"] and name != "sparsify":  # sends a random number of elements
                assert found["between"] == found["of a rank a host"] > 0, name


def _part_fails(collective: Collective) -> str:
    levels = find_levels(collective)
    if collective.rank == collective.size - 1:
        raise ValueError("the last rank fails")
    levels.inside.barrier()
    if levels.between is not None:
        levels.between.barrier()
    levels.inside.barrier()
    collective.barrier()
    return ""


@distributed
@pytest.mark.parametrize("name", ["torch", "horovod"])
def test_a_rank_that_fails_ends_the_waits_of_its_host_and_of_the_others(name: str) -> None:
    from ringspark.estimators import WorkerError

    with pytest.raises(WorkerError, match="the last rank fails"):
        run_ranks(3, name, _part_fails, hosts=(HERE, THERE, THERE), timeout_seconds=20)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 40)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean(1)  # type: ignore[no-any-return]


def _sync(collective: Collective, compression: dict[str, Any]) -> Any:
    whole = Compression.of({"least": 1, "between": "hosts", **compression})
    exchange = SyncSettings(sync=AllReduce(compression=whole), seed=3)
    return STRATEGIES[exchange.sync.strategy]().prepare(
        Net(), lambda m: torch.optim.SGD(m.parameters(), 0.1), RankMesh.of(collective), exchange
    )


def _take(sync: Any, rank: int, steps: range) -> None:
    for step in steps:
        rows = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank)).double()
        sync.optimizer.zero_grad()
        sync.module(rows).sum().backward()
        sync.reduce()


def _other_hosts(kept: Any, compression: dict[str, Any], collective: Collective) -> Any:
    """Resumes the states of two hosts on hosts of one rank each, or on one host."""
    states = [{k: torch.tensor(v, dtype=torch.float64) for k, v in s.items()} for s in kept]
    found = []
    for is_same in (True, False):
        sync = _sync(collective, compression)
        sync.load_rank_states(states, is_same=is_same)
        residual = collective.all_reduce(sync.rank_state()["0/residual"])
        _take(sync, collective.rank, range(3, 5))
        bases = [b.tolist() for b in collective.all_gather(sync.rank_state()["0/basis.0"].reshape(-1))]
        gradient = [g.tolist() for g in collective.all_gather(sync.network.layer.weight.grad.reshape(-1))]
        found.append({"kept": residual.tolist(), "bases": bases, "gradients": gradient})
    return found


def _first_hosts(compression: dict[str, Any], collective: Collective) -> Any:
    sync = _sync(collective, compression)
    _take(sync, collective.rank, range(3))
    return {key: value.tolist() for key, value in sync.rank_state().items()}


@distributed
@pytest.mark.parametrize(
    "compression",
    [
        {"name": "powersgd", "rank": 1},
        pytest.param(
            {"name": "gradiveq", "slice": 32, "components": 2, "samples": 2, "refresh": 9},
            marks=pytest.mark.extras,
        ),
    ],
    ids=["powersgd", "gradiveq"],
)
def test_a_training_goes_on_where_its_workers_have_other_hosts(compression: dict[str, Any]) -> None:
    """Only the first rank of a host has the bases, so every new first rank must get them."""
    first = partial(_first_hosts, compression)
    states = run_ranks(3, "torch", first, hosts=(HERE, THERE, THERE))
    assert [("0/basis.0" in state) for state in states] == [True, True, False]
    residuals = [torch.tensor(state["0/residual"]) for state in states]
    assert residuals[0].any()
    whole = sum(residuals)
    work = partial(_other_hosts, states, compression)
    for rank in run_ranks(3, "torch", work, hosts=(HERE, THERE, "127.0.0.3")):
        for found in rank:
            torch.testing.assert_close(torch.tensor(found["kept"]), whole)
            assert len({str(basis) for basis in found["bases"]}) == 1
            assert len({str(gradient) for gradient in found["gradients"]}) == 1


def test_one_rank_and_ranks_of_one_host_have_levels_too() -> None:
    alone = LocalCollective()
    assert find_levels(alone).inside is alone
    several = LocalCollective()
    several.member = Member(size=2, leaders=(0, 1))
    assert find_levels(several).between is several


@distributed
def test_whole_sums_of_two_levels_train_what_plain_ones_do(make_shards: Any, tmp_path: Path) -> None:
    """On one host, the reduction within the host is the complete reduction."""
    import numpy as np

    from ringspark.models import ModelSpec

    spec = ModelSpec("mlp", {"in_features": 16, "hidden": [64], "out_features": 1})
    x = np.random.default_rng(0).normal(size=(200, 16)).astype(np.float32)
    manifest = make_shards({"x": x, "y": x.sum(1).astype(np.float32)})
    weights = []
    for number, compression in enumerate(("none", {"name": "none", "between": "hosts"})):
        config = config_of(
            manifest,
            tmp_path / str(number),
            model=spec.to_json(),
            num_workers=2,
            collective="torch",
            sync=AllReduce(compression=Compression.of(compression)),
        )
        weights.append(weights_of(train_gang(config), spec.build()))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)
