"""A standalone Spark cluster over the hosts of a `Network`: the master on the first, a worker on each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from hosts import Host, Network
from waiting import wait_for

DRIVER = Path(__file__).with_name("driver.py")
# Whatever of this machine's Spark speaks of addresses has no meaning on the hosts.
_FOREIGN = ("SPARK_LOCAL_IP", "SPARK_LOCAL_HOSTNAME", "SPARK_PUBLIC_DNS", "PYSPARK_SUBMIT_ARGS")


class SparkHosts:
    """A context that runs the cluster; `drive` runs a driver on the first host."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SparkHosts:
        try:
            first = self.network.hosts[0]
            self._start(first, "master.Master", "--host", first.address, "--port", "7077")
            wait_for("the master", lambda: "Starting Spark master" in self.log(first, "master"))
            for host in self.network.hosts:
                self._start(host, "worker.Worker", "--cores", "1", "--memory", "2g", self.url)
            for host in self.network.hosts:
                wait_for("a worker", lambda host=host: "Successfully registered" in self.log(host, "worker"))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            # With the executors that a worker started.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def url(self) -> str:
        return f"spark://{self.network.hosts[0].address}:7077"

    def log(self, host: Host, kind: str) -> str:
        file = self.folder / f"{kind}-{host.name}.log"
        return file.read_text() if file.exists() else ""

    def logs(self) -> str:
        """What the executors wrote, for the message of a test that failed."""
        files = sorted(self.folder.glob("work-*/*/*/stderr"))
        return "\n".join(f"--- {file}\n{file.read_text()[-3000:]}" for file in files)

    def drive(self, **settings: Any) -> subprocess.Popen[str]:
        """Starts a driver on the first host."""
        words = [sys.executable, str(DRIVER), self.url, str(self.folder / "store"), json.dumps(settings)]
        first = self.network.hosts[0]
        return first.start(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self._environment(first)
        )

    def result(self, driver: subprocess.Popen[str]) -> dict[str, Any]:
        """Returns what the driver printed; fails with its last words and the executors' logs."""
        out, err = driver.communicate(timeout=400)
        assert driver.returncode == 0, err[-4000:] + self.logs()
        told: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return told

    def _environment(self, host: Host) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
        if self.network.own_names == "unknown":
            # Without it Spark itself does not start on such a host.
            kept["SPARK_LOCAL_IP"] = host.address
        return kept | {"PYSPARK_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}

    def _start(self, host: Host, name: str, *arguments: str) -> None:
        import pyspark

        spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
        kind = name.partition(".")[0]
        work = {"SPARK_WORKER_DIR": str(self.folder / f"work-{host.name}")}
        with (self.folder / f"{kind}-{host.name}.log").open("wb") as log:
            words = [str(spark_class), f"org.apache.spark.deploy.{name}", "--webui-port", "0", *arguments]
            self._started.append(
                host.start(words, stdout=log, stderr=log, cwd=self.folder, env=self._environment(host) | work)
            )
