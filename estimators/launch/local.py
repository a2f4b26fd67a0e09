"""Training without Spark: one rank in this process, or ranks in spawned processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty
from typing import Any

import cloudpickle

from ringspark.estimators import run_layout, user_code
from ringspark.estimators.collectives import CollectiveError, Member, RendezvousInfo, collective_class
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.failures import Failure, WorkerError
from ringspark.estimators.launch.gang_task import Work, assign_ranks, work_and_leave
from ringspark.estimators.launch.heartbeat import Pulse
from ringspark.estimators.launch.owner import write_note
from ringspark.estimators.launch.rank_output import RankOutput, with_last_lines
from ringspark.estimators.memory.pressure import check_on_rank
from ringspark.estimators.techniques import techniques_of
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.checkpoint.folders import checkpoints_uri
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import FinishedRun, TrainResult, train_worker
from ringspark.models.process_state import print_any_text
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.folder_removal import remove_folder

# Modules that the fork server imports before it forks a rank; it skips modules that are not installed.
_PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "horovod.torch", __name__]
_MAIN_LOCK = threading.Lock()


@print_any_text()
def train_here(config: TrainConfig, objects: UserObjects | None = None, device: str = "cpu") -> TrainResult:
    # A copy, as on a worker of Spark, so that the training does not change the user's module.
    objects = user_code.copy(objects) if objects is not None and objects.module is not None else objects
    objects = objects or UserObjects()
    config = replace(config, num_workers=1, collective="local")
    manifest = ShardManifest.load(config.shards_uri)
    config = check_training(config, objects, manifest).config
    collective = LocalCollective()
    config = check_on_rank(config, objects, manifest, collective)
    write_note(config.run_uri, run_layout.CONFIG, config.to_json())
    result = train_worker(config, collective, objects, device)
    write_note(config.run_uri, run_layout.RESULT, FinishedRun(result=result).to_json())
    for technique in techniques_of(config):
        technique.finish(config.run_uri)
    if not config.certify:
        # The training is over, so nobody will resume from the checkpoints.
        remove_folder(checkpoints_uri(config.run_uri), run_layout.PARTS)
    return result


def run_spawned(
    num_workers: int,
    collective: str,
    work: Work,
    *,
    timeout_seconds: float = 60.0,
    hosts: Sequence[str] | None = None,
) -> list[str]:
    """Runs `work` on `num_workers` ranks, each a new process of this host; returns texts in rank order.

    Ranks with different addresses in `hosts` act as if on several hosts. Raises WorkerError if a rank failed.
    """
    members = assign_ranks(hosts or ["127.0.0.1"] * num_workers)
    # cloudpickle, as in Spark, also ships closures and functions of the main script.
    pickled = cloudpickle.dumps(work)
    kind = collective_class(collective)
    secret = secrets.token_bytes(32)
    rendezvous = kind.open_rendezvous(members[0], secret)
    info = RendezvousInfo(address=rendezvous.address, secret=secret, timeout_seconds=timeout_seconds)
    # The fork server has imported the libraries, which takes seconds. A fork of it takes almost no time.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    queue: Any = context.Queue()
    folder = tempfile.TemporaryDirectory(prefix="ringspark-ranks-", ignore_cleanup_errors=True)
    pulse = Pulse(run_uri=folder.name, token="local")
    os.mkdir(storage.join(folder.name, run_layout.HEARTBEAT))
    processes = [
        context.Process(
            target=_run_rank, args=(queue, member, collective, info, pickled, dict(os.environ), pulse)
        )
        for member in members
    ]
    try:
        with _hidden_main():
            for process in processes:
                process.start()
        rows = _receive(queue, processes, pulse)
        for process in processes:
            process.join()
        failures = [Failure.from_json(failure) for _, _, failure in rows if failure is not None]
        if failures:
            first = WorkerError(failures).first
            raise WorkerError([with_last_lines(f, pulse) if f is first else f for f in failures])
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        rendezvous.close()
        folder.cleanup()
    return [result for _, result, _ in sorted(rows)]


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Hides the path of the main script, so that new processes do not run the script.

    A script without `if __name__ == "__main__"` would train again in every rank.
    """
    main = sys.modules["__main__"]
    with _MAIN_LOCK:
        hidden: dict[str, Any] = {
            name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)
        }
        main.__spec__ = None
        try:
            yield
        finally:
            vars(main).update(hidden)


def _receive(queue: Any, processes: list[Any], pulse: Pulse) -> list[tuple[int, str, str | None]]:
    rows: list[tuple[int, str, str | None]] = []
    while len(rows) < len(processes):
        try:
            rows.append(queue.get(timeout=0.2))
        except Empty:
            received = {rank for rank, _, _ in rows}
            for rank, process in enumerate(processes):
                if rank not in received and process.exitcode is not None and queue.empty():
                    message = f"the process ended with exit code {process.exitcode}"
                    failure = Failure.lost(rank, socket.gethostname(), "running", message)
                    raise WorkerError([with_last_lines(failure, pulse)]) from None
    return rows


def _run_rank(
    queue: Any,
    member: Member,
    collective: str,
    info: RendezvousInfo,
    pickled: bytes,
    environment: dict[str, str],
    pulse: Pulse,
) -> None:
    import numpy as np
    import torch

    # Otherwise each garbage collection would visit what the server has imported, and copy its memory.
    gc.freeze()
    # All ranks are forks of one process, and would share its random numbers and its older environment.
    np.random.seed()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    status = Status("connecting")
    try:
        with print_any_text(), RankOutput(pulse, member.rank, member.host):
            connected = collective_class(collective).connect(member, info)
            result = work_and_leave(connected, lambda *rank: cloudpickle.loads(pickled)(*rank), "cpu", status)
        queue.put((member.rank, result, None))
    except Exception as error:
        failure = Failure.of(error, member.rank, status.phase, isinstance(error, CollectiveError))
        queue.put((member.rank, "", failure.to_json()))
