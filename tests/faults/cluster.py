"""A standalone Spark cluster: a master and workers as processes of this machine, like three nodes."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import processes
from waiting import wait_for

# Timeout after which the master removes a silent worker; Spark's default is a minute.
WORKER_TIMEOUT_SECONDS = 15


class Cluster:
    """A master and `num_workers` workers; each has room for one more executor than needed.

    A driver's executors are spread over the workers. A lost executor restarts on another worker.

    Attributes:
        url: URL for `spark.master`.
        mark: See `processes`; executors inherit it from their worker.
    """

    def __init__(self, num_workers: int, cores: int = 2) -> None:
        import pyspark

        self._cores = str(cores)

        self.mark = uuid.uuid4().hex
        self._num_workers = num_workers
        self._home = Path(pyspark.__file__).parent
        self._folder = tempfile.TemporaryDirectory(prefix="ringspark-faults-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name, "log")
        self._started: list[subprocess.Popen[bytes]] = []
        self._start("master.Master", "--port", "0")
        self.url = wait_for("the master", self._master_url)
        self.heal()

    def pids(self) -> list[int]:
        return [process.pid for process in self._started if process.poll() is None]

    def heal(self) -> None:
        """Restarts missing workers, and returns when the master has registered them."""
        missing = self._num_workers + 1 - len(self.pids())
        known = self._registered()
        for _ in range(missing):
            self._start("worker.Worker", "--port", "0", "--cores", self._cores, "--memory", "4g", self.url)
        wait_for("the workers", lambda: self._registered() >= known + missing)

    def close(self) -> None:
        for process in self._started:
            processes.send(process.pid, signal.SIGKILL)
            process.wait()
        self._folder.cleanup()

    def _start(self, name: str, *arguments: str) -> None:
        folder = self._folder.name
        with self._log.open("ab") as log:
            started = subprocess.Popen(
                [
                    str(self._home / "bin" / "spark-class"),
                    f"org.apache.spark.deploy.{name}",
                    *("--host", "127.0.0.1", "--webui-port", "0"),
                    *arguments,
                ],
                stdout=log,
                stderr=log,
                cwd=folder,
                env={
                    **os.environ,
                    processes.MARK: self.mark,
                    "PYSPARK_PYTHON": sys.executable,
                    "SPARK_LOCAL_IP": "127.0.0.1",
                    "SPARK_WORKER_DIR": str(Path(folder, "work")),
                    "SPARK_LOCAL_DIRS": str(Path(folder, "local")),
                    "TMPDIR": folder,
                    # The master's timeout; a worker sends four heartbeats in this time.
                    "SPARK_MASTER_OPTS": f"-Dspark.worker.timeout={WORKER_TIMEOUT_SECONDS}",
                    "SPARK_WORKER_OPTS": f"-Dspark.worker.timeout={WORKER_TIMEOUT_SECONDS}",
                },
                start_new_session=True,
            )
        self._started.append(started)

    def _master_url(self) -> str | None:
        found = re.search(r"spark://127\.0\.0\.1:\d+", self._log.read_text()) if self._log.exists() else None
        return found.group() if found else None

    def _registered(self) -> int:
        return self._log.read_text().count("Successfully registered with master")
