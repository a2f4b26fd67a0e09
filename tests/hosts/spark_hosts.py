"""A standalone Spark cluster over the hosts of a `Network`: the master on the first, a worker on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyspark
from namespaces import Host, Network
from s3_server import S3Server
from waiting import wait_for

HERE = Path(__file__).parent
SPARK = Path(pyspark.__file__).parent
# This machine's Spark settings of addresses are wrong on the hosts.
_FOREIGN = ("SPARK_LOCAL_IP", "SPARK_LOCAL_HOSTNAME", "SPARK_PUBLIC_DNS", "PYSPARK_SUBMIT_ARGS")
# Timeouts of master and driver for a silent host; Spark's defaults are one minute and two.
PATIENCE_SECONDS = 20


class SparkHosts:
    """A context that runs the cluster; `drive` runs a driver on the first host.

    Args:
        is_first_a_worker: Whether the host of master and drivers also has a worker.
        secret: Secret of all Spark processes; empty for none.
        clocks: Host name -> seconds by which the clock of its Spark worker is ahead.
        has_bucket: Whether the only store is an S3 server on the first host, instead of a shared folder.
        worker_cores: Cores per worker; an executor takes one.
        archive: Archive of `ringspark pack` that the drivers pass to executors. The workers then see neither
            this environment nor its Python.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        *,
        is_first_a_worker: bool = True,
        secret: str = "",
        clocks: Mapping[str, int] | None = None,
        has_bucket: bool = False,
        worker_cores: int = 1,
        archive: Path | None = None,
    ) -> None:
        self.network, self.folder = network, folder
        self.workers = network.hosts[0 if is_first_a_worker else 1 :]
        self._secret, self._clocks, self._has_bucket = secret, clocks or {}, has_bucket
        self._room = ("--cores", str(worker_cores), "--memory", f"{2 * worker_cores}g")
        self._bucket: S3Server | None = None
        self._archive = archive
        self._stack = ExitStack()

    def __enter__(self) -> SparkHosts:
        with self._stack:
            first = self.network.hosts[0]
            if self._has_bucket:
                self._bucket = S3Server({}, first.address, first.command)
                self._stack.callback(self._bucket.close)
            self._start(first, "master.Master", "--host", _in_url(first), "--port", "7077")
            wait_for("the master", lambda: "Starting Spark master" in self.log(first, "master"), 60)
            for host in self.workers:
                self._start_worker(host)
            for host in self.workers:
                self._wait_for_worker(host)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        return f"spark://{_in_url(self.network.hosts[0])}:7077"

    def revive(self, host: Host) -> None:
        """Restarts a vanished host."""
        self.network.plug_in(host)
        self._start_worker(host)
        self._wait_for_worker(host)

    def _start_worker(self, host: Host) -> None:
        bare = () if self._archive is None else _without_python(self.folder)
        self._start(host, "worker.Worker", "--host", _in_url(host), *self._room, self.url, prefix=bare)

    def _wait_for_worker(self, host: Host) -> None:
        wait_for(f"{host.name}'s worker", lambda: "Successfully registered" in self.log(host, "worker"), 60)

    def log(self, host: Host, kind: str) -> str:
        file = self.folder / f"{kind}-{host.name}.log"
        return file.read_text() if file.exists() else ""

    def logs(self) -> str:
        """Returns the executors' logs for the message of a failed test."""
        files = sorted(self.folder.glob("work-*/*/*/stderr"))
        return "\n".join(f"--- {file}\n{file.read_text()[-3000:]}" for file in files)

    def drive(self, *fits: Mapping[str, Any], **data: Any) -> subprocess.Popen[str]:
        """Starts a driver on the first host; `data` contains more options of `driver.py`."""
        store = "s3://bucket/store" if self._bucket else str(self.folder / "store")
        options = {**data, "conf": self._conf(), "fits": [{"storageUri": store, **fit} for fit in fits]}
        first = self.network.hosts[0]
        return first.start(
            [sys.executable, str(HERE / "driver.py"), json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(first),
        )

    def results(self, driver: subprocess.Popen[str]) -> list[dict[str, Any]]:
        """Returns the driver's report of each fit. Fails with its last output and the executors' logs."""
        try:
            out, err = driver.communicate(timeout=900)
        except subprocess.TimeoutExpired:
            driver.kill()
            out, err = driver.communicate()
        assert driver.returncode == 0, err[-4000:] + self.logs()
        return json.loads(out.strip().splitlines()[-1])

    def _conf(self) -> dict[str, str]:
        conf = {
            "spark.master": self.url,
            "spark.network.timeout": f"{PATIENCE_SECONDS}s",
            "spark.network.timeoutInterval": "5s",
            "spark.executor.heartbeatInterval": "2s",
        }
        if self._secret:
            conf |= {"spark.authenticate": "true", "spark.authenticate.secret": self._secret}
        if self._archive is not None:
            conf["spark.archives"] = f"{self._archive}#environment"
        return conf

    def environment(self, host: Host) -> dict[str, str]:
        """Returns the environment of a Spark process on the host."""
        kept = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
        if self.network.own_names == "unknown" or self.network.has_decoys:
            # Without it, Spark does not start on such a host, or uses the wrong interface.
            kept["SPARK_LOCAL_IP"] = host.address
        if self.network.version == 6:
            kept |= {
                "SPARK_LOCAL_IP": _in_url(host),
                "SPARK_PREFER_IPV6": "true",
                "JAVA_TOOL_OPTIONS": "-Djava.net.preferIPv6Addresses=true",
            }
        if self._bucket:
            kept["FSSPEC_S3"] = json.dumps(self._bucket.settings)
        options = [f"-Dspark.worker.timeout={PATIENCE_SECONDS}"]
        if self._secret:
            options += ["-Dspark.authenticate=true", f"-Dspark.authenticate.secret={self._secret}"]
        return kept | {
            "PYSPARK_PYTHON": sys.executable if self._archive is None else "./environment/bin/python",
            "OMP_NUM_THREADS": "1",
            "SPARK_DAEMON_JAVA_OPTS": " ".join(options),
        }

    def _start(self, host: Host, name: str, *arguments: str, prefix: Sequence[str] = ()) -> None:
        spark_class = (self.folder / "spark" if prefix else SPARK) / "bin" / "spark-class"
        kind = name.partition(".")[0]
        environment = self.environment(host) | {"SPARK_WORKER_DIR": str(self.folder / f"work-{host.name}")}
        if kind == "worker" and host.name in self._clocks:
            environment |= _clock(self.folder, self._clocks[host.name])
        words = [str(spark_class), f"org.apache.spark.deploy.{name}", "--webui-port", "0", *arguments]
        if prefix:
            environment |= {"SPARK_HOME": str(self.folder / "spark"), "PATH": os.defpath}
        with (self.folder / f"{kind}-{host.name}.log").open("wb") as log:
            process = host.start([*prefix, *words], stdout=log, stderr=log, cwd=self.folder, env=environment)
        # Its child processes end with its host.
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)


def _without_python(folder: Path) -> list[str]:
    """Returns the start of a command that hides this environment, its Python and the checkout.

    `ip netns exec` gives each process mounts of its own. Spark, which is a part of the environment, appears
    as `folder`/spark.
    """
    (folder / "spark").mkdir(exist_ok=True)
    packages = {str(Path(path).parent) for path in sys.path if path.endswith("-packages")}
    hidden = {sys.prefix, sys.base_prefix, str(HERE.parent.parent), *packages} - {"/usr", "/usr/local"}
    mounts = [f"mount --bind {SPARK} {folder}/spark"]
    mounts += [f"mount -t tmpfs none {place}" for place in sorted(hidden, key=len, reverse=True)]
    return ["sh", "-c", f'{" && ".join(mounts)} && exec "$@"', "sh"]


def _in_url(host: Host) -> str:
    return f"[{host.address}]" if ":" in host.address else host.address


def _clock(folder: Path, seconds: int) -> dict[str, str]:
    """Returns the environment for a process and its children whose clock is ahead."""
    library = folder / "shifted_clock.so"
    if not library.exists():
        source = HERE / "shifted_clock.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_SHIFT_SECONDS": str(seconds)}
