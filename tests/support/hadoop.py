"""Real HDFS and YARN daemons on loopback, from Hadoop's jars and the jars and Java of pip's pyspark.

The jars are in the folder that RINGSPARK_HADOOP names, or in `../shared/hadoop` next to the checkout. Their
coordinates in Maven Central are in `JARS`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pyspark
from daemons import end_daemon, start_daemon
from waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("RINGSPARK_HADOOP", ROOT.parent / "shared" / "hadoop"))
JARS = (
    "org.apache.hadoop:hadoop-client-minicluster:3.5.0",
    *(f"org.bouncycastle:{name}-jdk18on:1.82" for name in ("bcprov", "bcpkix", "bcutil")),
)
_SPARK_JARS = Path(pyspark.__file__).parent / "jars"
_HDFS, _YARN = "org.apache.hadoop.hdfs", "org.apache.hadoop.yarn"
DAEMONS = {
    "namenode": f"{_HDFS}.server.namenode.NameNode",
    "datanode": f"{_HDFS}.server.datanode.DataNode",
    "resourcemanager": f"{_YARN}.server.resourcemanager.ResourceManager",
    "nodemanager": f"{_YARN}.server.nodemanager.NodeManager",
}
_LOGGING = """rootLogger.level=warn
rootLogger.appenderRef.console.ref=console
appender.console.type=Console
appender.console.name=console
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%d %p %c: %m%n
"""


def missing() -> str | None:
    """Returns why Hadoop's daemons cannot run here; None if they can."""
    if shutil.which("java") is None:
        return "java is not on the PATH"
    if not list(FOLDER.glob("hadoop-client-minicluster-*.jar")):
        return f"no jars of Hadoop: set RINGSPARK_HADOOP to a folder with {', '.join(JARS)} of Maven Central"
    return None


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Hadoop:
    """Daemons with one conf folder, which `close` ends. `conf` is a value for HADOOP_CONF_DIR.

    Args:
        folder: Gets the conf, the files and the logs of the daemons.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "conf"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started = 0
        self.port, http, *self._ports = free_ports(7)
        self._manager = f"http://127.0.0.1:{self._ports[-1]}/ws/v1/cluster/nodes"
        self.uri = f"hdfs://127.0.0.1:{self.port}"
        self.write_conf(self.conf, self._hdfs_conf(http))
        (self.conf / "yarn-site.xml").write_text(_xml(self._yarn_conf()))
        (self.conf / "capacity-scheduler.xml").write_text(_xml(_QUEUES))

    def start_hdfs(self) -> None:
        self.run(DAEMONS["namenode"], "-format", "-nonInteractive")
        self.start("namenode")
        self.start("datanode")
        self.wait_until_writable()

    def start_yarn(self, megabytes: int = 16384) -> None:
        """Starts a ResourceManager and a NodeManager with this memory, unless the newest start was equal."""
        if self._started == megabytes:
            return
        self._started = megabytes
        for name in set(self.processes) - {"namenode", "datanode"}:
            self.kill(name)
        self.start("resourcemanager")
        self.start_node("nodemanager", megabytes)
        wait_for("a NodeManager", lambda: self._count_nodes() == 1)

    def start_node(self, name: str, megabytes: int) -> None:
        """Starts a NodeManager with a conf of its own."""
        folder, node = self.folder / name, "yarn.nodemanager"
        shutil.copytree(self.conf, folder / "conf", dirs_exist_ok=True)
        own = {f"{node}.local-dirs": folder / "local", f"{node}.log-dirs": self.folder / "containers" / name}
        own |= {f"{node}.resource.memory-mb": megabytes}
        (folder / "conf" / "yarn-site.xml").write_text(_xml(self._yarn_conf() | own))
        self.start("nodemanager", name, folder / "conf")

    def _count_nodes(self) -> int:
        try:
            with urllib.request.urlopen(self._manager, timeout=5) as answer:
                nodes = (json.load(answer)["nodes"] or {"node": []})["node"]
        except OSError:
            return 0
        return sum(node["state"] == "RUNNING" for node in nodes)

    def start(self, daemon: str, name: str = "", conf: Path | None = None) -> None:
        log, command = self.folder / f"{name or daemon}.log", self._command(DAEMONS[daemon], conf=conf)
        environment = _environment()
        self.processes[name or daemon] = start_daemon(
            command, log, environment=environment, folder=self.folder
        )

    def run(self, name: str, *arguments: str) -> str:
        """Runs a program of Hadoop to its end and returns its output."""
        done = subprocess.run(
            self._command(name, *arguments, heap="-Xmx256m"),
            capture_output=True, text=True, cwd=self.folder, env=_environment(), timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    def shell(self, *arguments: str) -> str:
        return self.run("org.apache.hadoop.fs.FsShell", *arguments)

    def admin(self, *arguments: str) -> str:
        return self.run(f"{_HDFS}.tools.DFSAdmin", *arguments)

    def wait_until_writable(self) -> None:
        """Waits until the NameNode has left safe mode and knows a DataNode."""
        from hdfs_native import Client, WriteOptions

        options = WriteOptions()
        options.overwrite = True  # the file of an attempt without a DataNode

        def is_written() -> bool:
            if (code := self.processes["namenode"].poll()) is not None:
                raise AssertionError(f"the NameNode ended with {code}: {self.folder}/namenode.log")
            try:
                socket.create_connection(("127.0.0.1", self.port), 5).close()
                with Client(self.uri).create("/.started", options) as file:
                    file.write(b"started")
                return bool(Client(self.uri).delete("/.started"))
            except (OSError, RuntimeError):
                return False

        wait_for("HDFS", is_written)

    def read_containers(self) -> str:
        """Returns the output of all containers of YARN."""
        files = sorted((self.folder / "containers").rglob("std*"))
        return "\n".join(f"== {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def kill(self, name: str) -> None:
        end_daemon(self.processes.pop(name), signal.SIGKILL)

    def close(self) -> None:
        for name in reversed(list(self.processes)):
            end_daemon(self.processes.pop(name))

    def client_environment(self, **conf: object) -> dict[str, str]:
        """Returns the environment of a Spark driver on this YARN; `conf` is added to Spark's defaults.

        Keys of `conf` have "_" in the place of ".".
        """
        paths = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
        variables = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        variables |= {"PYTHONPATH": ":".join(filter(None, paths)), "HADOOP_CONF_DIR": str(self.conf)}
        defaults: dict[str, object] = {
            "spark.yarn.jars": f"local:{_SPARK_JARS}/*",  # else each application uploads 400 MB
            "spark.ui.enabled": "false",
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.instances": 2,
            "spark.yarn.am.memory": "512m",
        }
        for kind in ("executorEnv", "yarn.appMasterEnv"):
            defaults |= {f"spark.{kind}.{name}": value for name, value in variables.items()}
        defaults |= {name.replace("_", "."): value for name, value in conf.items()}
        folder = Path(tempfile.mkdtemp(prefix="client", dir=self.folder))
        (folder / "spark-defaults.conf").write_text("".join(f"{k} {v}\n" for k, v in defaults.items()))
        (folder / "log4j2.properties").write_text(_LOGGING)
        return _environment() | variables | {"SPARK_CONF_DIR": str(folder)}

    def _command(
        self, name: str, *arguments: str, heap: str = "-Xmx512m", conf: Path | None = None
    ) -> list[str]:
        path = f"{conf or self.conf}:{FOLDER}/*:{_SPARK_JARS}/*"
        java = ["java", heap, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        return [*java, "-cp", path, name, *arguments]

    def write_conf(self, folder: Path, hdfs: Mapping[str, object], default: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        core = {"fs.defaultFS": default or self.uri, "hadoop.tmp.dir": self.folder / "tmp"}
        (folder / "core-site.xml").write_text(_xml(core))
        (folder / "hdfs-site.xml").write_text(_xml(hdfs))
        (folder / "log4j2.properties").write_text(_LOGGING)

    def _hdfs_conf(self, http: int) -> dict[str, object]:
        return {
            "dfs.replication": 1,
            "dfs.namenode.name.dir": self.folder / "name",
            "dfs.datanode.data.dir": self.folder / "data",
            "dfs.namenode.http-address": f"127.0.0.1:{http}",
            "dfs.datanode.address": "127.0.0.1:0",
            "dfs.datanode.http.address": "127.0.0.1:0",
            "dfs.datanode.ipc.address": "127.0.0.1:0",
            "dfs.namenode.safemode.extension": 0,
            "dfs.heartbeat.interval": 1,
            # Else a closed file waits 0.4 s for the next report of the DataNode.
            "dfs.namenode.file.close.num-committed-allowed": 1,
        }

    def _yarn_conf(self) -> dict[str, object]:
        manager, node = "yarn.resourcemanager", "yarn.nodemanager"
        preemption = f"{manager}.monitor.capacity.preemption"
        kinds = (
            "address",
            "scheduler.address",
            "resource-tracker.address",
            "admin.address",
            "webapp.address",
        )
        return {
            f"{manager}.hostname": "127.0.0.1",
            f"{manager}.bind-host": "127.0.0.1",
            **{
                f"{manager}.{kind}": f"127.0.0.1:{port}"
                for kind, port in zip(kinds, self._ports, strict=True)
            },
            f"{node}.hostname": "127.0.0.1",
            **{
                f"{node}.{kind}": "127.0.0.1:0" for kind in ("address", "webapp.address", "localizer.address")
            },
            f"{node}.resource.cpu-vcores": 8,
            "yarn.scheduler.minimum-allocation-mb": 128,
            f"{node}.vmem-check-enabled": "false",
            f"{node}.disk-health-checker.max-disk-utilization-per-disk-percentage": 100,
            f"{node}.env-whitelist": "JAVA_HOME",
            # Only so a NodeManager without cgroups kills a container that is over its memory.
            f"{node}.resource.memory.enforced": "false",
            # A queue gets its share back from applications of the other queues within seconds.
            f"{manager}.scheduler.monitor.enable": "true",
            f"{preemption}.monitoring_interval": 1000,
            f"{preemption}.max_wait_before_kill": 1000,
            f"{preemption}.total_preemption_per_round": 1.0,
            f"{preemption}.natural_termination_factor": 1.0,
            f"{preemption}.max_ignored_over_capacity": 0,
        }


# Percent of the memory: guaranteed, maximum. "small" has room for two containers of 896 MB.
_SHARES = {"default": (50, 100), "other": (38, 100), "small": (12, 12)}
_CAPACITY = "yarn.scheduler.capacity"
_QUEUES = {
    f"{_CAPACITY}.root.queues": ",".join(_SHARES),
    f"{_CAPACITY}.maximum-am-resource-percent": 0.5,
    **{f"{_CAPACITY}.root.{name}.capacity": share for name, (share, _) in _SHARES.items()},
    **{f"{_CAPACITY}.root.{name}.maximum-capacity": share for name, (_, share) in _SHARES.items()},
    **{f"{_CAPACITY}.root.{name}.user-limit-factor": 10 for name in _SHARES},
}


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("SPARK", "HADOOP", "PYSPARK"))}


def _xml(properties: Mapping[str, object]) -> str:
    items = "".join(f"<property><name>{k}</name><value>{v}</value></property>" for k, v in properties.items())
    return f"<configuration>{items}</configuration>\n"
