"""Fixtures of the places: stores and cluster managers as real processes on loopback."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import places
import pytest
from command_line import run_ringspark
from hadoop import Hadoop


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder with `places`, for `make test-places`."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("places")


def require(reason: str | None) -> None:
    """Skips a test whose server is missing; fails it where RINGSPARK_REQUIRE_PLACES is set."""
    if reason is not None and places.IS_REQUIRED:
        pytest.fail(reason)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, places.Store]]:
    """All stores that can run here, and the variables of their clients in this process."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        running: dict[str, Any] = {
            name: stack.enter_context(start(tmp_path_factory.mktemp(name)))
            for name, start in places.STORES.items()
            if places.missing(name) is None
        }
        for store in running.values():
            for name, value in store.environment.items():
                patch.setenv(name, value)
                if name.startswith("FSSPEC_"):
                    patch.setitem(fsspec.config.conf, name.removeprefix("FSSPEC_").lower(), json.loads(value))
        yield running


@pytest.fixture(params=places.STORES)
def store(request: pytest.FixtureRequest, stores: dict[str, places.Store]) -> places.Store:
    require(places.missing(request.param))
    return stores[request.param]


@pytest.fixture
def spark_on_stores(stores: dict[str, places.Store], spark: Any) -> Iterator[Any]:
    """The session, whose Python workers reach all stores."""
    environment = spark.sparkContext.environment
    added = {name: value for store in stores.values() for name, value in store.environment.items()}
    environment.update(added)
    yield spark
    for name in added:
        del environment[name]


@pytest.fixture
def root(store: places.Store, request: pytest.FixtureRequest) -> str:
    """A folder of the store for one test; nothing is in it."""
    return f"{store.root}/{request.function.__name__} {os.getpid()}"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hadoop]:
    """HDFS and, after `start_yarn`, YARN: for tests that break them."""
    require(places.missing("hdfs"))
    hadoop = Hadoop(tmp_path_factory.mktemp("hadoop") / "cluster")
    try:
        hadoop.start_hdfs()
        yield hadoop
    finally:
        hadoop.close()


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive that `ringspark pack` writes of this environment, once for all processes of a run."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "packed"
    folder.mkdir(exist_ok=True)
    archive = folder / "environment.tar.gz"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            (folder / "requirements.txt").write_text("hdfs-native\n")
            done = run_ringspark("pack", "--requirement", "requirements.txt", cwd=folder)
            assert done.returncode == 0, done.stderr
    return archive
