"""Tests one contract for every collective, on real processes."""

import os
import socket
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import pytest
import torch
from ranks import RankWork, run_one, run_ranks
from small_networks import Net

from ringspark.estimators import WorkerError
from ringspark.estimators.collectives import (
    COLLECTIVES,
    ENTRY_POINTS,
    Collective,
    CollectiveError,
    Member,
    RendezvousInfo,
    collective_class,
    horovod_collective,
)
from ringspark.estimators.collectives.base import backward_errors, gather_bytes
from ringspark.estimators.collectives.horovod_collective import _check_name
from ringspark.estimators.collectives.network import interface_of
from ringspark.estimators.collectives.network_collective import NetworkCollective
from ringspark.estimators.collectives.rendezvous.server import KeyValues, unpack
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.data.gradient_all_reduce import GradientAllReduce, synchronize
from ringspark.estimators.training.phase import Status
from ringspark.pipelines.entry_points import list_entry_points

# Includes collectives of other installed packages.
NAMES = [*COLLECTIVES, *list_entry_points(ENTRY_POINTS)]
SIZES = sorted({(name, 1 if name == "local" else size) for name in NAMES for size in (2, 3)})
GANGS = [name for name in NAMES if name != "local"]


def _both_roads(work: RankWork, collective: Collective) -> list[Any]:
    """Returns the results over shared memory, if the ranks share any, and over the library."""
    results = [work(collective)]
    if isinstance(collective, NetworkCollective):
        assert (collective._memory is None) == (collective.size == 1)
        collective.share(None)
        results.append(work(collective))
    return results


def _results(size: int, name: str, work: RankWork) -> list[list[Any]]:
    return [list(road) for road in zip(*run_ranks(size, name, partial(_both_roads, work)), strict=True)]


@cache
def _contract(size: int, name: str) -> list[list[dict[str, Any]]]:
    """Returns the results of all contract tests, which one gang runs."""
    return _results(size, name, _all)


def _all(collective: Collective) -> dict[str, Any]:
    parts = (_traffic, _operations, _gathers, _exchanges, _scatters)
    found = {part.__name__.removeprefix("_"): part(collective) for part in parts}
    collective.traffic.bytes_sent = 0
    return found


def _operations(collective: Collective) -> Any:
    rank, size = collective.rank, collective.size
    mine = torch.tensor([float(rank), 1.0], dtype=torch.float64)
    rows = torch.arange(6.0).view(2, 3)
    columns = rows.t().contiguous().t()
    shared = torch.full((3,), float(rank))
    collective.broadcast([shared], root=size - 1)
    collective.barrier()
    return {
        "sum": collective.all_reduce(mine).tolist(),
        "max": collective.all_reduce(mine, op="max").tolist(),
        "min": collective.all_reduce(mine, op="min").tolist(),
        "untouched": mine.tolist(),
        # The libraries reduce tensors in memory order, which differs for a transposed tensor.
        "transposed": collective.all_reduce(columns if rank else rows).tolist(),
        "every other": [piece.tolist() for piece in collective.all_gather(torch.arange(4.0)[::2])],
        "shared": shared.tolist(),
        "rank": rank,
    }


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_operations_agree_on_all_ranks(name, size):
    for road in _contract(size, name):
        for rank, result in enumerate(found["operations"] for found in road):
            assert result["rank"] == rank
            assert result["sum"] == [size * (size - 1) / 2, size]
            assert result["max"] == [size - 1, 1.0]
            assert result["min"] == [0.0, 1.0]
            assert result["untouched"] == [float(rank), 1.0]
            assert result["transposed"] == (size * torch.arange(6.0).view(2, 3)).tolist()
            assert result["every other"] == [[0.0, 2.0]] * size
            assert result["shared"] == [float(size - 1)] * 3


DTYPES = [torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]


