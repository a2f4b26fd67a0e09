"""Faults and their targets: each fault is a function of the scene of a running training.

`FAULTS` is the matrix of tests/benchmarks/fault_matrix.py. Other (target, kind) pairs make no sense: files
cannot be killed, and checksums of TCP and of the store handle corrupted packets.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import damage
import meshes
import processes
import psutil
import sockets
import stores
from cluster import WORKER_TIMEOUT_SECONDS
from processes import send
from trainings import TIMEOUT_SECONDS, Driver, Plan
from waiting import wait_for

Kind = Literal["kill", "hang", "error", "corruption"]
KINDS: tuple[Kind, ...] = ("kill", "hang", "error", "corruption")
# The training's location, and its files' location.
Place = Literal[
    "local-cluster", "standalone", "s3 run", "s3 shards", "small disk", "no shared memory", "four slots"
]


@dataclass(kw_only=True)
class Scene:
    """A running training at the moment of the fault.

    Attributes:
        pids: Process id by rank.
        draw: Random generator of the fault; the same seed hits the same target.
        undo: Closed before the training is resumed or hit again; repairs permanent damage.
        stopped: The stopped rank, if the reason of the restart must name it.
    """

    driver: Driver
    plan: Plan
    pids: dict[int, int]
    draw: random.Random
    undo: ExitStack
    bucket: stores.Bucket | None = None
    stopped: int | None = None

    def some_rank(self) -> int:
        return self.draw.randrange(1, self.plan.num_workers)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One cell of the matrix.

    Attributes:
        what: Short description.
        must_survive: The fit must succeed without help; otherwise it may also fail with one error and be
            resumed.
        blamed: Text in the error with which the fit must end.
        restarts: The ranks cannot continue, so the ranks that train after the fault must be new.
        lasts: Seconds for which training may continue until the fault has ended or was reported.
        mesh: A key of `meshes.MESHES`; "" for a whole network on each rank.
        an_epoch_each: The start of the next epoch triggers it: one per epoch, none in the last.
    """

    target: str
    kind: Kind
    what: str
    act: Callable[[Scene], None]
    place: Place = "local-cluster"
    must_survive: bool = True
    blamed: str = ""
    restarts: bool = True
    lasts: float = 0.0
    an_epoch_each: bool = False
    mesh: str = ""


FAULTS: list[Fault] = []


def fault(target: str, kind: Kind, what: str, **more: Any) -> Callable[[Callable[[Scene], Any]], None]:
    """Registers the decorated function; `more` are attributes of `Fault`."""
    return lambda act: FAULTS.append(Fault(target=target, kind=kind, what=what, act=act, **more))


def _sends(number: int, find: Callable[[Scene], psutil.Process | int]) -> Callable[[Scene], None]:
    """Returns a fault that sends a signal to the process that `find` returns."""
    return lambda scene: send(find(scene), number)


def find(target: str, kind: str) -> Fault:
    return next(one for one in FAULTS if (one.target, one.kind) == (target, kind))


def _rank_faults(target: str, rank: Callable[[Scene], int]) -> None:
    fault(target, "kill", "SIGKILL")(_sends(signal.SIGKILL, lambda scene: scene.pids[rank(scene)]))
    fault(target, "hang", "SIGSTOP, for ever")(_sends(signal.SIGSTOP, lambda scene: scene.pids[rank(scene)]))
    fault(target, "error", "a callback raises", must_survive=False)(
        lambda scene: (scene.plan.diary / f"raise-{rank(scene)}").touch()
    )


_rank_faults("rank 0", lambda scene: 0)
_rank_faults("another rank", Scene.some_rank)


def _some_executor(scene: Scene) -> psutil.Process:
    return processes.executor_jvm(scene.pids[scene.draw.randrange(scene.plan.num_workers)])


fault("executor JVM", "kill", "SIGKILL")(_sends(signal.SIGKILL, _some_executor))
# The rank trains on until Spark removes the executor, which needs no contact with it: spark.network.timeout.
fault("executor JVM", "hang", "SIGSTOP, for ever", lasts=35)(_sends(signal.SIGSTOP, _some_executor))
fault("executor JVM", "error", "SIGTERM")(_sends(signal.SIGTERM, _some_executor))

# The harness starts a new Spark worker before the next fault.
HEAL_SECONDS = 20.0


def _some_worker(scene: Scene) -> psutil.Process:
    worker = _some_executor(scene).parent()
    assert worker is not None
    assert "org.apache.spark.deploy.worker.Worker" in processes.cmdline(worker), processes.describe(worker)
    return worker


