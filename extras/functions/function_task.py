"""The task of `run_function` on one rank, which starts a process for the user's function and supervises it.

The process gets the environment variables by which torch, Horovod, JAX and TensorFlow find the other ranks.
The tasks themselves are connected, so that a failure on one rank ends the function on all ranks.
"""

from __future__ import annotations

import base64
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ringspark.estimators.collectives import Collective, CollectiveError
from ringspark.estimators.collectives.horovod_collective import rank_variables
from ringspark.estimators.collectives.network import interface_of
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.rendezvous.horovod_proxy import HorovodProxy
from ringspark.estimators.collectives.torch_collective import TorchCollective
from ringspark.estimators.failures import OtherTracebackError, ProcessLostError
from ringspark.estimators.training.phase import Status
from ringspark.extras.functions.function_rank import CALL, ERROR, RAISED_CODE, RESULT, Raised, end_group

# Results travel through Spark's driver, which has little memory for them.
MAX_RESULT_BYTES = 64 << 20
_LOOK_SECONDS = 0.1
# After another rank has failed, a rank has this long to raise an error of its own.
_GRACE_SECONDS = 1.0
# Timeout of the all-gather by which the tasks agree on the cause of a failure.
_AGREE_SECONDS = 60.0
# Linux takes the ports of outgoing connections from 32,768 on.
_PORTS = range(10_000, 32_000)


@dataclass(frozen=True, kw_only=True)
class FunctionTask:
    """Starts the function's process, and returns its result: pickled, in base64."""

    call: bytes
    environment: Mapping[str, str]
    timeout_seconds: float
    restarts: int

    def __call__(self, collective: Collective, device: str, status: Status) -> str:
        assert isinstance(collective, TorchCollective)
        status.phase = "starting the function"
        client = collective.client.within("function", collective.member)
        with (
            tempfile.TemporaryDirectory(prefix="ringspark-rank-", ignore_cleanup_errors=True) as name,
            _ProcessProxy(client, [], self.timeout_seconds) as proxy,
        ):
            folder = Path(name)
            (folder / CALL).write_bytes(self.call)
            variables = self._variables(collective, client, device, proxy)
            with _started(folder, variables) as process:
                proxy.process = process.pid
                status.phase = "running the function"
                ended, code = _wait(process, folder, client, status)
            return _result(client, folder, collective.rank, ended, code)

    def _variables(
        self, collective: Collective, client: RendezvousClient, device: str, proxy: HorovodProxy
    ) -> dict[str, str]:
        """Returns the process's environment. Runs on every rank."""
        member = collective.member
        mine = [*_free_ports(), _visible_device(device)]
        known = client.all_gather(
            "addresses", json.dumps([member.host, *mine]).encode(), self.timeout_seconds
        )
        ranks = [json.loads(text) for text in known]
        first, master, coordinator, *_ = ranks[0]
        workers = [f"{_in_url(host)}:{port}" for host, _, _, port, _ in ranks]
        ports = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": member.rank}}
        variables = {
            "RANK": str(member.rank),
            "WORLD_SIZE": str(member.size),
            "LOCAL_RANK": str(member.local_rank),
            "LOCAL_WORLD_SIZE": str(member.local_size),
            "GROUP_RANK": str(list(dict.fromkeys(host for host, *_ in ranks)).index(member.host)),
            "MASTER_ADDR": first,
            "MASTER_PORT": str(master),
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "JAX_COORDINATOR_ADDRESS": f"{_in_url(first)}:{coordinator}",
            "TF_CONFIG": json.dumps(ports),
            **rank_variables(member, proxy, self.timeout_seconds),
        }
        if interface := interface_of(member.host):
            variables["GLOO_SOCKET_IFNAME"] = interface
        if device != "cpu":
            here = [entry[-1] for entry in ranks if entry[0] == member.host]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(here)
        # Spark adds shipped modules to the path of this process only, so the path is passed on.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables, **self.environment}


class _ProcessProxy(HorovodProxy):
    """Proxy to Horovod's rendezvous that answers only this task's process and its children."""

    process: int | None = None

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with suppress(psutil.Error):
            parent = psutil.Process(self.process)
            for process in (parent, *parent.children(recursive=True)):
                connections = getattr(process, "net_connections", None) or process.connections
                if any(tuple(each.laddr) == client_address[:2] for each in connections("tcp")):
                    return True
        return False


