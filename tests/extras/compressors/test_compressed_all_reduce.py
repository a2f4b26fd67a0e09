"""Residuals of gradient compression: when they change and when they must not, on real gangs."""

from functools import partial
from typing import Any

import pytest
import torch
from ranks import TORCH_AND_SLOW_OTHERS, run_ranks
from safetensors.torch import load, save
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.options.compression import Compression
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.parallel import SyncSettings
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.precision import LossScaler
from ringspark.extras.compressors import COMPRESSORS
from ringspark.extras.compressors.compressed_all_reduce import (
    CompressedAllReduce,
    _Group,
)

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    """Two weight matrices and biases; some rows do not use the second matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 40), nn.Linear(6, 40)
        self.double()

    def forward(self, x: torch.Tensor, uses_second: bool = True) -> torch.Tensor:
        hidden = self.first(x)
        return (hidden * self.second(x) if uses_second else hidden).square().mean(1)  # type: ignore[no-any-return]


def _sync(
    collective: Collective, network: nn.Module | None = None, make: Any = torch.optim.SGD, **compression: Any
) -> CompressedAllReduce:
    given = {"name": "topk", "ratio": 0.05, "least": 1, **compression}
    chosen = Compression.of({key: value for key, value in given.items() if value is not None})
    settings = SyncSettings(sync=AllReduce(compression=chosen), seed=3)
    prepare = CompressedAllReduce.prepare
    return prepare(network or Net(), lambda m: make(m.parameters(), 0.1), RankMesh.of(collective), settings)


def _backward(sync: Any, rank: int, step: int, factor: float = 1.0, uses_second: bool = True) -> None:
    sync.optimizer.zero_grad()
    rows = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    (sync.module(rows, uses_second).sum() * factor).backward()


def _residual(sync: CompressedAllReduce) -> torch.Tensor:
    return sync._groups[0].residual


def _gradient(sync: CompressedAllReduce) -> torch.Tensor:
    """Returns the matrix gradients in residual order, with zeros for None."""
    parameters = sync._groups[0].parameters
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])


def _life(collective: Collective) -> Any:
    """Runs every outcome of a step; returns whether sent plus residual equals the gradients so far."""
    sync = _sync(collective)
    due = torch.zeros_like(_residual(sync))
    sent = torch.zeros_like(due)
    found: dict[str, Any] = {}

    def adds_up(case: str, also: bool = True) -> None:
        kept = collective.all_reduce(_residual(sync))
        found[case] = bool(torch.allclose(sent + kept, due, atol=1e-12)) and also

    def step(number: int, **how: Any) -> torch.Tensor:
        _backward(sync, collective.rank, number, **how)
        return collective.all_reduce(_gradient(sync))

    def take(number: int, **how: Any) -> None:
        nonlocal due, sent
        due += step(number, **how)
        sync.reduce()
        sent += _gradient(sync)

    for number in range(3):
        take(number)
    adds_up("plain steps", bool(_residual(sync).any()))

    # One rank's gradient is not finite: nothing is sent, and no residual changes.
    before = _residual(sync).clone()
    step(3, factor=float("inf") if collective.rank else 1.0)
    sync.reduce()
    is_bad = not bool(torch.isfinite(_gradient(sync)).any())
    adds_up("not finite", is_bad and _residual(sync).equal(before))

    # An uncompressed gradient is not finite: the step is skipped, even if the matrices are finite.
    before = _residual(sync).clone()
    step(3)
    if collective.rank:
        sync.network.first.bias.grad[0] = float("inf")
    sync.reduce()
    adds_up("bias not finite", _residual(sync).equal(before))

    # The fp16 loss scale differs from step to step.
    due += step(4)
    _backward(sync, collective.rank, 4, factor=1024.0)
    sync.reduce(lambda: 1024.0)
    sent += _gradient(sync) / 1024
    adds_up("scaled")

    # No rank uses the second matrix: its gradient is None, and its residual stays.
    unused = sync.network.second.weight
    take(5, uses_second=False)
    adds_up("unused everywhere", unused.grad is None)

    # One rank uses it.
    take(6, uses_second=collective.rank == 0)
    adds_up("used by one", unused.grad is not None)

    # A rank without rows sends its residual.
    sync.optimizer.zero_grad()
    if collective.rank:
        _backward(sync, collective.rank, 7)
    due += collective.all_reduce(_gradient(sync))
    before = _residual(sync).clone()
    sync.reduce()
    sent += _gradient(sync)
    adds_up("without rows", not _residual(sync).equal(before))
    biases = [p.grad for n, p in sync.network.named_parameters() if n.endswith("bias")]
    found["biases travel whole"] = all(b is not None and bool((b != 0).all()) for b in biases)
    return found


def test_a_gradient_that_is_not_finite_beside_what_was_kept_is_told_before_anything_is_sent() -> None:
    """A compressor might skip the bad element, and would keep an infinite one."""
    sync = _sync(LocalCollective(), name="randomk")
    largest = torch.finfo(torch.float64).max
    _residual(sync)[3] = largest
    before = _residual(sync).clone()
    _backward(sync, 0, 0)
    for matrix in (sync.network.first.weight, sync.network.second.weight):
        matrix.grad.fill_(largest / 4)
    sync.reduce()
    assert _residual(sync).equal(before)
    assert bool(_gradient(sync).isnan().all())


@pytest.mark.parametrize("name", TORCH_AND_SLOW_OTHERS)
def test_what_is_sent_and_what_is_kept_adds_up(name: str) -> None:
    for found in run_ranks(2, name, _life):
        assert len(found) == 8
        assert all(found.values()), found


def _resumes(compression: str, collective: Collective) -> Any:
    """Runs 5 steps at once, and 3 steps, a restore and 2 steps; returns the states."""
    new = partial(_sync, collective, name=compression, **_OPTIONS[compression])
    straight, first, third, second = (new() for _ in range(4))
    scaler = LossScaler("fp32", torch.device("cpu"))

    def steps(sync: CompressedAllReduce, begin: int, end: int) -> None:
        for number in range(begin, end):
            _backward(sync, collective.rank, number)
            sync.reduce()
            sync.step(scaler)

    steps(straight, 0, 5)
    steps(first, 0, 3)
    own = first.rank_state()
    # A state that shares memory with the training would change here.
    steps(first, 3, 4)
    states = [load(text) for text in gather_bytes(collective, save(own))]
    steps(third, 0, 3)
    second.network.load_state_dict(third.network.state_dict())
    second.load_rank_states(states, is_same=True)
    steps(second, 3, 5)
    is_equal = all(
        a.equal(b) for a, b in zip(straight.network.parameters(), second.network.parameters(), strict=True)
    )
    return {"equal": is_equal, "state": {key: own[key].tolist() for key in ("0/part", "0/residual", "step")}}


_FOUND: dict[str, Any] = {"powersgd": {}, "gradiveq": {"slice": 16, "components": 2, "samples": 1}}
_OPTIONS: dict[str, dict[str, Any]] = {
    "topk": {},
    "randomk": {"ratio": 0.1},
    "sparsify": {"feedback": True, "ratio": 0.1},
    "qsgd": {"ratio": None, "feedback": True, "bits": 2},
    "sign": {"ratio": None},
    "powersgd": {"ratio": None, "rank": 1},
    "sufficientfactors": {"ratio": None, "rows": 1},
    "gradiveq": {"ratio": None, "slice": 8, "components": 2, "samples": 2},
}


def _resume_all(collective: Collective) -> Any:
    return {compression: _resumes(compression, collective) for compression in _OPTIONS}


def _load_all(states: dict[str, Any], collective: Collective) -> Any:
    found = {}
    for compression, own in states.items():
        sync = _sync(collective, name=compression, **_OPTIONS[compression])
        sync.load_rank_states(own, is_same=False)
        found[compression] = _residual(sync).tolist()
    return found


def test_a_resumed_training_sends_the_same_bits_and_the_sum_of_residuals_outlives_a_gang() -> None:
    ranks = run_ranks(2, "torch", _resume_all)
    states, wanted = {}, {}
    for name in _OPTIONS:
        own = [rank[name] for rank in ranks]
        assert all(rank["equal"] for rank in own), name
        residuals = [torch.tensor(rank["state"]["0/residual"], dtype=torch.float64) for rank in own]
        assert all(residual.any() for residual in residuals), name
        states[name] = [
            {key: torch.tensor(values) for key, values in rank["state"].items()} | {"0/residual": residual}
            for rank, residual in zip(own, residuals, strict=True)
        ]
        wanted[name] = residuals[0] + residuals[1]
    loaded = run_ranks(3, "torch", partial(_load_all, states))
    for name, residual in wanted.items():
        found = sum(torch.tensor(rank[name], dtype=torch.float64) for rank in loaded)
        assert torch.equal(found, residual), name


@pytest.mark.parametrize("name", ["powersgd", "gradiveq"])
def test_a_rollback_to_the_first_step_forgets_the_directions_found_since(name: str) -> None:
    """Otherwise a restarted training would take different steps than an uninterrupted one."""
    values = Compression.of({"name": name, **_FOUND[name]})
    used, fresh = (COMPRESSORS[name]([torch.Size((16, 16))], 0, values) for _ in range(2))
    group = _Group({"weight": nn.Parameter(torch.zeros(16, 16))}, used)
    begin = {key: t.clone() for key, t in used.state().items()}
    for step in range(4):
        used.sum(torch.randn(256), LocalCollective(), step)
    group.load(begin)
    vector = torch.randn(256)
    for step in range(2):
        one, other = (c.sum(vector, LocalCollective(), step).total for c in (used, fresh))
        assert one.equal(other)


def test_a_gang_of_one_takes_over_from_a_larger_one_with_looked_up_rows() -> None:
    """Embedding rows travel separately, so no residual holds any, for any number of ranks."""
    module = nn.Sequential(nn.Embedding(40, 40, sparse=True), nn.Linear(40, 40))
    sync = _sync(LocalCollective(), module, torch.optim.Adam)
    kept = torch.ones(40 * 40)
    sync.load_rank_states([sync.rank_state() | {"0/residual": kept}] * 2, is_same=False)
    module(torch.tensor([3])).sum().backward()
    expected = module[1].weight.grad.clone() + 2
    sync.reduce()
    assert torch.allclose(module[1].weight.grad, expected)
    assert not _residual(sync).any()
    sync.step(LossScaler("fp32", torch.device("cpu")))


@pytest.mark.parametrize(
    "weights",
    [
        torch.zeros(30, 20),
        torch.zeros(20, 30).t(),
        torch.zeros(16, 6, 3, 3),
        torch.zeros(16, 6, 3, 3).to(memory_format=torch.channels_last),
    ],
    ids=["rows", "columns", "channels first", "channels last"],
)
def test_a_matrix_of_low_rank_is_one_however_it_lies_in_memory(weights: torch.Tensor) -> None:
    layer = nn.Module()
    layer.weight = nn.Parameter(weights.clone())
    assert layer.weight.stride() == weights.stride()
    sync = _sync(LocalCollective(), layer, name="powersgd", rank=1, ratio=None)
    torch.manual_seed(1)
    gradient = torch.outer(torch.randn(len(weights)), torch.randn(weights[0].numel())).view(weights.shape)
    layer.weight.grad = gradient.clone()
    (group,) = sync._groups
    group.take(1.0)
    group.counts = [1]
    sent = group.exchange(lambda vector, compressor: compressor.sum(vector, LocalCollective(), 0))
    group.give(sent.total)
    torch.testing.assert_close(layer.weight.grad, gradient, atol=1e-4, rtol=1e-4)


def test_the_first_steps_travel_whole_where_that_is_asked_for() -> None:
    found = run_ranks(2, "torch", _begins_later)
    assert found == [[True, True, False, False]] * 2


def _begins_later(collective: Collective) -> Any:
    """Returns for each step whether the all-reduce is exact."""
    sync, is_whole = _sync(collective, after=2), []
    for number in range(4):
        _backward(sync, collective.rank, number)
        exact = collective.all_reduce(_gradient(sync))
        sync.reduce()
        is_whole.append(bool(torch.allclose(_gradient(sync), exact)))
    return is_whole


class Opened(dict[str, torch.Tensor]):
    """Refuses to read a residual."""

    def __getitem__(self, key: str) -> torch.Tensor:
        assert not key.endswith("residual"), key
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        assert not key.endswith("residual"), key
        return super().get(key, default)


def test_residuals_of_other_parameters_of_the_same_size_are_neither_read_nor_added(caplog: Any) -> None:
    """Stages of equal blocks have equal sizes, but measured costs may move their bounds."""
    networks = (nn.ModuleDict({name: nn.Linear(40, 40)}) for name in ("block4", "block5"))
    earlier, sync = (_sync(LocalCollective(), network) for network in networks)
    state = Opened(earlier.rank_state() | {"0/residual": torch.ones(40 * 40)})
    sync.load_rank_states([state], is_same=True)
    assert not sync.rank_state()["0/residual"].any()
    assert "residuals of gradient compression are lost" in caplog.text


# Compressions between hosts whose first ranks keep the bases of their gradients.
_BETWEEN = [
    {"name": "powersgd", "rank": 1, "ratio": None, "between": "hosts"},
    {"name": "gradiveq", "slice": 32, "components": 2, "samples": 2, "refresh": 9, "between": "hosts"}
    | {"ratio": None},
]


def _after_three_steps(collective: Collective) -> Any:
    found = []
    for compression in _BETWEEN:
        sync = _sync(collective, **compression)
        for step in range(3):
            _backward(sync, collective.rank, step)
            sync.reduce()
        found.append({key: value.tolist() for key, value in sync.rank_state().items()})
    return found


def _on_other_hosts(kept: Any, collective: Collective) -> Any:
    """Resumes the states of two hosts on hosts of one rank each, or on one host."""
    found = []
    for compression, of_ranks in zip(_BETWEEN, kept, strict=True):
        states = [{k: torch.tensor(v, dtype=torch.float64) for k, v in s.items()} for s in of_ranks]
        found.append([])
        for is_same in (True, False):
            sync = _sync(collective, **compression)
            sync.load_rank_states(states, is_same=is_same)
            residual = collective.all_reduce(_residual(sync)).tolist()
            for step in (3, 4):
                _backward(sync, collective.rank, step)
                sync.reduce()
            bases = [b.tolist() for b in collective.all_gather(sync.rank_state()["0/basis.0"].reshape(-1))]
            gradients = [g.tolist() for g in collective.all_gather(_gradient(sync))]
            found[-1].append({"kept": residual, "bases": bases, "gradients": gradients})
    return found


def test_a_training_goes_on_where_its_workers_have_other_hosts() -> None:
    """Only the first rank of a host has the bases, so every new first rank must get them."""
    one, two, three = (f"127.0.0.{number}" for number in (1, 2, 3))
    ranks = run_ranks(3, "torch", _after_three_steps, hosts=(one, two, two))
    kept = [list(states) for states in zip(*ranks, strict=True)]
    resumed = run_ranks(3, "torch", partial(_on_other_hosts, kept), hosts=(one, two, three))
    for number, states in enumerate(kept):
        assert [("0/basis.0" in state) for state in states] == [True, True, False]
        residuals = [torch.tensor(state["0/residual"]) for state in states]
        assert residuals[0].any()
        for found in (found for rank in resumed for found in rank[number]):
            torch.testing.assert_close(torch.tensor(found["kept"]), sum(residuals))
            assert len({str(basis) for basis in found["bases"]}) == 1
            assert len({str(gradient) for gradient in found["gradients"]}) == 1
