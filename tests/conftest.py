"""Fixtures of all tests: one Spark session, shards made without Spark, and guards against leaks.

The session's master comes from RINGSPARK_TEST_MASTER: `local[4]` by default, `local-cluster[...]`,
or `connect`, or a server's address `sc://...`, for Spark Connect. tests/test_modes.py runs the suite of the
stages over all three.
"""

from __future__ import annotations

import fcntl
import gc
import itertools
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from written_shards import written

from ringspark.pipelines import ShardManifest

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
# Jobs here take a second: Java's thorough compiler and parallel collector cost more than they save.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# A loaded machine is no failure: no test here is about time.
settings.register_profile("ringspark", deadline=None)
settings.load_profile("ringspark")

MASTER = os.environ.get("RINGSPARK_TEST_MASTER", "local[4]")

# Workers that a test has ended need not import torch again.
DAEMON = ("spark.python.daemon.module", "ringspark.estimators.launch.python_daemon")

SLOW_SECONDS = 10.0

EXTRAS = Path(__file__).parent / "extras"
SUPPORT = Path(__file__).parent / "support"

MakeShards = Callable[..., ShardManifest]


@contextmanager
def alone_on_the_connect_port() -> Iterator[None]:
    """Sole use of the one port that a Connect server of a session's own takes: suites run side by side."""
    with (Path(tempfile.gettempdir()) / "ringspark-tests-connect.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file
        yield


@pytest.fixture
def connect_port() -> Iterator[None]:
    """For a test that starts such a server in a process of its own."""
    with alone_on_the_connect_port():
        yield


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """The one session of this process."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("ringspark-tests")
    if MASTER == "connect":
        with alone_on_the_connect_port():
            with warnings.catch_warnings():
                # The server has taken it at its start; the client sets it again, in vain.
                warnings.filterwarnings("ignore", message="(?s).*spark.python.daemon.module")
                session = builder.remote("local[4]").config(*DAEMON).getOrCreate()
            yield session
            session.stop()
        return
    if MASTER.startswith("sc://"):
        session = builder.remote(MASTER).getOrCreate()
    else:
        session = (
            builder.master(MASTER)
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.shuffle.partitions", "4")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config(DAEMON[0], "warm_daemon")
            .config("spark.executorEnv.PYTHONPATH", str(SUPPORT))
            # Spark sets it for most Python tasks, and starts one more daemon for those without it.
            .config("spark.executorEnv.SPARK_SIMPLIFIED_TRACEBACK", "1")
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def mounts(spark: Any, tmp_path: Path) -> Iterator[Path]:
    """A folder that is /data, and /usr too, where the default file system is a table of mounts."""
    if MASTER == "connect" or MASTER.startswith("sc://"):
        pytest.skip("the conf of Hadoop is the server's")
    conf = spark._jsc.hadoopConfiguration()
    before = conf.get("fs.defaultFS")
    for folder in ("data", "usr"):
        # Hadoop keeps a table by its name.
        conf.set(f"fs.viewfs.mounttable.{tmp_path.name}.link./{folder}", f"file://{tmp_path}")
    conf.set("fs.defaultFS", f"viewfs://{tmp_path.name}/")
    yield tmp_path
    conf.set("fs.defaultFS", before)


@pytest.fixture
def make_shards(tmp_path: Path) -> MakeShards:
    """Writes shards from NumPy columns with the product's own writer, without Spark."""

    def make(
        columns: dict[str, np.ndarray],
        *,
        row_group_rows: int = 64,
        num_files: int = 2,
        validation: np.ndarray | None = None,
        name: str = "shards",
    ) -> ShardManifest:
        return written(
            tmp_path / name,
            columns,
            row_group_rows=row_group_rows,
            num_files=num_files,
            validation=validation,
        )

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives every test of the folder `extras` the mark of that name."""
    for item in items:
        if EXTRAS in item.path.parents:
            item.add_marker("extras")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leaves the imports and the collected tests out of all garbage collections.

    To visit them takes a third of a second, and some tests collect garbage in each of their passes.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Names every test above 10 s that is not marked slow: `make test` has no room for it."""
    seconds: dict[str, float] = {}
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport) and "slow" not in report.keywords:
            seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
    for name, taken in sorted(seconds.items(), key=lambda entry: -entry[1]):
        if taken > SLOW_SECONDS:
            terminalreporter.write_line(f"{taken:.1f} s, and not marked slow: {name}")


@pytest.fixture(autouse=True)
def executors_find_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Functions and classes of a test file travel by value: no executor can import the file."""
    import cloudpickle
    from pyspark import cloudpickle as spark_cloudpickle

    for library in (cloudpickle, spark_cloudpickle):
        library.register_pickle_by_value(request.module)
    yield
    for library in (cloudpickle, spark_cloudpickle):
        library.unregister_pickle_by_value(request.module)


@pytest.fixture(autouse=True)
def networks_begin_alike() -> None:
    """A network that a test makes has the same first weights in every run, alone or after other tests."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """No test leaves a changed environment or a thread of ours behind."""
    # Spark starts in the first test that needs it, and announces its gateway this way.
    ours = ("HOROVOD_", "MASTER_", "GLOO_", "NCCL_", "CUDA_VISIBLE", "RANK", "WORLD_SIZE")
    before = {k: v for k, v in os.environ.items() if k.startswith(ours)}
    yield
    assert {k: v for k, v in os.environ.items() if k.startswith(ours)} == before
    threads = [t.name for t in threading.enumerate() if t.name.startswith("ringspark")]
    assert not threads, f"threads left behind: {threads}"
