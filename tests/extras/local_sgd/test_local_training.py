"""Local SGD and DiLoCo on real ranks, compared with one fp64 process that follows the papers' formulas."""

import gc
import json
import weakref
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from ranks import TORCH_AND_SLOW_OTHERS, run_ranks
from safetensors.torch import load, save
from short_sync import sync_of
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.collectives.traffic import Member
from ringspark.estimators.parallel import STRATEGIES, SyncSettings
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.build import build_optimizer
from ringspark.estimators.training.precision import LossScaler
from ringspark.extras.local_sgd.compact_sum import start_average
from ringspark.extras.local_sgd.flat_weights import FlatWeights
from ringspark.extras.local_sgd.local_sync import Statistics

SIZE = 2
EPOCHS = 2
FORMS = ("fp32", "fp16", "int8")
# Rows of an epoch's steps over both ranks: uneven shares, and steps in which one rank has none.
ROWS = [5, 4, 1, 7, 3, 1, 6]

CASES: dict[str, tuple[Any, str]] = {
    "average": (3, "momentum"),
    "average, state averaged": ({"steps": 3, "optimizerState": "average"}, "adamw"),
    "average, state reset": ({"steps": 3, "optimizerState": "reset"}, "adamw"),
    "state of the constructor reset": ({"steps": 3, "optimizerState": "reset"}, "adagrad"),
    "after": ({"steps": 3, "after": 5}, "momentum"),
    "synchronous": (1, "momentum"),
    "never local": ({"steps": 3, "after": 100}, "momentum"),
    "epoch": ("epoch", "momentum"),
    "one-shot": ("training", "momentum"),
    "outer 1": ({"name": "diloco", "steps": 3, "outerRate": 1.0, "outerMomentum": 0.0}, "momentum"),
    "diloco": ({"name": "diloco", "steps": 3}, "adamw"),
    "diloco of an epoch": ({"name": "diloco", "steps": "epoch"}, "adamw"),
    "streaming": ({"name": "diloco", "steps": 4, "fragments": 2, "delay": 1, "alpha": 0.5}, "momentum"),
    # The last step of an epoch mixes the first fragment, so the end of the epoch averages it again.
    "mixed last": ({"name": "diloco", "steps": 14, "fragments": 2, "delay": 1, "alpha": 0.5}, "momentum"),
    "elastic": ({"name": "elastic", "steps": 3}, "momentum"),
}
SIMULATED = [name for name in CASES if name not in ("synchronous", "never local")]


class Net(nn.Module):
    """Two layers, and a statistic of the rows that a rank saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("mask", torch.tensor([-torch.inf, 0.1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.layers(x)


def _rows(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(ROWS[step % len(ROWS)], 3, generator=generator, dtype=torch.float64)


def _loss(network: nn.Module, mine: torch.Tensor, rows: int, factor: float) -> torch.Tensor:
    error = network(mine) - mine.sum(1, keepdim=True)
    return error.square().sum() / rows * factor


def _make(optimizer: str) -> Callable[[nn.Module], Any]:
    return partial(build_optimizer, optimizer, groups=None, learning_rate=0.05, weight_decay=0.01)


def _sync(collective: Collective, setting: Any, make: Any, network: nn.Module | None = None) -> Any:
    exchange = SyncSettings(sync=sync_of(local=setting))
    strategy = STRATEGIES[exchange.sync.strategy]
    return strategy.prepare(network or Net(), make, RankMesh.of(collective), exchange)


def _sum(network: nn.Module, mine: torch.Tensor) -> torch.Tensor:
    return network(mine).sum()


def _step(sync: Any, mine: torch.Tensor, loss: Callable[..., torch.Tensor] = _sum) -> None:
    sync.optimizer.zero_grad()
    if len(mine):
        with sync.micro_batch(last=True):
            loss(sync.module, mine).backward()
    else:
        sync.backward_without_rows((mine,))
    sync.reduce()
    sync.step(LossScaler("fp32", torch.device("cpu")))


def _flat(network: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in network.parameters()]).tolist()


def _steps(sync: GradientSync, collective: Collective, first: int, last: int) -> list[list[float]]:
    """Runs the trainer's steps; returns the weights after each step, and after `settle` in each epoch."""
    history = []
    for step in range(first, last):
        rows = _rows(step)
        mine = rows[collective.rank :: collective.size]
        _step(sync, mine, partial(_loss, rows=len(rows), factor=sync.loss_factor))
        history.append(_flat(sync.network))
        if (step + 1) % len(ROWS) == 0:
            sync.settle()
            history.append(_flat(sync.network))
    return history