def _gathers(collective: Collective) -> Any:
    """Gathers r values from rank r, then none from all, then many from the last rank."""
    rank, size = collective.rank, collective.size
    result: dict[str, Any] = {}
    for dtype in DTYPES:
        pieces = collective.all_gather((torch.arange(rank) + 10 * rank).to(dtype))
        result[str(dtype)] = [piece.double().tolist() for piece in pieces]
        assert all(piece.dtype == dtype for piece in pieces)
    result["none"] = [len(piece) for piece in collective.all_gather(torch.zeros(0))]
    # More than the shared memory holds at a time.
    long = 2**40 + torch.arange(20_000 if rank == size - 1 else 0)
    *none, many = collective.all_gather(long)
    result["many"] = [len(piece) for piece in none] + [many.equal(2**40 + torch.arange(20_000))]
    result["bytes"] = [data.hex() for data in gather_bytes(collective, bytes([0, 255]) * rank)]
    parameter = torch.ones(2, requires_grad=True)
    result["detached"] = [not piece.requires_grad for piece in collective.all_gather(parameter)]
    before = collective.bytes_sent
    known = [3 * r for r in range(size)]
    result["on root"] = [piece.tolist() for piece in collective.gather(torch.arange(3 * rank), known)]
    result["sent"] = collective.bytes_sent - before
    result["nothing on root"] = [len(piece) for piece in collective.gather(torch.zeros(0), [0] * size)]
    last = collective.gather(torch.arange(3 * rank), known, root=size - 1)
    result["on the last"] = [piece.tolist() for piece in last]
    files = gather_bytes(collective, bytes([0, 255]) * rank, to_all=False)
    result["bytes on root"] = [data.hex() for data in files]
    return result


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_tensors_of_any_length_are_gathered_by_rank(name, size):
    for rank, found in (one for road in _contract(size, name) for one in enumerate(road)):
        result = found["gathers"]
        on_root = {
            "on root": [list(range(3 * r)) for r in range(size)],
            "nothing on root": [0] * size,
            "bytes on root": ["00ff" * r for r in range(size)],
        }
        for key, wanted_on_root in on_root.items():
            assert result[key] == ([] if rank else wanted_on_root), key
        assert result["on the last"] == (on_root["on root"] if rank == size - 1 else [])
        # Ranks send their values to rank 0 only.
        assert result["sent"] == 3 * 8 * rank
        for dtype in DTYPES:
            wanted = [(torch.arange(r) + 10 * r).to(dtype).double().tolist() for r in range(size)]
            assert result[str(dtype)] == wanted, dtype
        assert result["none"] == [0] * size
        assert result["many"] == [0] * (size - 1) + [True]
        assert result["bytes"] == ["00ff" * r for r in range(size)]


def _length(sender: int, receiver: int) -> int:
    """Returns uneven lengths: some are 0, and one exceeds a single message."""
    return 300_000 if (sender, receiver) == (0, 1) else (3 * sender + 5 * receiver) % 4


def _exchanges(collective: Collective) -> Any:
    rank, ranks = collective.rank, range(collective.size)
    found = []
    for dtype in (torch.uint8, torch.int64, torch.float32, torch.bfloat16):
        before = collective.bytes_sent
        pieces = [torch.full((_length(rank, peer),), 10 * rank + peer, dtype=dtype) for peer in ranks]
        arrived = collective.all_to_all(pieces, [_length(peer, rank) for peer in ranks])
        wanted = [torch.full((_length(peer, rank),), 10 * peer + rank, dtype=dtype) for peer in ranks]
        found.append(all(a.dtype == dtype and a.equal(b) for a, b in zip(arrived, wanted, strict=True)))
        sent = sum(_length(rank, peer) for peer in ranks if peer != rank)
        found.append(collective.bytes_sent - before == sent * dtype.itemsize)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_every_rank_gets_its_own_piece_from_every_other(name, size):
    for road in _contract(size, name):
        assert all(all(rank["exchanges"]) for rank in road)


PARTS = {2: [[3, 3], [1, 5], [0, 6]], 3: [[2, 2, 2], [1, 5, 0], [0, 0, 6]], 1: [[6]]}