def _free_ports() -> list[int]:
    """Returns three ports that are free at the moment: for torch, JAX and TensorFlow."""
    found: list[int] = []
    draw = random.SystemRandom()
    while len(found) < 3:
        port = draw.choice(_PORTS)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            found.append(port)
    return found


def _visible_device(device: str) -> str:
    """Returns the device's entry in CUDA_VISIBLE_DEVICES, or its index if the variable is not set."""
    _, _, index = device.partition(":")
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names[int(index)] if index and names else index


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextmanager
def _started(folder: Path, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the function's process. At the end of the block, ends the process and its children."""
    read, write = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "ringspark.extras.functions.function_rank", str(folder), str(read)],
            stdin=subprocess.DEVNULL,
            pass_fds=[read],
            env=dict(variables),
            start_new_session=True,
        )
        try:
            yield process
        finally:
            end_group(process.pid)
            process.wait()
    finally:
        os.close(read)
        os.close(write)


# How a rank's process ended.
_DONE, _RAISED, _LOST, _ENDED = "done", "raised", "lost", "ended by the task"
# Key that exists once all ranks are done or one has failed.
_OVER = "over"


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Returns None while the process runs. It is not reaped, so that no other process gets its id."""
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _wait(
    process: subprocess.Popen[bytes], folder: Path, client: RendezvousClient, status: Status
) -> tuple[str, int]:
    """Waits until every rank is done or one has failed; returns how the process ended, and its exit code."""
    pool = ThreadPoolExecutor(1)
    # One request waits at rank 0 for all this time.
    over = pool.submit(client.get, _OVER, math.inf)
    pool.shutdown(wait=False)
    while (code := _exit_code(process)) is None:
        status.tick()
        if over.done():
            over.result()
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(_GRACE_SECONDS)
                break
            return _ENDED, 0
        wait([over], _LOOK_SECONDS)
    if code or not (folder / RESULT).exists():
        client.set(_OVER, b"")
        return (_RAISED if code == RAISED_CODE and (folder / ERROR).exists() else _LOST), code
    if client.add(_DONE, 1) == client.member.size:
        client.set(_OVER, b"")
    while not over.done():
        status.tick()
        wait([over], _LOOK_SECONDS)
    over.result()
    return _DONE, code


def _result(client: RendezvousClient, folder: Path, rank: int, ended: str, code: int) -> str:
    """Returns this rank's result in base64; raises an error if any rank failed. Runs on every rank."""
    mine = json.dumps([ended, code]).encode()
    ends = [json.loads(text) for text in client.all_gather("ends", mine, _AGREE_SECONDS)]
    raised = next((other for other, (how, _) in enumerate(ends) if how == _RAISED), None)
    # After one rank has raised, a library may abort the process of another. Then the exception is the cause.
    lost = next(
        (
            other
            for other, (how, with_code) in enumerate(ends)
            if how == _LOST and (raised is None or with_code != -signal.SIGABRT)
        ),
        None,
    )
    own = Raised(**json.loads((folder / ERROR).read_text())) if ended == _RAISED else None
    if lost == rank:
        # The empty text replaces the task's own traceback, which says nothing about the process.
        lost_here = ProcessLostError(f"the process of the function {_describe(code)}")
        raise lost_here from OtherTracebackError("")
    if lost is not None:
        raise CollectiveError(
            f"the process of rank {lost} was lost" + (f"; here the function raised {own.line}" if own else "")
        )
    if own is not None:
        # Not of the error's own base class: after an OSError, the workers would start again.
        raise type(own.type, (RuntimeError,), {})(own.message) from OtherTracebackError(own.trace)
    if raised is not None:
        raise CollectiveError(f"the function raised an exception on rank {raised}")
    size = (folder / RESULT).stat().st_size
    if size > MAX_RESULT_BYTES:
        raise ValueError(
            f"the result of rank {rank} has {size:,} bytes, but the limit is {MAX_RESULT_BYTES:,}; write it "
            "to a file and return the path"
        )
    return base64.b64encode((folder / RESULT).read_bytes()).decode()


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}" + ("" if code else " before the function had returned")
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