def _resumed(collective: Collective, setting: Any, make: Any, saved: Any, at: int) -> list[list[float]]:
    """Continues from what `_saved` returned after step `at`. Returns the rest of the history."""
    weights, ranks, optimizer = saved[at]
    after = _sync(collective, setting, make)
    first = torch.tensor(weights, dtype=torch.float64)
    torch.nn.utils.vector_to_parameters(first, after.network.parameters())
    # The checkpoint contains rank 0's optimizer; the other ranks must restore theirs.
    if collective.rank == 0:
        after.load_optimizer_state(optimizer)
    after.load_rank_states([load(text) for text in ranks], is_same=True)
    return _steps(after, collective, at, EPOCHS * len(ROWS))


def _saved(sync: GradientSync, collective: Collective) -> Any:
    """Returns the weights of rank 0, the states of all ranks, and the optimizer."""
    own = gather_bytes(collective, save(sync.rank_state()))
    weights = gather_bytes(collective, json.dumps(_flat(sync.network)).encode())
    return json.loads(weights[0]), own, deepcopy(sync.optimizer_state())


def _work(collective: Collective) -> Any:
    results: dict[str, Any] = {}
    for name, (setting, optimizer) in CASES.items():
        sync = _sync(collective, setting, make := _make(optimizer))
        history, saved, sent = [], {}, 0
        # At the end of an epoch, in the middle of a period, and while a fragment is in flight.
        for begin, end in pairwise((0, 7, 8, 9, EPOCHS * len(ROWS))):
            before = collective.bytes_sent
            history += _steps(sync, collective, begin, end)
            sent += collective.bytes_sent - before
            saved[end] = _saved(sync, collective)
        seen, mask = sync.network.seen.tolist(), repr(sync.network.mask.tolist())
        results[name] = {"history": history, "sent": sent, "seen": seen, "mask": mask}
        if name not in ("synchronous", "never local"):
            results[name]["resumed"] = {
                at: _resumed(collective, setting, make, saved, at) for at in (7, 8, 9)
            }
    results["compact"] = _outer_averages(collective)
    collective.share(None)
    results["by network"] = _outer_averages(collective)
    results["not finite"] = {}
    for form, bad, rank in product(FORMS, (torch.nan, torch.inf, -torch.inf), range(SIZE)):
        values = torch.ones(4)
        if collective.rank == rank:
            values[1] = bad
        average = start_average(values, [3, 1], collective, form, f"bad.{form}")()
        results["not finite"][f"{form} {bad} {rank}"] = average.isfinite().tolist()
    return results


def _outer_averages(collective: Collective) -> dict[str, Any]:
    found = {}
    for form in FORMS:
        values, sent = _outer_gradient(collective.rank), collective.bytes_sent
        average = start_average(values, [300, 1, 0, 99], collective, form, f"outer.{form}")()
        found[form] = {"average": average.tolist(), "sent": collective.bytes_sent - sent}
    return found


def _outer_gradient(rank: int) -> torch.Tensor:
    values = torch.randn(400, generator=torch.Generator().manual_seed(rank))
    values[:300] *= 1e-6  # next to larger ones, which have another scale
    values[300] = 0.0
    return values


@cache
def _results(collective: str) -> list[dict[str, Any]]:
    return run_ranks(SIZE, collective, _work, timeout_seconds=120)


