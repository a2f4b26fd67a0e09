"""Trainings in real processes: a driver program with its cluster, one fit, and the checks afterwards."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import processes
import psutil
import rows
from waiting import wait_for

HERE = Path(__file__).resolve().parent
# The same values as in driver.py, which imports torch.
ANSWER, STRUCK = "ANSWER ", "struck"
NUM_ROWS, BATCH, EPOCHS = 1447, 24, 3
EVERY_STEPS = 10
NUM_WORKERS = 3
TIMEOUT_SECONDS = 8.0
# Deadlines for a shared machine.
START_SECONDS, END_SECONDS = 300.0, 240.0
LOCAL_CLUSTER = f"local-cluster[{NUM_WORKERS},1,1024]"
CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    # Spark waits two minutes for a silent executor, which is too long for a test.
    "spark.network.timeout": "30s",
    "spark.executor.heartbeatInterval": "3s",
    "spark.network.timeoutInterval": "3s",
    # Restarted ranks need not import torch again.
    "spark.python.daemon.module": "ringspark.estimators.launch.python_daemon",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training as a command for the driver.

    Attributes:
        run: Folder or URI of the run.
        diary: Local folder of the ranks' diaries.
        more: Additional Params.
        network: Arguments of a transformer over tokens, see `meshes`; None for the small network.
    """

    run: str
    shards: str
    diary: Path
    num_workers: int = NUM_WORKERS
    collective: str = "horovod"
    epochs: int = EPOCHS
    dropout: float = 0.1
    pause_seconds: float = 0.02
    max_restarts: int = 3
    timeout_seconds: float = TIMEOUT_SECONDS
    more: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, Any] | None = None

    @property
    def epoch_steps(self) -> int:
        return -(-NUM_ROWS // int(self.more.get("batchSize", BATCH)))

    def command(self, resume: bool) -> dict[str, Any]:
        settings = {
            "runUri": self.run,
            "resume": resume,
            "numWorkers": self.num_workers,
            "collective": self.collective,
            "epochs": self.epochs,
            "batchSize": BATCH,
            "checkpointEverySteps": EVERY_STEPS,
            "checkpointEverySeconds": 0,
            "keepCheckpoints": 2,
            "maxRestarts": self.max_restarts,
            "timeoutSeconds": self.timeout_seconds,
            "reader": "arrow",
            "storageUri": str(self.diary.parent),
            **self.more,
        }
        return {
            "do": "fit",
            "settings": settings,
            "shards": self.shards,
            "diary": str(self.diary),
            "dropout": self.dropout,
            "pause_seconds": self.pause_seconds,
            "network": None if self.network is None else dict(self.network),
        }

    def nothing_comes(self) -> None:
        """Lets the training end without a fault: see `Diary`."""
        self.diary.mkdir(parents=True, exist_ok=True)
        (self.diary / STRUCK).touch()

    def lines(self) -> list[rows.Line]:
        return rows.Diaries(self.diary).read()


class Driver:
    """The driver's process and all processes that it starts.

    Args:
        master: Spark's master URL.
        environment: Additional environment variables, for executors too.
        keepers: Existing processes with the same mark that must survive: a cluster's.
        mark: See `processes`; new unless the driver's cluster has one.
        conf: More of Spark's conf.
    """

    def __init__(
        self,
        master: str = LOCAL_CLUSTER,
        environment: Mapping[str, str] | None = None,
        keepers: Callable[[], list[int]] = list,
        mark: str | None = None,
        conf: Mapping[str, str] | None = None,
    ) -> None:
        self.mark = mark or uuid.uuid4().hex
        self._keepers = keepers
        self._memory: set[str] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="ringspark-faults-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.executors = folder / "executors.jsonl"
        self._errors = (folder / "stderr").open("w")
        conf = {
            **CONF,
            **(conf or {}),
            "spark.master": master,
            "spark.local.dir": str(self.temporary),
            "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={self.temporary}",
        }
        options = json.dumps({"conf": conf, "executors": str(self.executors)})
        self._started = time.time()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "driver.py"), options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=folder,
            env={
                **os.environ,
                **(environment or {}),
                processes.MARK: self.mark,
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_LOCAL_IP": "127.0.0.1",
                "TMPDIR": str(self.temporary),
                # By default, executors write their logs where Spark is installed.
                "SPARK_WORKER_DIR": str(folder / "work"),
            },
            # Ctrl-C in the terminal is for the harness.
            start_new_session=True,
        )
        self._answers: Queue[dict[str, Any]] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.spark_seconds = self.answer(START_SECONDS)["time"] - self._started
        except BaseException:
            self.kill()
            self.close()
            raise

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def jvms(self) -> list[psutil.Process]:
        """The driver's JVM; just after a start there may be several or none."""
        children = psutil.Process(self.pid).children(recursive=True)
        return [p for p in children if "org.apache.spark.deploy.SparkSubmit" in processes.cmdline(p)]

    def write_shards(self, uri: str, num_rows: int = NUM_ROWS) -> None:
        self._tell({"do": "write", "uri": uri, "rows": num_rows})
        assert self.answer(START_SECONDS)["ok"]

    def begin(self, plan: Plan, *, resume: bool = False) -> None:
        plan.diary.mkdir(parents=True, exist_ok=True)
        self._tell(plan.command(resume))

    def answer(self, seconds: float) -> dict[str, Any]:
        """Waits for the end of the command. Returns the answer."""
        end = time.monotonic() + seconds
        while True:
            try:
                return self._answers.get(block=seconds > 0, timeout=0.2)
            except Empty:
                if self._process.poll() is not None and self._answers.empty():
                    reason = f"the driver ended with {self._process.returncode}"
                elif time.monotonic() > end:
                    reason = f"no end after {seconds:.0f} s"
                else:
                    continue
                raise AssertionError(f"{reason}: {self.tail()}") from None

    def fit(self, plan: Plan, *, resume: bool = False) -> dict[str, Any]:
        """Runs a fit. Returns the answer of driver.py."""
        self.begin(plan, resume=resume)
        return self.answer(END_SECONDS)

    def tail(self) -> str:
        self._errors.flush()
        return Path(self._errors.name).read_text()[-2000:]

    def executor_seconds(self, fault: float) -> float:
        """Returns how long Spark lacked an executor after the fault. This is not ringspark's time."""
        lost, last, most = None, 0.0, 0
        for note in self._executor_notes():
            if note["time"] > fault and note["executors"] < most and lost is None:
                lost = note["time"]
            if lost is not None and note["executors"] >= most:
                last, lost = last + note["time"] - lost, None
            most = max(most, note["executors"])
        return last

    def wait_for_executors(self, number: int) -> None:
        """Waits until Spark has this many executors, because it would reject the next fit before."""

        def there() -> bool:
            notes = self._executor_notes()
            return bool(notes) and notes[-1]["executors"] >= number

        wait_for(f"{number} executors", there, START_SECONDS)

    def _executor_notes(self) -> list[dict[str, Any]]:
        notes = self.executors.read_text().splitlines() if self.executors.exists() else []
        return list(map(json.loads, notes))

    def note_memory(self) -> None:
        """Records the shared memory in use, for `left_over`."""
        self._memory |= processes.shared_memory_of(self.mark)

    def left_over(self, seconds: float = 15.0) -> list[str]:
        """Returns the leftovers of a fit in the live driver, after a wait; empty if there are none."""

        def look() -> list[str]:
            return [
                *map(processes.describe, processes.orphans(self.mark, [self.pid, *self._keepers()])),
                *processes.ranks_that_listen(self.mark),
                *(f"file {path}" for path in self.temporary.rglob("ringspark-*")),
                *(f"shared memory {path}" for path in self._memory if os.path.exists(path)),
            ]

        return _until_empty(look, seconds)

    def kill(self) -> None:
        """Kills the driver and its JVM with SIGKILL, like a lost machine; the executors detect it."""
        if not self.lives:
            return
        jvms = self.jvms()
        processes.send(self.pid, signal.SIGKILL)
        for jvm in jvms:
            processes.send(jvm, signal.SIGKILL)
        self._process.wait()

    def close(self) -> list[str]:
        """Ends the driver and then everything else. Returns the processes that had not ended without help."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            processes.send(self.pid, signal.SIGKILL)
            self._process.wait()
        left = _until_empty(lambda: list(map(processes.describe, self._others())), 120.0)
        for process in self._others():
            processes.send(process, signal.SIGKILL)
        self._reader.join(timeout=10)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
        self._folder.cleanup()
        return left

    def _others(self) -> list[psutil.Process]:
        """Returns the processes of this driver that did not exist before."""
        return [process for process in processes.marked(self.mark) if process.pid not in self._keepers()]

    @property
    def has_answered(self) -> bool:
        """Whether the last command has ended."""
        return not self._answers.empty()

    def _tell(self, command: dict[str, Any]) -> None:
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(json.loads(line.removeprefix(ANSWER)))


def difference(weights: Mapping[str, Any], others: Mapping[str, Any]) -> float:
    """Returns the largest difference between two state dicts in the driver's format."""
    import torch

    assert weights.keys() == others.keys()
    distances = [(torch.tensor(weights[name]) - torch.tensor(others[name])).abs().max() for name in weights]
    return float(torch.stack(distances).max())  # NaN if there is one


def _until_empty(look: Any, seconds: float) -> list[str]:
    end = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < end:
        time.sleep(0.2)
    return list(found)
