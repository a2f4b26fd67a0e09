"""The command `ringspark rehearse`: runs a job file on a small cluster, and breaks it during the training.

The cluster is a Spark master and one Spark worker process for each of the job's workers, plus one, with
dynamic allocation. Each fault is one run of the job, in a folder that is removed afterwards; the first run is
undisturbed. The table says whether the job survived each fault, and how many seconds the fault cost. For a
failed job, the command also prints which setting helps.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from ringspark.jobs import train_job

DESCRIPTION = "Run a job on a small cluster on this machine, and inject faults."
_CONF = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.executorIdleTimeout": "10s",
    "spark.executor.cores": "1",
    "spark.network.timeout": "30s",
    "spark.network.timeoutInterval": "10s",
    "spark.executor.heartbeatInterval": "3s",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
# A line of the job's output that names an error, not a line of a Java stack.
_ERROR = re.compile(r"^(?!\s).*(?:rror|xception)\b.*:")
# Steps before the fault, so that there is something to lose.
_STEPS = 5
_LATE_SECONDS = 20.0
_SLOW_SECONDS = 10.0
_LONGEST_SECONDS = 3600.0


def _do_nothing(rehearsal: Rehearsal) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rehearsal: `act` breaks something in a running training; `is_late` delays a Spark worker."""

    what: str
    helps: str
    act: Callable[[Rehearsal], None] = _do_nothing
    is_late: bool = False
    resumes: bool = False


def _kill_executor(rehearsal: Rehearsal) -> None:
    import psutil

    try:
        parents = psutil.Process(rehearsal.pids()[-1]).parents()
        os.kill(next(each.pid for each in parents if each.name() == "java"), signal.SIGKILL)
    except psutil.NoSuchProcess:
        raise ProcessLookupError from None


def _stop_rank(rehearsal: Rehearsal) -> None:
    pid = rehearsal.pids()[-1]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(_SLOW_SECONDS)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _fill_disk(rehearsal: Rehearsal) -> None:
    # Writes beyond this size fail, as on a full disk. Python ignores the signal of the limit.
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in rehearsal.pids()}
    for pid, (_, most) in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, most))
    time.sleep(_SLOW_SECONDS)
    for pid, limits in before.items():
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def _kill_driver(rehearsal: Rehearsal) -> None:
    os.killpg(rehearsal.process.pid, signal.SIGKILL)