def _scatters(collective: Collective) -> Any:
    """Runs two reduce-scatters at a time, and gathers their results again."""
    mine = torch.arange(6.0) + collective.rank
    result: list[Any] = []
    for counts in PARTS[collective.size]:
        before = collective.bytes_sent
        first = collective.start_reduce_scatter(mine, counts)
        sent = collective.bytes_sent - before
        second = collective.start_reduce_scatter(2 * mine, counts)
        part, doubled = first(), second()
        assert (2 * part).equal(doubled)
        whole = [piece.tolist() for piece in collective.all_gather(part, counts)]
        result.append([len(part), sent, whole])
    assert mine.tolist() == [float(i + collective.rank) for i in range(6)]
    random = torch.randn(1000, generator=torch.Generator().manual_seed(collective.rank))
    uneven = [1000, *[0] * (collective.size - 1)]
    part = collective.start_reduce_scatter(random, uneven)()
    assert part.equal(torch.split(collective.all_reduce(random), uneven)[collective.rank])
    turned = torch.full((2, 3), float(collective.rank)).t()
    collective.broadcast([turned], root=collective.size - 1)
    assert turned.equal(torch.full((3, 2), collective.size - 1.0))
    return result


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_sums_are_scattered_in_any_parts_and_gathered_again(name, size):
    offset = size * (size - 1) / 2
    wanted = [size * i + offset for i in range(6)]
    by_road = enumerate(_contract(size, name))
    for number, rank, found in ((n, *one) for n, road in by_road for one in enumerate(road)):
        for counts, (length, sent, whole) in zip(PARTS[size], found["scatters"], strict=True):
            assert length == counts[rank]
            assert [value for piece in whole for value in piece] == wanted
            assert [len(piece) for piece in whole] == counts
            # The libraries need an all-reduce for shards of uneven length.
            is_all_reduce = number and len(set(counts)) > 1
            assert sent == (2 * (size - 1) * 24 // size if is_all_reduce else 24 - 4 * counts[rank])


def test_more_ranks_than_horovod_can_connect_are_refused_before_it_starts():
    info = RendezvousInfo(address="127.0.0.1:1", secret=b"")
    with pytest.raises(
        ValueError, match="at most 4,000 workers, got 4,001; lower numWorkers or set collective"
    ):
        horovod_collective.HorovodCollective.connect(Member(size=4_001), info)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["torch", "horovod"])
def test_a_rank_connects_by_the_same_number_of_requests_in_a_gang_of_any_size(name, monkeypatch):
    # Without the waiting time: a request that waits is repeated on a busy machine.
    requests: set[tuple[bytes, ...]] = set()
    answer = KeyValues.answer

    def record(self: KeyValues, message: bytes, reply: Any) -> None:
        kind, *args = unpack(message)
        requests.add((kind, *args[: 3 if kind in (b"all", b"parts") else 1]))
        answer(self, message, reply)

    monkeypatch.setattr(KeyValues, "answer", record)
    per_rank = []
    for size in (2, 5):
        requests.clear()
        run_spawned(size, name, lambda *rank: "", timeout_seconds=120.0)
        per_rank.append(len(requests) / size)
    assert per_rank[0] == per_rank[1] < 12


