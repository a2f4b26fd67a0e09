"""A standalone Spark cluster on this machine: a master and two workers."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyspark
from waiting import wait_for

SPARK = Path(pyspark.__file__).parent / "bin"


def spark_environment() -> dict[str, str]:
    values = {k: v for k, v in os.environ.items() if k != "PYSPARK_GATEWAY_PORT"}
    return values | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}


@contextmanager
def standalone_cluster(
    folder: Path, second_worker: Mapping[str, str] | None = None, cores: tuple[int, int] = (1, 1)
) -> Iterator[str]:
    """Starts the cluster, yields its URL, and stops the processes by id.

    `folder` gets logs and work files. `second_worker` is added to the environment of the second worker.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    url = f"spark://127.0.0.1:{port}"
    deploy = [str(SPARK / "spark-class"), "org.apache.spark.deploy"]
    local = ["--host", "127.0.0.1", "--webui-port", "0"]
    commands = {"master": [deploy[0], f"{deploy[1]}.master.Master", "--port", str(port), *local]}
    for name, number in zip(("worker0", "worker1"), cores, strict=True):
        size = ["-c", str(number), "-m", f"{1500 * number}m", "-d", str(folder / name)]
        commands[name] = [deploy[0], f"{deploy[1]}.worker.Worker", url, *size, *local]
    processes = []
    try:
        for name, command in commands.items():
            log = folder / f"{name}.log"
            environment = spark_environment() | (dict(second_worker or {}) if name == "worker1" else {})
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
                )
            said = "New state: ALIVE" if name == "master" else "Successfully registered with master"
            wait_for(f"{said!r} in {log}", lambda log=log, said=said: said in log.read_text())
        yield url
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=300)
