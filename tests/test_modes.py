"""Runs the tests marked `modes` again, on separate executor processes and through Spark Connect.

The client of Spark 3.5, which has no Connect server, uses the server of `.venv`.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
from waiting import wait_for

ROOT = Path(__file__).parent.parent
# Allowed skip reasons: features that Spark lacks, in the words of tests/estimators/conftest.py.
SPARK_LACKS = re.compile(r"pyspark 3\S+ has no pyspark\.ml\.\S+ on Spark Connect")
OWN_SERVER = not pyspark.__version__.startswith("3.")
# The oldest Spark runs only the tests of the stages.
STAGES = ["tests/estimators/test_conformance.py", "tests/estimators/test_stages.py"]
MARKED = re.compile(r"\bmark\.(?:modes|connect)\b")
# Collecting all other files takes longer than many of these tests.
WHERE = (
    [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARKED.search(path.read_text())]
    if OWN_SERVER
    else STAGES
)
MAIN = ROOT / ".venv" / "bin"


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[str]:
    """RINGSPARK_TEST_MASTER for a Connect server: the session's own server, or a server from `.venv`."""
    if OWN_SERVER:
        yield "connect"
        return
    if not (MAIN / "spark-submit").exists():
        pytest.skip(f"pyspark {pyspark.__version__} brings no Connect server; `make setup` builds one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "spark.master": "local[4]",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "4",
    }
    name = "org.apache.spark.sql.connect.service.SparkConnectServer"
    command = [str(MAIN / "spark-submit"), "--class", name]
    for key, value in settings.items():
        command += ["--conf", f"{key}={value}"]
    path = f"{MAIN}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYSPARK_PYTHON": str(MAIN / "python")}
    environment.pop("SPARK_HOME", None)  # points to this Spark, if set
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "spark-internal"], cwd=tmp_path, env=environment, stdout=log, stderr=log
        )
    try:

        def listens() -> bool:
            assert server.poll() is None, (tmp_path / "server.log").read_text()[-4000:]
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_for(f"the Connect server on {port}", listens)
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def run_the_marked(master: str, marks: str = "modes") -> None:
    """Runs every test with one of the marks in one process."""
    environment = os.environ | {"RINGSPARK_TEST_MASTER": master}
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider", *WHERE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    skips = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    ours = [line for line in skips if OWN_SERVER or not SPARK_LACKS.search(line)]
    assert not ours, "in other modes a test is skipped only where Spark lacks what it is about"


@pytest.mark.spark
@pytest.mark.slow
def test_the_marked_on_executors_of_their_own() -> None:
    run_the_marked("local-cluster[2,1,1024]")


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize(
    "which",
    [pytest.param("not slow", id="quick", marks=pytest.mark.telling), pytest.param("slow", id="slower")],
)
def test_the_marked_through_connect(connect: str, which: str) -> None:
    run_the_marked(connect, f"(modes or connect) and {which}")