def _traffic(collective: Collective) -> Any:
    """Returns the bytes sent by each type of call."""
    rank, counts = collective.rank, {"connecting": collective.bytes_sent}
    collective.traffic.bytes_sent = 0

    def sent(kind: str) -> None:
        counts[kind], collective.traffic.bytes_sent = collective.bytes_sent, 0

    collective.barrier()
    sent("barrier")
    collective.all_reduce(torch.zeros(30, dtype=torch.float64))
    sent("all_reduce")
    collective.broadcast([torch.zeros(5), torch.zeros(2, dtype=torch.int64)], root=1 % collective.size)
    sent("broadcast")
    collective.all_gather(torch.zeros(100 * rank, dtype=torch.uint8))
    sent("all_gather")
    module = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Linear(5, 1))
    module[0].bias.requires_grad_(False)
    sync = synchronize(
        module, torch.optim.SGD([p for p in module.parameters() if p.requires_grad]), collective
    )
    sent("synchronize")
    for last in (False, True):
        with sync.micro_batch(last):
            sync.module(torch.ones(3, 2)).sum().backward()
    sync.reduce()
    sent("step")
    collective.traffic.bytes_sent = 0
    return counts


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "size"), [("horovod", 3), ("local", 1), ("torch", 3)])
def test_bytes_are_counted_as_the_ring_sends_them(name, size):
    roads = [[found["traffic"] for found in road] for road in _contract(size, name)]
    for rank, counts in (one for road in roads for one in enumerate(road)):
        assert counts["connecting"] == counts["barrier"] == counts["synchronize"] == 0
        assert counts["all_reduce"] == 2 * (size - 1) * 240 // size
        # 10 weights, 5 weights and a bias: the frozen bias is not sent, and two micro-batches send once. Each
        # of the three tensors adds a count of the ranks that had a gradient.
        assert counts["step"] == 2 * (size - 1) * (16 + 3) * 4 // size
        # The ring starts at root rank 1 and ends at rank 0.
        assert counts["broadcast"] == (36 if rank else 0)
    exact = [8 * 2 + 300 - 100 * ((rank + 1) % 3) for rank in range(3)] if size > 1 else [0]
    # Ranks 1 and 2 first send 100 bytes to the rank before, because Gloo gathers tensors of equal length.
    made_equal = [8 * 2 + moved + 100 * 2 for moved in (0, 100, 100)]
    for road, lengths in zip(roads, (exact, made_equal if name == "torch" else exact), strict=False):
        assert [counts["all_gather"] for counts in road] == lengths


def _fails_on_rank_one(by: str, collective: Collective, device: str, status: Status) -> str:
    for step in range(5):
        status.phase = f"step {step}"
        if step == 3 and collective.rank == 1:
            raise KeyError("lost")
        if by.startswith("library"):
            cast("NetworkCollective", collective).share(None)
        if by.endswith("all_reduce"):
            collective.all_reduce(torch.ones(4))
        else:
            values = torch.arange(4.0) * (collective.rank + step)
            collective.start_sum(values, "values")()
            assert values.tolist() == [(3 + 3 * step) * n for n in range(4)]
    return "unreachable"


@pytest.mark.distributed
@pytest.mark.parametrize("name", GANGS)
@pytest.mark.parametrize(
    "by",
    [
        "all_reduce",
        "library's start_sum",
        *(pytest.param(by, marks=pytest.mark.slow) for by in ("start_sum", "library's all_reduce")),
    ],
)
def test_a_failing_rank_ends_its_peers_and_is_named(name, by):
    refusal = r"rank 1 on host .* failed in phase 'step 3': KeyError: 'lost'"
    with pytest.raises(WorkerError, match=refusal) as caught:
        run_spawned(3, name, partial(_fails_on_rank_one, by), timeout_seconds=60)
    peers = {failure.rank: failure.from_peer for failure in caught.value.failures}
    assert peers == {0: True, 1: False, 2: True}