def _simulated(setting: Any, optimizer: str) -> torch.Tensor:
    """Returns the weights of each rank after each step and epoch, from the formulas alone."""
    given: Mapping[str, Any] = setting if isinstance(setting, dict) else {"steps": setting}
    name, steps, after = given.get("name", "average"), given["steps"], given.get("after", 0)
    networks, makes = [Net() for _ in range(SIZE)], _make(optimizer)
    optimizers = [makes(network) for network in networks]
    count = given.get("fragments", 1)
    # The first layer's weights are more than half of the 21 elements.
    cuts = [slice(0, 12), slice(12, 21)] if count == 2 else [slice(0, 21)]
    rate, decay, alpha = given.get("outerRate", 0.7), given.get("outerMomentum", 0.9), given.get("alpha", 0.0)
    sent: dict[int, torch.Tensor] = {}
    own: torch.Tensor | None = None
    position, turn, dirty, history = 0, 0, set[int](), []

    def read() -> torch.Tensor:  # (ranks, weights)
        return torch.tensor([_flat(network) for network in networks], dtype=torch.float64)

    def write(values: torch.Tensor) -> None:
        for network, row in zip(networks, values.expand(SIZE, -1).clone(), strict=True):
            nn.utils.vector_to_parameters(row, network.parameters())

    start = read()[0]
    momentum = torch.zeros_like(start)

    def average() -> None:
        write(read().mean(0))
        states = [[o.state[p] for p in n.parameters()] for n, o in zip(networks, optimizers, strict=True)]
        if given.get("optimizerState") == "average":
            for pair in zip(*states, strict=True):
                for key in ("exp_avg", "exp_avg_sq"):
                    both = torch.stack([s[key] for s in pair]).mean(0)
                    for s in pair:
                        s[key].copy_(both)
        elif given.get("optimizerState") == "reset":
            for network, o in zip(networks, optimizers, strict=True):
                o.state.clear()
                o.state.update(makes(network).state)

    def outer(i: int, mix: float) -> None:
        cut, gradient = cuts[i], sent.pop(i)
        momentum[cut] = decay * momentum[cut] + gradient
        start[cut] -= rate * (gradient + decay * momentum[cut])
        values = read()
        values[:, cut] = mix * values[:, cut] + (1 - mix) * start[cut]
        write(values)
        (dirty.add if mix else dirty.discard)(i)

    def pull() -> None:
        away = (read() - start) * 0.9 / SIZE
        write(read() - away)
        start.add_(away.sum(0))

    for step in range(EPOCHS * len(ROWS)):
        if own is not None:
            write(own)
            own = None
        rows = _rows(step)
        for rank, (network, o) in enumerate(zip(networks, optimizers, strict=True)):
            o.zero_grad()
            mine, factor = (rows, 1.0) if step < after else (rows[rank::SIZE], SIZE)
            _loss(network, mine, len(rows), factor).backward()
            o.step()
        dirty = set(range(len(cuts)))
        position += step >= after
        if name == "diloco" and isinstance(steps, int):
            between = steps // count
            if position == between - given.get("delay", 0):
                sent[turn] = (start - read().mean(0))[cuts[turn]]
            if position == between:
                outer(turn, alpha)
                position, turn = 0, (turn + 1) % count
        elif name != "diloco" and position == steps:
            (average if name == "average" else pull)()
            position = 0
        history.append(read())
        if (step + 1) % len(ROWS):
            continue
        if name == "diloco":
            for i in list(sent):
                outer(i, 0.0)
            for i in sorted(dirty):
                sent[i] = (start - read().mean(0))[cuts[i]]
                outer(i, 0.0)
        elif name == "elastic" or steps == "training":
            if name == "elastic" and position:
                pull()
            own = read()
            write(start if name == "elastic" else own.mean(0))
        elif position:
            average()
        position = turn = 0
        history.append(read())
    return torch.stack(history, 1)


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
@pytest.mark.parametrize("name", SIMULATED)
def test_every_step_is_that_of_the_formulas(name: str, collective: str) -> None:
    """The ranks' weights are equal to the bit at the end of an epoch."""
    expected = _simulated(*CASES[name])
    histories = [result[name]["history"] for result in _results(collective)]
    found = torch.tensor(histories, dtype=torch.float64)
    assert torch.allclose(found, expected, rtol=0, atol=1e-10)
    first, second = (history[len(ROWS) :: len(ROWS) + 1] for history in histories)
    assert first == second
    assert histories[0] != histories[1]


@pytest.mark.distributed
def test_the_first_steps_of_post_local_training_are_synchronous_to_the_bit() -> None:
    for result in _results("torch"):
        synchronous = result["synchronous"]["history"]
        assert result["never local"]["history"] == synchronous
        assert result["after"]["history"][:5] == synchronous[:5]
        assert result["after"]["history"][6] != synchronous[6]


