"""What can be hit and how: each fault is a function that gets the scene of a running training.

`FAULTS` is the matrix of tests/benchmarks/fault_matrix.py; (target, kind) pairs that are not in it make no
sense: nobody kills a file, and TCP's checksums and the store's see to corrupted packets.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import damage
import processes
import psutil
import sockets
import stores
from processes import send
from trainings import Driver, Plan
from waiting import wait_for

Kind = Literal["kill", "hang", "error", "corruption"]
KINDS: tuple[Kind, ...] = ("kill", "hang", "error", "corruption")
# Where the training runs, and where its files are.
Place = Literal["local-cluster", "standalone", "s3 run", "s3 shards", "small disk"]


@dataclass(kw_only=True)
class Scene:
    """A training that runs, at the moment of the fault.

    Attributes:
        pids: Of each rank's process.
        draw: What the fault draws from: the same seed hits the same thing.
        undo: Closed before the training is resumed or hit again: repairs what was broken for good.
    """

    driver: Driver
    plan: Plan
    pids: dict[int, int]
    draw: random.Random
    undo: ExitStack
    bucket: stores.Bucket | None = None

    def some_rank(self) -> int:
        """A rank other than 0."""
        return self.draw.randrange(1, self.plan.num_workers)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One cell of the matrix.

    Attributes:
        what: What is done, in a few words.
        before: The fault is set up before the training starts.
        must_survive: The fit goes through by itself; else it may also end, as one error, and be resumed.
        restarts: The ranks cannot go on: whoever trains after the fault was started after it.
    """

    target: str
    kind: Kind
    what: str
    act: Callable[[Scene], None]
    place: Place = "local-cluster"
    before: bool = False
    must_survive: bool = True
    restarts: bool = True


FAULTS: list[Fault] = []