@pytest.mark.parametrize(
    ("message", "is_peers"),
    [
        ("[/gloo/transport/tcp/pair.cc:538] Read error [10.0.0.2]:4711: Connection reset by peer", True),
        # Without a file name: another operation of the step timed out.
        ("Application timeout caused pair closure", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_a_lost_peer_is_told_from_an_error_of_the_network(message, is_peers):
    with pytest.raises(RuntimeError) as caught, backward_errors():
        raise RuntimeError(message)
    assert isinstance(caught.value, CollectiveError) == is_peers


def _interface_told(collective: Collective) -> Any:
    """Returns the libraries' variables, and NCCL's interface while the gang runs and after its release."""
    left = [k for k in os.environ if k.startswith(("HOROVOD_", "GLOO_", "MASTER_"))]
    told = os.environ.get("NCCL_SOCKET_IFNAME")
    collective._release()
    return [left, told, os.environ.get("NCCL_SOCKET_IFNAME")]


@pytest.mark.distributed
@pytest.mark.parametrize("name", GANGS)
@pytest.mark.parametrize("own", [None, "ib0"])
def test_connecting_leaves_no_variable_but_the_interface_of_nccl_until_the_gang_ends(monkeypatch, name, own):
    """NCCL connects at its first operation, long after the gang started; a user's setting stays."""
    if own is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", own)
    assert run_ranks(2, name, _interface_told) == [[[], own or f"={interface_of('127.0.0.1')}", own]] * 2


def _tie(
    by: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer, collective: Collective
) -> GradientSync:
    """Returns one all-reduce for all gradients, or one per parameter during the backward pass."""
    if by == "flat":
        return synchronize(module, optimizer, collective)
    return GradientAllReduce(module, optimizer, collective, bucket_bytes=1)


def _branch(network: Net, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Some parameters get a gradient only for some rows."""
    y = network.always(x) + 0.0 * network.zero(x)
    if (x > 0).any():
        y = y + torch.where((x[:, :1] > 0), network.positive(x), torch.zeros(1))
    return {"logits": y, "hidden": network.hidden(x)}


# Rows per step, with two features each. No row takes the branch, then the first row, the last row, or all
# rows. The second rank has no row in the step with one row.
STEPS = [[-1.0, -2.0, -3.0], [1.0, -2.0, -3.0], [-4.0], [-1.0, -2.0, 3.0], [1.0, 2.0], [-1.0, -1.0]]


def _branches(by: str, collective: Collective) -> Any:
    """Returns the weights, and the parameters with a gradient, after steps with weight decay."""
    torch.manual_seed(0)
    names = ("always", "positive", "never", "zero", "hidden")
    module = Net(_branch, **{name: torch.nn.Linear(2, 1) for name in names})
    # Unlike Adam's, its steps also show gradients that are a multiple of the mean.
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=0.5)
    sync = _tie(by, module, optimizer, collective)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    had: list[list[str]] = []
    for step in STEPS:
        rows = torch.tensor([[v, v / 2] for v in step])
        mine = rows[collective.rank :: collective.size]
        sync.optimizer.zero_grad()
        parts = [part for part in mine.tensor_split(2) if len(part)]
        for i, part in enumerate(parts):
            with sync.micro_batch(last=i == len(parts) - 1):
                output = sync.module(part)
                output = output["logits"] if isinstance(output, dict) else output[0]
                ((output - 1).square().sum() / len(rows) * sync.loss_factor).backward()
        if not parts:
            sync.backward_without_rows()
        sync.reduce()
        had.append([name for name, child in module.named_children() if child.weight.grad is not None])
        sync.step(scaler)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    return [had, weights]


@pytest.mark.distributed
@pytest.mark.parametrize("name", GANGS)
@pytest.mark.parametrize(("size", "by"), [(1, "flat"), (2, "flat"), (2, "buckets")])
def test_parameters_without_a_gradient_on_any_rank_stay_as_on_one(name, size, by):
    """Zeros instead would let weight decay and momentum change the parameters."""
    expected_had, expected = run_one(partial(_branches, "flat"))
    used, unused = ["always", "positive", "zero"], ["always", "zero"]
    assert expected_had == [unused, used, unused, used, used, unused]
    for had, weights in (one for road in _results(size, name, partial(_branches, by)) for one in road):
        assert had == expected_had
        assert weights == pytest.approx(expected, abs=1e-6)


def test_a_missing_library_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr("ringspark.estimators.collectives.find_spec", lambda name: None)
    refusal = r"not installed; set collective='torch', or build Horovod for this torch"
    with pytest.raises(ValueError, match=refusal):
        collective_class("horovod")


@pytest.mark.parametrize(
    ("name", "problem"),
    [("localhost", "resolves to 127.0.0.1"), ("no.such.host.invalid", "does not resolve")],
)
def test_a_horovod_that_would_bind_to_a_wrong_name_is_refused_before_it_starts(monkeypatch, name, problem):
    """Applies to several hosts only; the build of the setup script binds to the interface."""
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    two = Member(rank=0, size=2, local_rank=0, local_size=1, host="10.77.0.9")
    _check_name(two)
    monkeypatch.setattr("horovod.__version__", "0.28.1")
    with pytest.raises(ValueError, match=rf"{name} {problem} on the host with the address 10.77.0.9; add"):
        _check_name(two)
    _check_name(replace(two, local_size=2))


def test_the_interface_of_loopback_is_found():
    assert interface_of("127.0.0.1") is not None
    assert interface_of("203.0.113.7") is None