_standalone: dict[str, Any] = {"place": "standalone", "lasts": HEAL_SECONDS}
fault("Spark worker", "kill", "SIGKILL", **_standalone)(_sends(signal.SIGKILL, _some_worker))
# The master checks once in this time.
GIVE_UP_SECONDS = 2 * WORKER_TIMEOUT_SECONDS + 5
_given_up = _standalone | {"restarts": False, "lasts": GIVE_UP_SECONDS + HEAL_SECONDS}


@fault("Spark worker", "hang", "SIGSTOP, until its master has given it up", **_given_up)
def _(scene: Scene) -> None:
    worker = _some_worker(scene)
    scene.undo.callback(send, worker, signal.SIGCONT)
    _stop_for([worker], GIVE_UP_SECONDS)


@fault("Spark worker", "error", "SIGTERM, as systemd stops a service", **_standalone)
def _(scene: Scene) -> None:
    worker = _some_worker(scene)
    session = os.getsid(worker.pid)
    send(worker, signal.SIGTERM)
    wait_for("the worker's end", lambda: not processes.lives(worker))
    # During the shutdown, Spark's master may have the worker start one more executor (its log says "Launching
    # executor" on the worker that it removes next). This executor never learns that the worker has ended.
    for process in processes.of_session(session):
        send(process, signal.SIGKILL)


fault("driver", "kill", "SIGKILL for Python and JVM", must_survive=False)(lambda scene: scene.driver.kill())
fault("driver", "error", "SIGINT", must_survive=False)(_sends(signal.SIGINT, lambda scene: scene.driver.pid))


@fault("driver", "hang", "SIGSTOP, for longer than timeoutSeconds", restarts=False, lasts=TIMEOUT_SECONDS + 2)
def _(scene: Scene) -> None:
    _stop_for([psutil.Process(scene.driver.pid), *scene.driver.jvms()], scene.plan.timeout_seconds + 2)


def _stop_for(stopped: list[psutil.Process], seconds: float) -> None:
    for process in stopped:
        send(process, signal.SIGSTOP)
    time.sleep(seconds)
    for process in stopped:
        send(process, signal.SIGCONT)


# Ranks with a shard of the network or of the rows. No other rank has it, and all wait for it.


def _mesh_faults(mesh: str, role: str, ranks: tuple[int, ...]) -> None:
    def stop(scene: Scene) -> None:
        scene.stopped = scene.draw.choice(ranks)
        send(scene.pids[scene.stopped], signal.SIGSTOP)

    target, place = meshes.target_of(mesh, role), {"place": "four slots", "mesh": mesh}
    kill = _sends(signal.SIGKILL, lambda scene: scene.pids[scene.draw.choice(ranks)])
    fault(target, "kill", "SIGKILL", **place)(kill)
    fault(target, "hang", "SIGSTOP, for ever", **place)(stop)


for _mesh, _training in meshes.MESHES.items():
    for _role, _ranks in _training.roles.items():
        _mesh_faults(_mesh, _role, _ranks)

# Stores. Faults of writes must hit a write that the training waits for or resumes from.

WRITES = "^(PUT|POST) "
CHECKPOINTS = "^(PUT|POST) .*/checkpoints/"
READS = "^GET .*parquet"
# The steps between two checkpoints take less time.
FAILS_SECONDS = 6.0


def _for_seconds(scene: Scene, kind: str) -> None:
    assert scene.bucket is not None
    scene.bucket.tell("clear")
    scene.bucket.tell("fault", kind=kind, times=1_000_000, pattern=WRITES)
    scene.undo.callback(scene.bucket.tell, "clear")
    time.sleep(FAILS_SECONDS)
    requests = scene.bucket.tell("state")["requests"]
    scene.bucket.tell("clear")
    paths = [request["path"] for request in requests if request["fault"]]
    needed = [path for path in paths if not path.endswith("/progress.json") and "/heartbeat/" not in path]
    assert needed, f"nothing was written meanwhile but what is for show: {paths}"


def _next_requests(scene: Scene, kind: str, pattern: str) -> None:
    """The next 3 requests; they must come before the next fault or the end."""
    assert scene.bucket is not None
    bucket = scene.bucket
    bucket.tell("fault", kind=kind, times=3, pattern=pattern, skip=scene.draw.randrange(3))

    def end() -> None:
        left = bucket.tell("state")["faults_left"]
        bucket.tell("clear")
        assert not left, f"{left} of the 3 requests that were to fail never came"

    scene.undo.callback(end)


_fails: dict[str, Any] = {"must_survive": False, "restarts": False, "lasts": FAILS_SECONDS}


