"""Asynchronous training by parameter server or shared memory: the ranks of one gang run all cases."""

import gc
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ranks import run_ranks
from short_sync import sync_of
from torch import nn

from ringspark.estimators import WorkerError
from ringspark.estimators.collectives import Collective, CollectiveError
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.collectives.rendezvous.channel import prove_as_client
from ringspark.estimators.collectives.traffic import Member
from ringspark.estimators.options.sync import ParameterServer
from ringspark.estimators.parallel import STRATEGIES, SyncSettings
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.build import build_optimizer
from ringspark.estimators.training.precision import LossScaler
from ringspark.extras.asynchronous import wire
from ringspark.extras.asynchronous.hogwild import share_memory
from ringspark.extras.asynchronous.links import OwnLink, RemoteLink
from ringspark.extras.asynchronous.parameter_server import ServedSync
from ringspark.extras.asynchronous.server import ShardServer
from ringspark.extras.asynchronous.table import ParameterTable, WorkerLeftError

BSP: dict[str, Any] = {"name": "bsp"}
SSP0 = {"name": "ssp", "staleness": 0, "correction": "none"}
SSP2 = {"name": "ssp", "staleness": 2, "correction": "staleness"}
ASP = {"name": "asp", "correction": "none"}
HOGWILD = {"name": "hogwild"}
APART: dict[str, dict[str, Any]] = {"ssp": SSP2, "asp": ASP, "hogwild": HOGWILD}
OPTIMIZERS = ("sgd", "adamw", "adam1bit")
STEPS = 12
# In the last steps there are single rows, so some ranks have none.
ROWS = [6, 5, 7, 1] * (STEPS // 4)


class Net(nn.Module):
    """Parameters of all sorts: with another memory order, sometimes used, never used, frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 7), nn.Linear(7, 1)
        self.never, self.sometimes, self.frozen = nn.Linear(2, 2), nn.Linear(7, 1), nn.Linear(7, 1)
        self.frozen.requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(7, 5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        output = self.second(hidden) + self.frozen(hidden) + (hidden @ self.turned.t()).sum(1, keepdim=True)
        if (x[:, 0] > 0.8).any():
            output = output + self.sometimes(hidden)
        return output  # type: ignore[no-any-return]


def _prepare(
    collective: Collective,
    consistency: Mapping[str, Any],
    optimizer: Any,
    rate: float = 0.05,
    decay: float = 0.1,
    module: nn.Module | None = None,
) -> GradientSync:
    """Prepares `module`, or a `Net`, with an optimizer by its name or by a function of the module."""
    settings = SyncSettings(sync=sync_of(apart=consistency), timeout_seconds=30)
    by_name = lambda module: build_optimizer(optimizer, module, None, rate, decay)  # noqa: E731
    make = optimizer if callable(optimizer) else by_name
    strategy = STRATEGIES[settings.sync.strategy]
    return strategy.prepare(module or Net(), make, RankMesh.of(collective), settings)


def _train(collective: Collective, sync: GradientSync, steps: int = STEPS, max_norm: Any = None) -> None:
    scaler = LossScaler("fp32", torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        rows = torch.rand(ROWS[step % len(ROWS)], 3, generator=generator)
        mine = rows[collective.rank :: collective.size]
        sync.optimizer.zero_grad()
        sync.optimizer.param_groups[0]["lr"] *= 0.95  # a schedule
        if len(mine):
            loss = (sync.module(mine) - mine.sum(1, keepdim=True)).square().sum() / len(rows)
            (loss * sync.loss_factor).backward()
        else:
            sync.backward_without_rows((mine,))
        sync.reduce()
        if max_norm is not None:
            sync.clip_gradients(max_norm)
        sync.step(scaler)


def _weights(sync: GradientSync) -> list[float]:
    return torch.cat([p.detach().flatten() for p in sync.network.parameters()]).tolist()  # type: ignore[no-any-return]


def _state(sync: GradientSync) -> list[float]:
    """Returns the optimizer's whole state on rank 0. Runs on every rank."""
    own = sync.optimizer_state()
    values = [
        v.double().flatten() for n in sorted(own) for _, v in sorted(own[n].items()) if torch.is_tensor(v)
    ]
    return torch.cat(values).tolist() if values else []


def _in_step(collective: Collective, optimizer: str) -> dict[str, Any]:
    result = {}
    for name, consistency in {"all-reduce": BSP, "server": SSP0}.items():
        sync = _prepare(collective, consistency, optimizer)
        _train(collective, sync)
        sync.settle()
        result[name] = {"weights": _weights(sync), "state": _state(sync)}
        clipped = _prepare(collective, consistency, optimizer)
        _train(collective, clipped, max_norm=0.3)
        result[name]["clipped"] = _weights(clipped)
    return result


def _apart(collective: Collective, consistency: dict[str, Any]) -> dict[str, Any]:
    """Trains, synchronizes and saves; trains on, and trains again from the saved state."""
    sync = _prepare(collective, consistency, "momentum")
    _train(collective, sync)
    sync.settle()
    settled = _weights(sync)
    own, whole = sync.rank_state(), sync.optimizer_state()
    saved = {name: value.clone() for name, value in sync.network.state_dict().items()}
    other = _prepare(collective, consistency, "momentum")
    text = gather_bytes(collective, json.dumps([sorted(whole)]).encode())[0]
    states = [{name: value.clone() for name, value in own.items()}] * collective.size
    if collective.rank == 0:
        other.load_optimizer_state(whole)
    elif isinstance(other, ServedSync):
        other.load_optimizer_state({})
    with torch.no_grad():
        for name, value in other.network.state_dict().items():
            value.copy_(saved[name])
    other.load_rank_states(states, is_same=True)
    collective.barrier()
    other.settle()
    return {"settled": settled, "loaded": _weights(other), "names": json.loads(text)}


def _literal(collective: Collective) -> dict[str, Any]:
    """Steps a parameter that is sharded over all servers, with a gradient in another memory order."""
    sync = _prepare(collective, ASP, "sgd", rate=0.5, decay=0.0)
    parameters = sync._shard.parameters
    index = next(i for i, p in enumerate(parameters) if p.shape == (5, 7))
    with torch.no_grad():
        parameters[index].fill_(0)
    sync.load_rank_states([], is_same=False)
    gradient = torch.arange(35.0).reshape(5, 7)
    seen = []
    for _ in range(2):
        parameters[index].grad = gradient
        sync.optimizer.step()
        seen.append(parameters[index].tolist())
    sync.settle()
    pulled = parameters[index]
    return {"seen": seen, "pulled": pulled.tolist(), "stride": list(pulled.stride())}


def _convex(collective: Collective) -> dict[str, Any]:
    """Solves least squares by Hogwild; then one rank writes, and the other one reads."""
    generator = torch.Generator().manual_seed(0)
    features, truth = torch.randn(600, 8, generator=generator), torch.linspace(-1, 1, 8)
    module = nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        module.weight.zero_()
    make = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    sync = _prepare(collective, HOGWILD, make, module=module)
    scaler = LossScaler("fp32", torch.device("cpu"))
    own = torch.Generator().manual_seed(collective.rank)
    for _ in range(300):
        rows = features[torch.randint(0, 600, (8,), generator=own)]
        sync.optimizer.zero_grad()
        loss = (sync.module(rows)[:, 0] - rows @ truth).square().mean() / collective.size
        (loss * sync.loss_factor).backward()
        sync.step(scaler)
    sync.settle()
    error = (module.weight[0] - truth).abs().max().item()
    before = sorted(os.listdir("/dev/shm"))
    collective.barrier()
    if collective.rank == 0:
        with torch.no_grad():
            module.weight[0, 3] = 42.0
    collective.barrier()
    files = [f for f in before if "hogwild" in f]
    return {"error": error, "read": module.weight[0, 3].item(), "files": files}


def _left_over(collective: Collective) -> list[str]:
    """Returns threads, memory and connections after the rank has left. Runs on every rank."""
    sockets = lambda: len(psutil.Process().net_connections("tcp"))  # noqa: E731
    before = sockets()
    collective._release()
    gc.collect()
    threads = [thread.name for thread in threading.enumerate() if "parameter" in thread.name]
    with open("/proc/self/maps") as maps:
        mapped = [line for line in maps if "ringspark-hogwild" in line]
    collective.barrier()
    return [*threads, *mapped, *([] if sockets() < before else ["sockets"])]


class _Counting(torch.optim.SGD):
    """Keeps a plain number for each parameter, as a user's optimizer may."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["calls"] = self.state[parameter].get("calls", 0) + 1


def _gaps() -> nn.Module:
    """A parameter with gaps between its elements, and contiguous ones."""
    first = nn.Parameter(torch.arange(24.0).reshape(4, 6)[:, :3])
    return nn.ParameterDict({"first": first, "second": nn.Parameter(torch.full((40,), 7.0))})


def _unusual(collective: Collective) -> dict[str, Any]:
    """Trains with this network and this optimizer by Hogwild, saves and loads."""
    make = lambda m: _Counting(m.parameters(), lr=0.1)  # noqa: E731
    sync, other = (_prepare(collective, HOGWILD, make, module=_gaps()) for _ in range(2))
    weights = _weights(sync)
    sync.step(LossScaler("fp32", torch.device("cpu")))
    for state in sync.optimizer.state.values():
        state["calls"] += collective.rank
    own, whole = sync.rank_state(), sync.optimizer_state()
    if collective.rank == 0:
        other.load_optimizer_state(whole)
    other.load_rank_states([own] * collective.size, is_same=True)
    return {"weights": weights, "calls": [state["calls"] for state in other.optimizer.state.values()]}


def _refusals(collective: Collective) -> str:
    try:
        _prepare(collective, ASP, "lamb")
    except ValueError as error:
        return str(error)
    return ""


def _work(collective: Collective) -> Any:
    return {
        **{optimizer: _in_step(collective, optimizer) for optimizer in OPTIMIZERS},
        **{name: _apart(collective, consistency) for name, consistency in APART.items()},
        "literal": _literal(collective),
        "convex": _convex(collective),
        "unusual": _unusual(collective),
        "refusals": _refusals(collective),
        "left over": _left_over(collective),
    }


@cache
def _results(size: int, collective: str) -> list[dict[str, Any]]:
    return run_ranks(size, collective, _work, timeout_seconds=120)


GANGS = [
    (2, "torch"),
    *(pytest.param(*gang, marks=pytest.mark.slow) for gang in ((3, "torch"), (2, "horovod"))),
]
pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("size", "collective"), GANGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_staleness_0_is_the_training_by_all_reduce(size: int, collective: str, optimizer: str) -> None:
    """Equality is bitwise: a sum of two numbers has one order, and SGD works per element."""
    results = _results(size, collective)
    server = [result[optimizer]["server"] for result in results]
    reduced = results[0][optimizer]["all-reduce"]
    assert all(own["weights"] == server[0]["weights"] for own in server)
    if (size, optimizer) == (2, "sgd"):
        assert server[0]["weights"] == reduced["weights"]
    assert server[0]["weights"] == pytest.approx(reduced["weights"], abs=1e-6)
    assert server[0]["state"] == pytest.approx(reduced["state"], abs=1e-6)
    assert all(own["clipped"] == server[0]["clipped"] for own in server)
    assert server[0]["clipped"] == pytest.approx(reduced["clipped"], abs=1e-6)
    if optimizer == "sgd":  # Adam's steps hardly depend on the gradients' scale
        assert reduced["clipped"] != pytest.approx(reduced["weights"], abs=1e-2)


@pytest.mark.parametrize(("size", "collective"), GANGS)
@pytest.mark.parametrize("name", APART)
def test_settled_ranks_have_equal_weights_and_load_them_again(size: int, collective: str, name: str) -> None:
    results = [result[name] for result in _results(size, collective)]
    assert all(own["settled"] == results[0]["settled"] for own in results)
    assert all(own["loaded"] == results[0]["settled"] for own in results)
    assert "turned" in results[0]["names"][0]


@pytest.mark.parametrize(("size", "collective"), GANGS)
def test_every_push_moves_a_sharded_parameter(size: int, collective: str) -> None:
    """Each worker pushes twice. Each push moves the weights by its share of the rate 0.5."""
    gradient = torch.arange(35.0).reshape(5, 7)
    for result in _results(size, collective):
        literal = result["literal"]
        assert torch.allclose(torch.tensor(literal["pulled"]), -gradient)
        assert literal["stride"] == [1, 5]
        for clock, seen in enumerate(literal["seen"], 1):
            pushes = torch.tensor(seen).flatten()[1:] / gradient.flatten()[1:] * -2 * size
            # It includes at least its own writes, and any received writes of the other workers.
            assert torch.allclose(pushes, pushes.round(), atol=1e-4)
            assert pushes.min() >= clock - 1e-4


@pytest.mark.parametrize(("size", "collective"), GANGS)
def test_hogwild_solves_a_convex_problem_in_one_memory(size: int, collective: str) -> None:
    for result in _results(size, collective):
        assert result["convex"]["error"] < 1e-3
        assert result["convex"]["read"] == 42.0
        assert result["convex"]["files"] == []


@pytest.mark.parametrize(("size", "collective"), GANGS)
def test_nothing_is_left_of_servers_and_shared_memory(size: int, collective: str) -> None:
    assert [result["left over"] for result in _results(size, collective)] == [[]] * size


def test_hogwild_takes_any_layout_and_each_rank_its_own_plain_state() -> None:
    expected = [float(6 * row + column) for row in range(4) for column in range(3)] + [7.0] * 40
    for rank, result in enumerate(_results(2, "torch")):
        assert result["unusual"]["weights"] == expected
        assert result["unusual"]["calls"] == [rank + 1] * 2


def test_tensors_of_any_dtype_are_read_in_place() -> None:
    sender, receiver = socket.socketpair()
    dtypes = (torch.int8, torch.complex128, torch.bfloat16, torch.complex128, torch.float64)
    tensors = [torch.arange(3).to(dtype) for dtype in dtypes]
    with sender, receiver:
        wire.send(sender, wire.VALUES, {}, tensors)
        _, _, payload = wire.receive(receiver, 1 << 20)
        found = wire.split_payload(payload, [(3, dtype) for dtype in dtypes])
    assert all(torch.equal(*pair) for pair in zip(found, tensors, strict=True))


def test_an_optimizer_of_whole_parameters_is_refused() -> None:
    for result in _results(2, "torch"):
        assert "optimizer Lamb needs whole parameters; take one of ASGD, " in result["refusals"]


def _loses_rank_1(consistency: dict[str, Any], folder: str, collective: Collective, *_: Any) -> str:
    """Rank 1 disappears after its step 3, as if killed: its connections end without a message."""
    sync = _prepare(collective, consistency, "sgd")
    told = Path(folder) / "told"
    if collective.rank == 1:
        _train(collective, sync, steps=3)
        collective.abort()
        while not told.exists():
            time.sleep(0.05)
        raise RuntimeError("was killed")
    try:
        _train(collective, sync, steps=100_000)
        raise AssertionError("it trained without the lost rank")
    except Exception as error:  # of any kind, because rank 1 waits for it
        told.write_text(str(error))
        raise


@pytest.mark.parametrize("name", ["ssp", "asp", "hogwild"])
def test_a_rank_that_is_gone_ends_the_others_and_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="was killed") as caught:
        run_ranks(2, "torch", partial(_loses_rank_1, APART[name], str(tmp_path)), timeout_seconds=60)
    assert {failure.rank: failure.from_peer for failure in caught.value.failures} == {0: True, 1: False}
    assert "rank 1" in (tmp_path / "told").read_text()


TOKEN = b"t" * 32


def _served(size: int = 2, make: Any = torch.optim.SGD) -> tuple[ShardServer, ParameterTable]:
    held = nn.Parameter(torch.zeros(4))
    table = ParameterTable({0: held}, make([held], lr=1.0), size, ParameterServer(), 5.0)
    return ShardServer(table, "127.0.0.1", TOKEN, rank=0, size=size), table


def _link(server: ShardServer, token: bytes = TOKEN) -> RemoteLink:
    return RemoteLink(0, ("127.0.0.1", server.port), token, 1, {0: (4, torch.float32)}, 5.0)


def test_workers_that_connect_at_once_push_none_of_them_out() -> None:
    server, _ = _served(size=100)
    with closing(server), ExitStack() as stack:
        # No worker sends its proof until all have connected.
        workers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
            for _ in range(99)
        ]
        for connection in workers:
            assert connection.recv(1, socket.MSG_PEEK)
        for worker, connection in enumerate(workers, start=1):
            prove_as_client(connection, TOKEN, worker)


def test_a_stranger_is_disconnected_and_a_member_is_served() -> None:
    before = set(threading.enumerate())
    server, table = _served()
    with closing(server):
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.sendall(b"x" * 68)
            while stranger.recv(1 << 16):
                pass
        with pytest.raises(CollectiveError, match="parameter server of rank 0 cannot be reached"):
            _link(server, b"f" * 32)
        assert table.clocks.pushed == [0, 0]
        with closing(_link(server)) as link:
            link.push({0: torch.ones(4)}, [{"lr": 1.0}], ends_step=True)
            link.ask(None, 1, None)
            assert link.answer(lambda: None)[0].tolist() == [-0.5] * 4
            # All workers have connected, so no other process may connect.
            with pytest.raises(CollectiveError):
                _link(server)
    assert set(threading.enumerate()) <= before


class _Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ValueError("this rate is no number")


def test_an_error_of_the_optimizer_comes_to_all_workers() -> None:
    """The server's own worker gets the error, other workers get its text, and none is blamed for leaving."""
    server, table = _served(make=_Fails)
    own = OwnLink(table, 0)
    with closing(server), closing(_link(server)) as link:
        link.push({0: torch.ones(4)}, [{"lr": 1.0}], ends_step=True)
        link.ask(None, 1, None)
        with pytest.raises(CollectiveError, match="the optimizer failed: ValueError: this rate is no number"):
            link.answer(lambda: None)
        own.ask(None, 0, None)
        with pytest.raises(ValueError, match=r"^this rate is no number$"):
            own.answer(lambda: None)


def test_a_message_that_no_member_sends_ends_only_its_connection() -> None:
    server, table = _served()
    with closing(server):
        with socket.create_connection(("127.0.0.1", server.port)) as member:
            prove_as_client(member, TOKEN, 1)
            member.sendall(struct.pack("!BIQ", wire.PUSH, 2, 1 << 40) + b"{}")
            with suppress(ConnectionResetError):
                assert member.recv(1) == b""
        with pytest.raises(WorkerLeftError, match="rank 1 left the training after its step 0"):
            table.pull(0, None, 0, None)


class _Killed(LocalCollective):
    """Rank 0 of two, which is killed at its first message to the other rank."""

    def __init__(self) -> None:
        super().__init__()
        self.member = Member(size=2)

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int] | None = None) -> list[torch.Tensor]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_killed_rank_leaves_no_shared_memory() -> None:
    before = set(Path("/dev/shm").glob("ringspark-hogwild-*"))
    if not (child := os.fork()):
        with suppress(BaseException):
            share_memory([nn.Parameter(torch.zeros(3))], _Killed(), 60)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert set(Path("/dev/shm").glob("ringspark-hogwild-*")) == before