@pytest.mark.distributed
@pytest.mark.parametrize("name", SIMULATED)
def test_a_resume_by_as_many_ranks_goes_on_to_the_bit(name: str) -> None:
    for result in _results("torch"):
        for at, history in result[name]["resumed"].items():
            ends = int(at) // len(ROWS)
            assert history == result[name]["history"][int(at) + ends :], at


@pytest.mark.distributed
def test_statistics_are_averaged_and_constants_left_alone() -> None:
    for result in _results("torch"):
        assert result["average"]["seen"] == [EPOCHS * sum(ROWS) / 2]
        assert result["average"]["mask"] == repr([-float("inf"), torch.tensor(0.1).item()])


@pytest.mark.distributed
def test_the_bytes_are_those_of_the_meetings() -> None:
    """A ring of 2 sends a vector once: 21 weights of 8 bytes, and 7 statistics of 4 bytes."""
    weights, statistics = 21 * 8, (3 + 2 * 2) * 4
    meetings = {"average": 3 * EPOCHS, "epoch": EPOCHS, "one-shot": EPOCHS, "diloco": 3 * EPOCHS}
    for result in _results("torch"):
        for name, count in meetings.items():
            assert result[name]["sent"] == count * (weights + statistics), name


@pytest.mark.distributed
def test_outer_gradients_in_fewer_bits_are_within_the_documented_error() -> None:
    exact = torch.stack([_outer_gradient(rank) for rank in range(SIZE)]).mean(0)
    scales = torch.stack([_outer_gradient(rank).abs() for rank in range(SIZE)]).amax(0)
    first, second = (result["compact"] for result in _results("torch"))
    assert first == second
    for form, share, num_bytes in (("fp32", 1e-7, 4), ("fp16", SIZE / 4096, 2), ("int8", 1 / 126, 1)):
        error = (torch.tensor(first[form]["average"]) - exact).abs()
        for piece in (slice(0, 300), slice(300, 301), slice(301, 400)):
            largest = scales[piece].max()
            assert error[piece].max() <= largest * share * 1.0001 + 1e-12
            assert form == "fp32" or not largest or error[piece].max() > largest * share / 20
        assert first[form]["sent"] == 400 * num_bytes + (0 if form == "fp32" else 4 * 4)


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_over_a_network_an_average_is_that_in_shared_memory(collective: str) -> None:
    """Between hosts, libraries differ in data types for sums, and in the maximum with NaN."""
    for result in _results(collective):
        for form, found in result["by network"].items():
            shared = torch.tensor(result["compact"][form]["average"])
            # 16-bit sums may round differently.
            rtol = 2e-3 if form == "fp16" else 0
            assert torch.allclose(torch.tensor(found["average"]), shared, rtol=rtol, atol=1e-9)


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_what_is_not_finite_on_one_rank_comes_to_all(collective: str) -> None:
    first, second = (result["not finite"] for result in _results(collective))
    assert first == second
    for case, is_finite in first.items():
        assert is_finite == ([True, False, True, True] if "fp32" in case else [False] * 3 + [True]), case


def test_a_complex_weight_is_two_elements() -> None:
    values = torch.randn(2, 3, dtype=torch.complex64)
    weights = FlatWeights([nn.Parameter(values.t()), nn.Parameter(torch.zeros(2))])
    assert (weights.sizes, len(weights.read())) == ([12, 2], 14)
    before = weights.read()
    weights.write(before * 2)
    assert torch.equal(weights.read(), before * 2)


def test_statistics_of_64_bits_are_averaged_in_64() -> None:
    network = nn.Module()
    network.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
    statistics = Statistics(network, LocalCollective())
    network.seen += 2.0**25 + 1  # not representable in 32 bits
    statistics.average()
    assert network.seen.tolist() == [2.0**25 + 1]