@fault("store writes", "kill", "S3 refuses connections for 6 s", place="s3 run", **_fails)
def _(scene: Scene) -> None:
    assert scene.bucket is not None
    scene.bucket.tell("refuse")
    time.sleep(FAILS_SECONDS)
    scene.bucket.tell("accept")


fault("store writes", "hang", "S3 answers no write for 6 s", place="s3 run", **_fails)(
    lambda scene: _for_seconds(scene, "stall_before")
)
fault("store writes", "error", "S3 answers 500 to writes for 6 s", place="s3 run", **_fails)(
    lambda scene: _for_seconds(scene, "internal")
)
_LOST = "S3 writes parts of a checkpoint, its answer is lost, 3 times"
fault("store writes", "corruption", _LOST, place="s3 run", **_fails)(
    lambda scene: _next_requests(scene, "lost_answer", CHECKPOINTS)
)


@fault("disk of the run", "error", "no room left, for 6 s", place="small disk", **_fails)
def _(scene: Scene) -> None:
    filler = stores.fill(Path(scene.plan.run).parent)
    scene.undo.callback(filler.unlink, missing_ok=True)
    time.sleep(FAILS_SECONDS)
    filler.unlink()


_BROKEN_READS: list[tuple[Kind, str, str]] = [
    ("kill", "reset", "S3 resets 3 answers"),
    ("hang", "stall", "S3 stops in 3 answers"),
    ("error", "internal", "S3 answers 500, 3 times"),
    ("corruption", "short", "S3 cuts 3 answers short"),
]

for _kind, _break, _words in _BROKEN_READS:
    fault("store reads", _kind, _words, place="s3 shards", restarts=False, an_epoch_each=True)(
        lambda scene, broken=_break: _next_requests(scene, broken, READS)
    )


# Network between the ranks: all connections of one rank. They carry all communication, as on several hosts.


def _of_one_rank(scene: Scene, do: Callable[[list[sockets.Socket]], None]) -> None:
    rank = scene.draw.randrange(scene.plan.num_workers)
    with sockets.between(list(scene.pids.values()), of=scene.pids[rank]) as connections:
        assert connections, "the ranks have no connections"
        do(connections)


def _delay(connections: list[sockets.Socket]) -> None:
    sockets.drop(connections)
    time.sleep(3)
    sockets.heal(connections)


_SHORT = {"restarts": False, "lasts": 3}
for _kind, _words, _do, _more in (
    ("kill", "RST on a rank's connections", sockets.cut, {}),
    ("hang", "a rank's packets are dropped, for ever", sockets.drop, {}),
    ("error", "a rank's packets are dropped for 3 s", _delay, _SHORT),
):
    fault("network between ranks", _kind, _words, place="no shared memory", **_more)(
        lambda scene, do=_do: _of_one_rank(scene, do)
    )


# Files: damaged during the training; then a rank is killed, so that the files are read.


def _damage_checkpoint(scene: Scene, how: Callable[[Path, random.Random], None]) -> None:
    run = Path(scene.plan.run)
    folder = wait_for("a checkpoint", lambda: damage.newest_checkpoint(run))
    try:
        how(scene.draw.choice(sorted(path for path in folder.iterdir() if path.is_file())), scene.draw)
    except FileNotFoundError:
        # A newer checkpoint came and the old one was removed.
        _damage_checkpoint(scene, how)
        return
    send(scene.pids[0], signal.SIGKILL)


def _damage_shards(scene: Scene, pattern: str, how: Callable[[Path, random.Random], None]) -> None:
    path = scene.draw.choice(sorted(Path(scene.plan.shards).rglob(pattern)))
    good = path.with_name(f".{path.name}.good")
    shutil.copyfile(path, good)
    scene.undo.callback(good.replace, path)
    # Replaces the old file by a new one, so that readers with open or mapped files are not affected.
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
    ("corruption", "a bit inverted", damage.flip),
]

for _kind, _words, _how in _DAMAGES:
    fault("checkpoint file", _kind, f"a file of the newest {_words}, rank 0 killed")(
        lambda scene, how=_how: _damage_checkpoint(scene, how)
    )
    fault("manifest", _kind, f"{_words}, rank 0 killed", must_survive=False, blamed="manifest")(
        lambda scene, how=_how: _damage_shards(scene, "manifest.json", how)
    )
    fault("shard", _kind, f"{_words}, rank 0 killed", must_survive=False, blamed=".parquet")(
        lambda scene, how=_how: _damage_shards(scene, "*.parquet", how)
    )

TARGETS = list(dict.fromkeys(one.target for one in FAULTS))