FAULTS = {
    "calm": Fault(what="undisturbed", helps=""),
    "executor": Fault(
        what="an executor is killed",
        helps="raise maxRestarts, or set minWorkers to continue with fewer workers",
        act=_kill_executor,
    ),
    "late": Fault(
        what=f"all nodes except one join {_LATE_SECONDS:.0f} s late",
        helps="raise timeoutSeconds",
        is_late=True,
    ),
    "slow": Fault(
        what=f"a worker stops for {_SLOW_SECONDS:.0f} s", helps="raise timeoutSeconds", act=_stop_rank
    ),
    "disk": Fault(
        what=f"the disk is full for {_SLOW_SECONDS:.0f} s",
        helps="put runUri on a store with room for keepCheckpoints + 1 checkpoints",
        act=_fill_disk,
    ),
    "driver": Fault(
        what="the driver is killed, and the job runs again with --resume",
        helps="name params.runUri in the job file, and start the job with --resume",
        act=_kill_driver,
        resumes=True,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    train_job.add_job(parser)
    names = ",".join(name for name in FAULTS if name != "calm")
    parser.add_argument("--faults", default=names, metavar="NAMES", help=f"some of {names} (default: all)")


def run(args: argparse.Namespace) -> None:
    from ringspark.pipelines.notebook_table import align_table

    names = [name.strip() for name in args.faults.split(",")]
    if unknown := [name for name in names if name not in FAULTS]:
        known = ", ".join(name for name in FAULTS if name != "calm")
        raise ValueError(f"--faults has no {unknown[0]!r}; choose some of {known}")
    file, job = train_job.read_job(args.file, args.set)
    estimator = train_job.make_estimator(file, job)
    workers = int(estimator.getNumWorkers())
    print(f"{args.file}: {workers} workers, {workers + 1} nodes with one slot each", flush=True)
    rows, calm = [], 0.0
    for name in dict.fromkeys(["calm", *names]):
        with tempfile.TemporaryDirectory(prefix="ringspark-rehearse-") as folder:
            rehearsal = Rehearsal(args, Path(folder), workers)
            if job.evaluation is not None and job.evaluation.output is not None:
                rehearsal.changes.append(f"evaluation.output={folder}/evaluation.json")
            outcome = rehearsal.play(FAULTS[name])
        if name == "calm":
            calm = outcome.seconds
            if not outcome.survived:
                raise RuntimeError(f"the job fails without any fault: {outcome.last_line}")
        more = "" if name == "calm" else f"{max(0.0, outcome.seconds - calm):.0f}"
        cost = [f"{outcome.seconds:.0f}", more, str(outcome.resumed), str(outcome.taken)]
        word = ("yes" if outcome.survived else "no") if outcome.was_hit else "ended before the fault"
        rows.append([FAULTS[name].what, word, *cost])
        print("  ".join(rows[-1]), flush=True)
        if not outcome.survived:
            print(f"    {outcome.last_line}\n    what helps: {FAULTS[name].helps}", flush=True)
    head = ["fault", "survived", "seconds", "more", "resumes", "taken by the cluster"]
    print()
    print(align_table(head, rows, num_left=1))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run of the job ended.

    Attributes:
        resumed: Checkpoints from which the training continued.
        taken: Losses that cost no restart.
        last_line: The last error of a failed job.
        was_hit: False if the job ended before the fault.
    """

    survived: bool
    was_hit: bool = True
    seconds: float
    resumed: int = 0
    taken: int = 0
    last_line: str = ""


class Rehearsal:
    """One run of the job on a cluster of its own; `changes` replace values of the job file."""

    process: subprocess.Popen[bytes]

    def __init__(self, args: argparse.Namespace, folder: Path, workers: int) -> None:
        self._args, self._folder, self._workers = args, folder, workers
        self.run_uri = str(folder / "run")
        self.changes = [
            *args.set,
            f"params.runUri={self.run_uri}",
            f"save.model={folder / 'model'}",
            "save.overwrite=true",
        ]

    def play(self, fault: Fault) -> Outcome:
        """Runs the job, with the fault once it trains."""
        begun = time.monotonic()
        with _cluster(self._folder, self._workers + 1, fault.is_late) as url:
            self._start(url)
            try:
                self._was_hit = False
                if self._wait_for_steps():
                    # The job may end in the same moment.
                    with suppress(IndexError, ProcessLookupError, StopIteration):
                        fault.act(self)
                        self._was_hit = True
                if fault.resumes:
                    self.process.wait()
                    self._start(url)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=_LONGEST_SECONDS)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
        outcome = self._outcome(self.process.returncode, time.monotonic() - begun)
        return replace(outcome, was_hit=self._was_hit or fault.act is _do_nothing)

    def pids(self) -> list[int]:
        """Returns the process of each rank that sends heartbeats, in order."""
        from ringspark.estimators.launch.heartbeat import Beat
        from ringspark.pipelines import storage

        folder = storage.join(self.run_uri, "heartbeat")
        names = [name for name in storage.list_names(folder) if name.startswith("rank-")]
        beats = []
        for name in names:
            with suppress(FileNotFoundError):
                beats.append(Beat.from_json(storage.read_bytes(storage.join(folder, name))))
        return [beat.pid for beat in beats if beat is not None and not beat.ended]

    def _start(self, url: str) -> None:
        conf = " ".join(f"--conf {key}={value}" for key, value in _CONF.items())
        self._log = self._folder / "job.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ringspark.jobs.command", "train", self._args.file),
                    *(part for change in self.changes for part in ("--set", change)),
                    *("--master", url, "--resume"),
                ],
                stdout=log,
                stderr=log,
                env={**_environment(), "PYSPARK_SUBMIT_ARGS": f"{conf} pyspark-shell"},
                start_new_session=True,
            )

    def _wait_for_steps(self) -> bool:
        """Waits until the training has taken a few steps; returns False if the job ended before."""
        from ringspark.estimators.launch.heartbeat import Beat
        from ringspark.pipelines import storage

        uri = storage.join(self.run_uri, "heartbeat", "rank-0.json")
        while self.process.poll() is None:
            with suppress(OSError):
                beat = Beat.from_json(storage.read_bytes(uri))
                if beat is not None and " epoch " in beat.phase and beat.ticks > _STEPS:
                    return True
            time.sleep(0.1)
        return False

    def _outcome(self, code: int | None, seconds: float) -> Outcome:
        from ringspark.estimators import run_layout
        from ringspark.estimators.training.worker import FinishedRun
        from ringspark.pipelines import storage

        lines = [line for line in self._log.read_text(errors="replace").splitlines() if _ERROR.search(line)]
        if code != 0:
            return Outcome(survived=False, seconds=seconds, last_line=lines[-1] if lines else f"code {code}")
        found = FinishedRun.from_json(storage.read_bytes(storage.join(self.run_uri, run_layout.RESULT)))
        resumed, taken = len(found.result.resumed_steps), len(found.preemptions)
        return Outcome(survived=True, seconds=seconds, resumed=resumed, taken=taken)


def _environment() -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYSPARK_GATEWAY_PORT"}
    return {**kept, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}


@contextmanager
def _cluster(folder: Path, nodes: int, is_late: bool) -> Iterator[str]:
    """Starts a Spark master and `nodes` Spark workers with one core each; with `is_late`, one at first."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "cluster.log").open("wb") as log:
            started.append(_spark_process(folder, log, "master.Master", "--port", "0"))
            url = _wait_for_master(folder / "cluster.log", started[0])
            node = ("worker.Worker", "--cores", "1", "--memory", "2g", "--port", "0", url)

            def join(number: int) -> None:
                started.extend(_spark_process(folder, log, *node) for _ in range(number))

            late = threading.Timer(_LATE_SECONDS, join, (nodes - 1,))
            if is_late:
                late.start()
            join(1 if is_late else nodes)
            try:
                yield url
            finally:
                late.cancel()
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _spark_process(folder: Path, log: IO[Any], name: str, *arguments: str) -> subprocess.Popen[bytes]:
    import pyspark

    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    local = ("--host", "127.0.0.1", "--webui-port", "0")
    return subprocess.Popen(
        [str(program), f"org.apache.spark.deploy.{name}", *local, *arguments],
        stdout=log,
        stderr=log,
        env={**_environment(), "SPARK_WORKER_DIR": str(folder / "work")},
        start_new_session=True,
    )


def _wait_for_master(log: Path, process: subprocess.Popen[bytes]) -> str:
    while process.poll() is None:
        words: Sequence[str] = log.read_text(errors="replace").split()
        url = next((word.strip("'\".,") for word in words if word.startswith("spark://127.0.0.1:")), None)
        if url is not None:
            return url
        time.sleep(0.1)
    raise RuntimeError(f"Spark's master does not start: {log.read_text(errors='replace')[-300:]}")