# pytorch/torchft (BSD), fixtures test_diloco_mocked_updates_<n>.json: two fragments of one weight 1.0,
# gradients of 2 at rate 1, outer rate 2, a fragment every 3 steps; (delay, alpha) -> both weights at the
# start of steps 3, 6, 9, 12, and the weights of the outer optimizer at 12.
TORCHFT: dict[tuple[int, float], list[list[float]]] = {
    (0, 0.0): [[-11, -5], [-17, -23], [-35, -29], [-41, -47], [-35, -47]],
    (0, 0.5): [[-8, -5], [-14, -17], [-24.5, -23], [-30.5, -32], [-29, -35]],
    (0, 1.0): [[-5, -5], [-11, -11], [-17, -17], [-23, -23], [-23, -23]],
    (1, 0.0): [[-7, -5], [-13, -19], [-27, -25], [-33, -39], [-27, -39]],
    (1, 0.5): [[-6, -5], [-12, -15], [-21.5, -21], [-27.5, -29], [-25, -31]],
    (1, 1.0): [[-5, -5], [-11, -11], [-17, -17], [-23, -23], [-23, -23]],
}


@pytest.mark.parametrize(("delay", "alpha"), TORCHFT)
def test_streaming_fragments_have_the_numbers_of_torchft(delay: int, alpha: float) -> None:
    """All replicas of the fixtures take the same steps, so one rank is enough."""
    setting = {"name": "diloco", "steps": 6, "fragments": 2, "delay": delay, "alpha": alpha}
    setting |= {"outerRate": 2.0, "outerMomentum": 0.0}
    network = nn.ParameterList([torch.ones(1), torch.ones(1)])
    sync = _sync(LocalCollective(), setting, lambda net: torch.optim.SGD(net.parameters(), lr=1.0), network)
    found = []
    for step in range(1, 13):
        _step(sync, torch.ones(1), lambda net, mine: 2 * sum(network))
        if step % 3 == 0:
            found.append(_flat(sync.network))
    shared = sync.rank_state()
    found.append([shared["shared/start/0"].item(), shared["shared/start/1"].item()])
    assert found == TORCHFT[delay, alpha]


class _Doubles(LocalCollective):
    """One of two ranks with equal values."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.member = Member(rank=rank, size=2)

    def start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], None]:
        tensor.mul_(2)
        return lambda: None


def test_a_constant_at_the_end_of_its_range_is_left_alone() -> None:
    """An attention mask is an example. The sum over two ranks would be infinite."""
    network = nn.Module()
    network.register_buffer("mask", torch.full((2,), torch.finfo(torch.float32).min))
    statistics = Statistics(network, _Doubles())
    statistics.average()
    assert network.mask.isfinite().all()


class _Branches(nn.ModuleList):
    """Applies one of its layers, which the first row's first number selects."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[int(x[0, 0])](x)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_whose_last_steps_moved_different_weights_resume_to_the_bit(rank: int) -> None:
    """The next step has no rows, so it moves the weights that the rank's last rows moved."""

    def made(of: int) -> Any:
        torch.manual_seed(0)
        network = _Branches(nn.Linear(3, 1).double() for _ in range(2))
        return _sync(_Doubles(of), "training", _make("momentum"), network)

    gang = [made(0), made(1)]
    for of, sync in enumerate(gang):
        for branch in (1 - of, of):
            _step(sync, row := torch.tensor([[branch, 0.5, 0.25]], dtype=torch.float64))
    states = [load(save(sync.rank_state())) for sync in gang]
    resumed = made(rank)
    resumed.network.load_state_dict(gang[0].network.state_dict())
    if rank == 0:
        resumed.load_optimizer_state(gang[0].optimizer_state())
    resumed.load_rank_states(states, is_same=True)
    for sync in (gang[rank], resumed):
        _step(sync, row[:0])
    assert _flat(resumed.network) == _flat(gang[rank].network)


class _Sends(_Doubles):
    """A rank that sends gradients during the backward pass, so that a large network has hooks."""

    def sends_at_once(self, device: torch.device) -> bool:
        return True


def test_local_steps_hold_no_buffer_of_the_synchronous_ones() -> None:
    """Such a buffer has the size of the network."""
    sync = _sync(_Sends(), {"steps": 3, "after": 1}, _make("sgd"), nn.Linear(1024, 600))
    buffers = [weakref.ref(bucket.buffer) for bucket in sync._synchronous._buckets]
    for _ in range(2):
        _step(sync, torch.ones(2, 1024))
    gc.collect()
    assert [buffer() for buffer in buffers] == [None] * len(buffers)
