"""Fixtures for all tests: one Spark session, shards written without Spark, and checks for leaks.

RINGSPARK_TEST_MASTER sets the master: `local[4]` (default), `local-cluster[...]`, or, for Spark Connect,
`connect` or a server address `sc://...`. tests/test_modes.py runs the `modes` tests in all three modes.
"""

import fcntl
import gc
import itertools
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from written_shards import written

from ringspark.pipelines import ShardManifest

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
# A proxy of the user's network cannot reach the servers that tests start on loopback.
_direct = ",".join(filter(None, (os.environ.get("no_proxy"), "localhost,127.0.0.1")))
os.environ["no_proxy"] = os.environ["NO_PROXY"] = _direct
# Jobs here take a second, so Java's optimizing compiler and parallel collector cost more than they save.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# A busy machine must not fail a test: no test here measures time.
settings.register_profile("ringspark", deadline=None)
settings.load_profile("ringspark")

MASTER = os.environ.get("RINGSPARK_TEST_MASTER", "local[4]")

# The daemon keeps torch imported when it forks new workers.
DAEMON = ("spark.python.daemon.module", "ringspark.estimators.launch.python_daemon")

SLOW_SECONDS = 10.0

EXTRAS = Path(__file__).parent / "extras"
SUPPORT = Path(__file__).parent / "support"

MakeShards = Callable[..., ShardManifest]


@contextmanager
def alone_on_the_connect_port() -> Iterator[None]:
    """Holds a lock on the fixed port of a session's Connect server, because suites run in parallel."""
    with (Path(tempfile.gettempdir()) / "ringspark-tests-connect.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file releases the lock
        yield


@pytest.fixture
def connect_port() -> Iterator[None]:
    """Reserves the Connect port for a test that starts its own server in another process."""
    with alone_on_the_connect_port():
        yield


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """The only Spark session of this process."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("ringspark-tests")
    if MASTER == "connect":
        with alone_on_the_connect_port():
            with warnings.catch_warnings():
                # The server reads this setting at startup. The client then tries to set it again and warns.
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
            # Else Spark forgets what it compiled for a plan after 100 others.
            .config("spark.sql.codegen.cache.maxEntries", "4000")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config(DAEMON[0], "warm_daemon")
            .config("spark.executorEnv.PYTHONPATH", str(SUPPORT))
            # Spark sets this variable for most Python tasks. Without it here, Spark would start a second
            # daemon.
            .config("spark.executorEnv.SPARK_SIMPLIFIED_TRACEBACK", "1")
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def mounts(spark: Any, tmp_path: Path) -> Iterator[Path]:
    """A folder mounted as /data and /usr when the default file system is a mount table."""
    if MASTER == "connect" or MASTER.startswith("sc://"):
        pytest.skip("the conf of Hadoop is the server's")
    conf = spark._jsc.hadoopConfiguration()
    before = conf.get("fs.defaultFS")
    for folder in ("data", "usr"):
        # Hadoop caches each mount table by name.
        conf.set(f"fs.viewfs.mounttable.{tmp_path.name}.link./{folder}", f"file://{tmp_path}")
    conf.set("fs.defaultFS", f"viewfs://{tmp_path.name}/")
    yield tmp_path
    conf.set("fs.defaultFS", before)


@pytest.fixture
def make_shards(tmp_path: Path) -> MakeShards:
    """Returns a function that writes NumPy columns as shards with the package's writer, without Spark."""

    def make(columns: dict[str, Any], *, name: str = "shards", **options: Any) -> ShardManifest:
        return written(tmp_path / name, columns, **options)

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests by their folder and by other marks, and puts the file that takes longest first."""
    for item in items:
        if EXTRAS in item.path.parents:
            item.add_marker("extras")
        if "telling" in item.keywords:
            item.add_marker("slow")
    # Started last, it would keep one process busy while the others have nothing left to do.
    items.sort(key=lambda item: item.path.name != "test_modes.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Excludes imports and collected tests from garbage collection.

    Traversing them takes a third of a second, and some tests collect garbage in a loop.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Lists tests that take over 10 s and are not marked slow, because `make test` must stay fast."""
    seconds: dict[str, float] = {}
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport) and "slow" not in report.keywords:
            seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
    for name, taken in sorted(seconds.items(), key=lambda entry: -entry[1]):
        if taken > SLOW_SECONDS:
            terminalreporter.write_line(f"{taken:.1f} s, and not marked slow: {name}")


@pytest.fixture(autouse=True)
def executors_find_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pickles functions and classes of the test file by value, because executors cannot import the file."""
    import cloudpickle

    libraries = [cloudpickle]
    with suppress(ModuleNotFoundError):  # a machine with a GPU may have no Spark
        libraries.append(import_module("pyspark.cloudpickle"))
    for library in libraries:
        library.register_pickle_by_value(request.module)
    yield
    for library in libraries:
        library.unregister_pickle_by_value(request.module)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Uses one thread, which is faster for small networks."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def networks_begin_alike() -> None:
    """Seeds torch, so a network has the same initial weights alone and after other tests."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fails a test that leaves a changed environment or one of our threads behind."""
    # The first test that needs Spark starts it, and Spark sets this variable then.
    ours = ("HOROVOD_", "MASTER_", "GLOO_", "NCCL_", "CUDA_VISIBLE", "RANK", "WORLD_SIZE")
    before = {k: v for k, v in os.environ.items() if k.startswith(ours)}
    yield
    assert {k: v for k, v in os.environ.items() if k.startswith(ours)} == before
    threads = [t.name for t in threading.enumerate() if t.name.startswith("ringspark")]
    assert not threads, f"threads left behind: {threads}"