def fault(
    target: str,
    kind: Kind,
    what: str,
    *,
    place: Place = "local-cluster",
    before: bool = False,
    must_survive: bool = True,
    restarts: bool = True,
) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Lists the function below."""

    def add(act: Callable[[Scene], None]) -> Callable[[Scene], None]:
        FAULTS.append(
            Fault(
                target=target,
                kind=kind,
                what=what,
                act=act,
                place=place,
                before=before,
                must_survive=must_survive,
                restarts=restarts,
            )
        )
        return act

    return add


def find(target: str, kind: str) -> Fault:
    """The fault of a cell."""
    return next(one for one in FAULTS if (one.target, one.kind) == (target, kind))


# Processes


@fault("rank 0", "kill", "SIGKILL")
def _(scene: Scene) -> None:
    send(scene.pids[0], signal.SIGKILL)


@fault("rank 0", "hang", "SIGSTOP, for ever")
def _(scene: Scene) -> None:
    send(scene.pids[0], signal.SIGSTOP)


@fault("rank 0", "error", "a callback raises", must_survive=False)
def _(scene: Scene) -> None:
    (scene.plan.diary / "raise-0").touch()


@fault("another rank", "kill", "SIGKILL")
def _(scene: Scene) -> None:
    send(scene.pids[scene.some_rank()], signal.SIGKILL)


@fault("another rank", "hang", "SIGSTOP, for ever")
def _(scene: Scene) -> None:
    send(scene.pids[scene.some_rank()], signal.SIGSTOP)


@fault("another rank", "error", "a callback raises", must_survive=False)
def _(scene: Scene) -> None:
    (scene.plan.diary / f"raise-{scene.some_rank()}").touch()


def _some_executor(scene: Scene) -> psutil.Process:
    return processes.executor_jvm(scene.pids[scene.draw.randrange(scene.plan.num_workers)])


@fault("executor JVM", "kill", "SIGKILL")
def _(scene: Scene) -> None:
    send(_some_executor(scene), signal.SIGKILL)


@fault("executor JVM", "hang", "SIGSTOP, for ever")
def _(scene: Scene) -> None:
    send(_some_executor(scene), signal.SIGSTOP)


@fault("executor JVM", "error", "SIGTERM")
def _(scene: Scene) -> None:
    send(_some_executor(scene), signal.SIGTERM)


def _some_worker(scene: Scene) -> psutil.Process:
    worker = _some_executor(scene).parent()
    assert worker is not None
    assert "org.apache.spark.deploy.worker.Worker" in processes.cmdline(worker), processes.describe(worker)
    return worker


@fault("Spark worker", "kill", "SIGKILL", place="standalone")
def _(scene: Scene) -> None:
    send(_some_worker(scene), signal.SIGKILL)


@fault("Spark worker", "hang", "SIGSTOP, for longer than timeoutSeconds", place="standalone", restarts=False)
def _(scene: Scene) -> None:
    worker = _some_worker(scene)
    scene.undo.callback(send, worker, signal.SIGCONT)
    _stop_for([worker], scene.plan.timeout_seconds + 2)


@fault("Spark worker", "error", "SIGTERM, as systemd stops a service", place="standalone")
def _(scene: Scene) -> None:
    worker = _some_worker(scene)
    session = os.getsid(worker.pid)
    send(worker, signal.SIGTERM)
    wait_for("the worker's end", lambda: not processes.lives(worker))
    # While it shuts down, Spark's master may have it start one more executor (its log says "Launching
    # executor" on the worker that it removes next), which never learns that the worker is gone.
    for process in processes.of_session(session):
        send(process, signal.SIGKILL)


@fault("driver", "kill", "SIGKILL for Python and JVM", must_survive=False)
def _(scene: Scene) -> None:
    scene.driver.kill()


@fault("driver", "hang", "SIGSTOP, for longer than timeoutSeconds", restarts=False)
def _(scene: Scene) -> None:
    _stop_for([psutil.Process(scene.driver.pid), *scene.driver.jvms()], scene.plan.timeout_seconds + 2)


@fault("driver", "error", "SIGINT", must_survive=False)
def _(scene: Scene) -> None:
    send(scene.driver.pid, signal.SIGINT)


def _stop_for(stopped: list[psutil.Process], seconds: float) -> None:
    for process in stopped:
        send(process, signal.SIGSTOP)
    time.sleep(seconds)
    for process in stopped:
        send(process, signal.SIGCONT)


# Stores. Faults of a client's request are repeated until it has given up at least once.

WRITES = "^(PUT|POST) "
READS = "^GET .*parquet"


def _for_seconds(scene: Scene, seconds: float, kind: str, pattern: str) -> None:
    assert scene.bucket is not None
    scene.bucket.tell("fault", kind=kind, times=1_000_000, pattern=pattern)
    scene.undo.callback(scene.bucket.tell, "clear")
    time.sleep(seconds)
    scene.bucket.tell("clear")


@fault(
    "store writes",
    "kill",
    "S3 refuses connections for 3 s",
    place="s3 run",
    must_survive=False,
    restarts=False,
)
def _(scene: Scene) -> None:
    assert scene.bucket is not None
    scene.bucket.tell("refuse")
    time.sleep(3)
    scene.bucket.tell("accept")


@fault(
    "store writes", "hang", "S3 answers no write for 5 s", place="s3 run", must_survive=False, restarts=False
)
def _(scene: Scene) -> None:
    _for_seconds(scene, 5, "stall_before", WRITES)


@fault(
    "store writes",
    "error",
    "S3 answers 500 to writes for 5 s",
    place="s3 run",
    must_survive=False,
    restarts=False,
)
def _(scene: Scene) -> None:
    _for_seconds(scene, 5, "internal", WRITES)


@fault(
    "store writes",
    "corruption",
    "S3 writes, its answer is lost, 3 times",
    place="s3 run",
    must_survive=False,
    restarts=False,
)
def _(scene: Scene) -> None:
    _next_requests(scene, "lost_answer", WRITES)


@fault(
    "disk of the run",
    "error",
    "no room left, for 5 s",
    place="small disk",
    must_survive=False,
    restarts=False,
)
def _(scene: Scene) -> None:
    filler = stores.fill(Path(scene.plan.run).parent)
    scene.undo.callback(filler.unlink, missing_ok=True)
    time.sleep(5)
    filler.unlink()


@fault("store reads", "kill", "S3 resets 3 answers", place="s3 shards", before=True, must_survive=False)
def _(scene: Scene) -> None:
    _next_requests(scene, "reset", READS)


@fault("store reads", "hang", "S3 stops in 3 answers", place="s3 shards", before=True, must_survive=False)
def _(scene: Scene) -> None:
    _next_requests(scene, "stall", READS)


@fault("store reads", "error", "S3 answers 500, 3 times", place="s3 shards", before=True, must_survive=False)
def _(scene: Scene) -> None:
    _next_requests(scene, "internal", READS)


@fault(
    "store reads", "corruption", "S3 cuts 3 answers short", place="s3 shards", before=True, must_survive=False
)
def _(scene: Scene) -> None:
    _next_requests(scene, "short", READS)


def _next_requests(scene: Scene, kind: str, pattern: str) -> None:
    assert scene.bucket is not None
    bucket = scene.bucket
    bucket.tell("fault", kind=kind, times=3, pattern=pattern, skip=scene.draw.randrange(10))

    def end() -> None:
        left = bucket.tell("state")["faults_left"]
        bucket.tell("clear")
        assert not left, f"{left} of the 3 requests that were to fail never came"

    scene.undo.callback(end)


# Network between the ranks: all connections of one rank.


def _of_one_rank(scene: Scene, do: Callable[[list[sockets.Socket]], None]) -> None:
    rank = scene.draw.randrange(scene.plan.num_workers)
    with sockets.between(list(scene.pids.values()), of=scene.pids[rank]) as connections:
        assert connections, "the ranks have no connections"
        do(connections)


@fault("network between ranks", "kill", "RST on a rank's connections")
def _(scene: Scene) -> None:
    _of_one_rank(scene, sockets.cut)


@fault("network between ranks", "hang", "a rank's packets are dropped, for ever")
def _(scene: Scene) -> None:
    _of_one_rank(scene, sockets.drop)


@fault("network between ranks", "error", "a rank's packets are dropped for 3 s", restarts=False)
def _(scene: Scene) -> None:
    def delay(connections: list[sockets.Socket]) -> None:
        sockets.drop(connections)
        time.sleep(3)
        sockets.heal(connections)

    _of_one_rank(scene, delay)


# Files: damaged while the training runs; then a rank is killed, so that somebody reads them.


def _damage_checkpoint(scene: Scene, how: Callable[[Path, random.Random], None]) -> None:
    run = Path(scene.plan.run)
    folder = wait_for("a checkpoint", lambda: damage.newest_checkpoint(run))
    try:
        how(scene.draw.choice(sorted(path for path in folder.iterdir() if path.is_file())), scene.draw)
    except FileNotFoundError:
        # A newer one came and the old one went, in between.
        _damage_checkpoint(scene, how)
        return
    send(scene.pids[0], signal.SIGKILL)


def _damage_shards(scene: Scene, pattern: str, how: Callable[[Path, random.Random], None]) -> None:
    path = scene.draw.choice(sorted(Path(scene.plan.shards).rglob(pattern)))
    good = path.with_name(f".{path.name}.good")
    shutil.copyfile(path, good)
    scene.undo.callback(good.replace, path)
    # A new file in the place of the old one: what a reader has open or mapped stays as it was.
    bad = path.with_name(f".{path.name}.bad")
    shutil.copyfile(path, bad)
    how(bad, scene.draw)
    if bad.exists():
        bad.replace(path)
    else:
        path.unlink()
    send(scene.pids[0], signal.SIGKILL)


_DAMAGES: list[tuple[Kind, str, Callable[[Path, random.Random], None]]] = [
    ("kill", "deleted", damage.delete),
    ("error", "cut off", damage.truncate),
    ("corruption", "a byte inverted", damage.flip),
]

for _kind, _words, _how in _DAMAGES:
    fault("checkpoint file", _kind, f"a file of the newest {_words}, rank 0 killed")(
        lambda scene, how=_how: _damage_checkpoint(scene, how)
    )
    fault("manifest", _kind, f"{_words}, rank 0 killed", must_survive=False)(
        lambda scene, how=_how: _damage_shards(scene, "manifest.json", how)
    )
    fault("shard", _kind, f"{_words}, rank 0 killed", must_survive=False)(
        lambda scene, how=_how: _damage_shards(scene, "*.parquet", how)
    )

TARGETS = list(dict.fromkeys(one.target for one in FAULTS))
