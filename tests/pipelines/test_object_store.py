"""Shards on a real S3 server on this machine, behind a proxy that breaks connections on command."""

import gc
import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from s3_server import S3Server
from waiting import wait_for

from ringspark.estimators.training.checkpoint.weights import replacing
from ringspark.pipelines import ShardManifest, open_reader, storage, write_shards
from ringspark.pipelines.readers import Batch, base, range_file, retry

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")

pytestmark = pytest.mark.usefixtures("no_thread_left")

FILES, GROUPS, GROUP_ROWS = 3, 4, 1500
NUM_ROWS = FILES * GROUPS * GROUP_ROWS
BATCH = 3 * GROUP_ROWS

# Longer than any answer takes on a busy machine. Tests of the timeout use SHORT_SECONDS.
PATIENT_SECONDS = 600
# A slow answer counts as one more stall here, which no assertion depends on.
SHORT_SECONDS = 2


class Store(S3Server):
    """A store whose client tries once: its retries would take seconds and hide ringspark's own retries."""

    def __init__(self) -> None:
        timeouts = {"read_timeout": PATIENT_SECONDS, "connect_timeout": PATIENT_SECONDS}
        super().__init__({**timeouts, "retries": {"max_attempts": 0}})

    def fail(self, kind: str, *, times: int = 1, pattern: str = "GET .*parquet", skip: int = 0) -> None:
        """Breaks requests as in `Proxy.fault`; forgets earlier requests."""
        self.tell("clear")
        self.tell("fault", kind=kind, times=times, pattern=pattern, skip=skip)

    def requests(self, method: str) -> list[dict[str, Any]]:
        """Returns the requests since `fail` or `tell("clear")`."""
        return [request for request in self.tell("state")["requests"] if request["method"] == method]


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    """One server for the module; s3fs in this process uses it."""
    store = Store()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", store.settings)
        # fsspec's thread lives as long as the process, so start it before a test counts threads.
        fsspec.filesystem("s3").ls("bucket")
        yield store
    s3fs.S3FileSystem.clear_instance_cache()
    store.close()


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The server without faults or requests, and with short waits."""
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    # Readers hold only a few blocks, so a later failure does not prevent the first batch.
    monkeypatch.setattr(base, "block_steps", lambda widths, num_shards, batch_size: 1)
    server.tell("clear")
    yield server
    server.tell("clear")


@pytest.fixture(scope="module")
def columns() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "id": np.arange(NUM_ROWS),
        "wide": generator.normal(size=(NUM_ROWS, 32)).astype(np.float32),
        "x": generator.normal(size=NUM_ROWS).astype(np.float32),
        "y": generator.normal(size=NUM_ROWS),
    }


@pytest.fixture
def local(ordered_shards: Any, columns: dict[str, np.ndarray]) -> ShardManifest:
    return ordered_shards(columns, num_files=FILES, row_group_rows=GROUP_ROWS)


@pytest.fixture
def remote(store: Store, local: ShardManifest) -> Iterator[ShardManifest]:
    """A copy in the bucket; the prefix contains a space and an equals sign."""
    there = replace(local, uri="s3://bucket/a b/day=1/shards")
    for file in local.files:
        storage.write_atomic(f"{there.uri}/{file.path}", (Path(local.uri) / file.path).read_bytes())
    there.save()
    store.tell("clear")
    yield ShardManifest.load(there.uri)
    store.tell("clear")
    storage.remove(there.uri, recursive=True)


def _read(manifest: ShardManifest, engine: str = "arrow", epoch: int = 0, **settings: Any) -> list[Batch]:
    start = settings.pop("start_step", 0)
    reader = open_reader(manifest, engine=engine, batch_size=BATCH, seed=3, **settings)
    return list(reader.batches(epoch, start_step=start))


def _assert_same(left: list[Batch], right: list[Batch]) -> None:
    for one, other in zip(left, right, strict=True):
        assert list(one) == list(other)
        for name in one:
            assert one[name].dtype == other[name].dtype
            assert one[name].tobytes() == other[name].tobytes()


def test_files_come_and_go_in_a_bucket(store: Store) -> None:
    folder = "s3://bucket/files/a b/k=1"
    assert not storage.exists(folder)
    assert storage.list_names(folder) == []
    storage.make_dirs(folder)
    storage.write_atomic(f"{folder}/f", b"one")
    storage.write_atomic(f"{folder}/f", b"three")
    assert storage.read_bytes(f"{folder}/f") == b"three"
    assert storage.size(f"{folder}/f") == 5
    assert storage.list_names(folder) == ["f"]
    assert storage.list_names("s3://bucket/files/a b") == ["k=1"]
    assert storage.exists(folder)
    assert abs((storage.newest_change(folder) or 0) - time.time()) < 600
    storage.remove(f"{folder}/f")
    storage.remove(f"{folder}/f")
    assert not storage.exists(folder)
    storage.write_atomic(f"{folder}/deep/g", b"")
    storage.remove(folder, recursive=True)
    assert not storage.exists(folder)
    storage.check_writable(folder)
    assert not storage.exists(folder)


@pytest.mark.parametrize("num_bytes", [100, 2 * s3fs.S3FileSystem.default_block_size], ids=["one", "several"])
def test_weights_whose_write_breaks_off_leave_the_old_ones(store: Store, num_bytes: int) -> None:
    """Holds for one request and for multipart uploads. fsspec itself uploads its buffer when a `with` ends
    in an error.
    """

    def write(data: bytes, error: Exception | None = None) -> None:
        with replacing("s3://bucket/weights", "old") as file:
            file.write(data)
            if error is not None:
                raise error

    write(b"old")
    with pytest.raises(MemoryError):
        write(bytes(num_bytes), MemoryError())
    gc.collect()
    assert storage.read_bytes("s3://bucket/weights/old") == b"old"
    storage.remove("s3://bucket/weights", recursive=True)


def test_an_empty_bucket_is_never_removed(store: Store) -> None:
    storage.remove_if_empty("s3://bucket")
    assert storage.exists("s3://bucket")


def test_a_commit_whose_answer_got_lost_is_known_to_be_ours(store: Store) -> None:
    store.fail("lost_answer", pattern="PUT")
    storage.write_atomic("s3://bucket/lost", b"mine", overwrite=False)
    assert storage.read_bytes("s3://bucket/lost") == b"mine"
    storage.remove("s3://bucket/lost")


def test_a_commit_that_did_not_arrive_says_so(store: Store) -> None:
    store.fail("reset_before", times=9, pattern="PUT")
    with pytest.raises(ConnectionError, match=r"bucket/gone: EndpointConnectionError"):
        storage.write_atomic("s3://bucket/gone", b"mine", overwrite=False)
    store.tell("clear")
    assert not storage.exists("s3://bucket/gone")


def test_whatever_the_client_raises_is_an_oserror_that_names_the_uri(store: Store) -> None:
    uri = "s3://bucket/small"
    storage.write_atomic(uri, b"small" * 100)
    store.fail("reset_before", times=99, pattern="")
    for ask in (storage.read_bytes, storage.size, storage.exists, storage.list_names):
        with pytest.raises(ConnectionError, match=rf"{uri}: EndpointConnectionError: Could not connect"):
            ask(uri)
    store.fail("short", pattern="GET")
    with pytest.raises(ConnectionError, match=rf"{uri}: ClientPayloadError"):
        storage.read_bytes(uri)
    store.tell("clear")
    storage.remove(uri)


def test_a_silent_store_is_a_timeout_that_names_the_uri(store, monkeypatch):
    options = {**store.settings["config_kwargs"], "read_timeout": SHORT_SECONDS}
    monkeypatch.setitem(fsspec.config.conf, "s3", {**store.settings, "config_kwargs": options})
    uri = "s3://bucket/small"
    storage.write_atomic(uri, b"small" * 100)
    store.fail("stall", pattern="GET")
    with pytest.raises(TimeoutError, match=rf"{uri}: Read timeout on endpoint"):
        storage.read_bytes(uri)
    store.tell("clear")
    storage.remove(uri)


def test_small_requests_rest_on_the_attempts_of_the_client(store, monkeypatch):
    """This is why `storage` does not retry small requests itself."""
    monkeypatch.undo()
    settings = {**store.settings, "config_kwargs": {"read_timeout": PATIENT_SECONDS}}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    storage.write_atomic("s3://bucket/small", b"small" * 100)
    for ask, kinds in (
        (storage.read_bytes, ("slow_down", "internal", "reset", "short", "reset_before")),
        (storage.size, ("slow_down", "reset_before")),
        (storage.exists, ("slow_down", "reset_before")),
        (storage.list_names, ("slow_down", "reset_before")),
    ):
        for kind in kinds:
            store.fail(kind, pattern="GET" if ask in (storage.read_bytes, storage.list_names) else "HEAD")
            assert ask("s3://bucket/small")
            assert store.tell("state")["faults_left"] == 0
    storage.remove("s3://bucket/small")


def test_batches_are_bitwise_those_of_local_files(local, remote, engine):
    assert remote.files == local.files
    remote.verify()
    for way in ({"epoch": 0}, {"epoch": 1, "start_step": 2}, {"shuffle": False}):
        _assert_same(_read(remote, engine, **way), _read(local, engine, **way))


@pytest.mark.parametrize(
    ("names", "ranges"),
    [
        (None, 1),
        pytest.param(["id"], 1, marks=pytest.mark.slow),
        (["x", "y"], 1),  # adjacent columns
        (["id", "x"], 2),  # "wide" lies between them
    ],
)
def test_a_row_group_costs_a_request_for_columns_side_by_side(store, remote, engine, names, ranges):
    store.tell("clear")
    reader = open_reader(remote, names, engine=engine, batch_size=BATCH)
    list(reader.batches(0))
    sizes, reads = store.requests("HEAD"), store.requests("GET")
    # One size request and one footer per file, plus the row groups. A file's last row group may lie within
    # the 64 KiB that are read for the footer.
    first, rest = ranges * FILES * (GROUPS - 1), ranges * FILES
    assert len(sizes) == FILES
    assert FILES + first <= len(reads) <= FILES + first + rest, reads
    assert all(request["range"] for request in reads)
    stored = sum(file.num_bytes for file in remote.files)
    received = sum(request["sent"] for request in (*sizes, *reads))
    assert received <= stored / (1 if names is None else 5) + FILES * (64 << 10)
    # The second epoch requests neither sizes nor footers.
    store.tell("clear")
    list(reader.batches(1))
    assert not store.requests("HEAD")
    assert first <= len(store.requests("GET")) <= first + rest


def test_resuming_reads_only_what_is_left(store: Store, remote: ShardManifest, engine: str) -> None:
    store.tell("clear")
    _read(remote, engine, start_step=NUM_ROWS // BATCH - 1, shuffle=False)
    requests = store.requests("GET")
    footers = 1 if engine == "arrow" else 3
    # The last step is 3 row groups of the last file, without its first.
    assert len(requests) <= footers + 3
    assert sum("part-00002" in request["path"] for request in requests) == 4


# test_a_silent_store_is_given_up_before_its_client_does has the stall.
SLOW_FAULTS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("slow_down", "internal")]


def _retries(caplog: Any) -> list[str]:
    """Returns the warnings about reads that failed."""
    return [record.getMessage() for record in caplog.records if record.name == retry.__name__]


@pytest.mark.parametrize("kind", ["reset", "short", "reset_before", *SLOW_FAULTS])
def test_nothing_is_lost_or_repeated_over_faults(store, local, remote, engine, kind, caplog):
    expected = _read(local, engine)
    # Faults in footers, in the first row groups, and in later row groups.
    for skip in (1, 5, 11):
        # aiohttp itself retries when a kept-alive connection closes before an answer.
        store.fail(kind, times=6 if kind == "reset_before" else 1, skip=skip)
        _assert_same(_read(remote, engine), expected)
        assert store.tell("state")["faults_left"] == 0
    assert len(_retries(caplog)) >= 3
    assert all("parquet' failed" in text and "of 4; the next in 0.0" in text for text in _retries(caplog))


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("reset", "ConnectionError: bytes .*ClientPayloadError: .*"),
        ("slow_down", "OSError: .*Please reduce your request rate.*"),
    ],
)
def test_when_attempts_end_one_error_says_all(store, remote, engine, kind, cause, caplog):
    # The second request for this file reads its first row group.
    store.fail(kind, times=99, pattern="GET .*part-00001", skip=1)
    batches = open_reader(remote, engine=engine, batch_size=BATCH, shuffle=False).batches(0)
    assert next(batches)["id"][0] == 0
    with pytest.raises(
        RuntimeError,
        match=rf"reading row group 0 of 's3://bucket/a b/day=1/.*part-00001.parquet' failed after "
        rf"4 attempts \({cause}\); check the connection to the store and resume",
    ):
        list(batches)
    assert sum("part-00001" in text for text in _retries(caplog)) == 3


def test_what_another_attempt_cannot_change_ends_at_once(store, remote, engine, caplog):
    store.fail("forbidden", times=99, pattern="GET .*part-00001", skip=1)
    with pytest.raises(
        RuntimeError,
        match=r"reading row group 0 of '.*part-00001.parquet' failed \(PermissionError: Access Denied\); "
        "check the credentials",
    ):
        _read(remote, engine, shuffle=False)
    store.tell("clear")
    storage.remove(remote.paths[2])
    with pytest.raises(RuntimeError, match=r"row group \d of '.*part-00002.parquet' failed \(FileNotFound"):
        list(open_reader(remote, engine="arrow", batch_size=BATCH, shuffle=False).batches(0))
    assert not _retries(caplog)


def test_a_store_that_refuses_connections_for_a_while(store, local, remote, engine):
    expected = _read(local, engine)

    class Reopen(logging.Handler):
        texts: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.texts.append(record.getMessage())
            if len(self.texts) == 2:
                store.tell("accept")

    handler = Reopen()
    reader = open_reader(remote, engine=engine, batch_size=BATCH, seed=3)
    logger = logging.getLogger(retry.__name__)
    logger.addHandler(handler)
    try:
        store.tell("refuse")
        _assert_same(list(reader.batches(0)), expected)
    finally:
        logger.removeHandler(handler)
    assert len(handler.texts) == 2
    assert "EndpointConnectionError: Could not connect to the endpoint URL" in handler.texts[0]


def test_closing_during_a_stall_ends_the_threads(store: Store, remote: ShardManifest, engine: str) -> None:
    store.fail("stall", times=99, pattern="GET .*part-00002", skip=1)
    batches = open_reader(remote, engine=engine, batch_size=BATCH, shuffle=False).batches(0)
    next(batches)
    wait_for("an answer that stops in the middle", lambda: store.tell("state")["stalled"] > 0)
    batches.close()
    # The answer still hangs here; a join() in close() would have waited 600 s.
    assert store.tell("state")["stalled"] >= 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ringspark")]


def test_closing_during_a_wait_ends_the_threads(store, remote, engine, monkeypatch):
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 600)
    waiting = threading.Event()
    monkeypatch.setattr(retry._logger, "warning", lambda *args: waiting.set())
    store.fail("reset", times=99, pattern="GET .*part-00002", skip=1)
    batches = open_reader(remote, engine=engine, batch_size=BATCH, shuffle=False).batches(0)
    next(batches)
    assert waiting.wait(60)
    batches.close()


def test_a_silent_store_is_given_up_before_its_client_does(store, local, remote, engine, monkeypatch):
    expected = _read(local, engine)
    monkeypatch.setattr(range_file, "READ_SECONDS", SHORT_SECONDS)
    store.fail("stall", times=1, skip=4)
    _assert_same(_read(remote, engine), expected)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionError("reset"), True),
        (TimeoutError("silent"), True),
        (OSError(16, "SlowDown"), True),
        (OSError("a damaged page, or a lost connection"), True),
        (FileNotFoundError("NoSuchKey"), False),
        (PermissionError("AccessDenied"), False),
        (OSError(22, "InvalidRange"), False),
        (ValueError("rows"), False),
        (RuntimeError("not fork-safe"), False),
    ],
)
def test_which_errors_pass(error: Exception, passes: bool) -> None:
    assert retry.may_pass(error) is passes


def test_missing_credentials_are_permanent() -> None:
    from botocore.exceptions import NoCredentialsError

    with pytest.raises(PermissionError, match="here: NoCredentialsError"), storage.store_errors("here"):
        raise NoCredentialsError


@pytest.fixture
def spark_on_store(spark: Any, store: Store) -> Iterator[Any]:
    """Spark whose Python workers use the store, through an environment variable of fsspec."""
    if not hasattr(spark, "_jvm"):
        pytest.skip("the environment of the workers cannot be set through Spark Connect")
    environment = spark.sparkContext.environment
    environment["FSSPEC_S3"] = json.dumps(store.settings)
    yield spark
    del environment["FSSPEC_S3"]


@pytest.mark.spark
def test_spark_writes_to_a_bucket(spark_on_store: Any, store: Store) -> None:
    uri = "s3://bucket/spark/a b/model=x"
    df = spark_on_store.range(0, 3000, 1, 3).selectExpr("id", "cast(id as float) / 7 as x")
    write_shards(df.limit(10), uri)
    with pytest.raises(ValueError, match="holds shards already"):
        write_shards(df, uri)
    old = ShardManifest.load(uri)
    manifest = write_shards(df, uri, row_group_rows=100, overwrite=True)
    assert ShardManifest.load(uri) == replace(manifest, stats=ShardManifest.load(uri).stats)
    manifest.verify()
    assert len(manifest.files) == 3
    # The replaced shards are removed, and only files in the manifest remain.
    assert not storage.exists(old.paths[0])
    folder, _ = storage.list_names(uri)
    assert folder == manifest.files[0].path.split("/")[0]
    assert len(storage.list_names(storage.join(uri, folder))) == 3
    (batch,) = _read(manifest, shuffle=False)
    np.testing.assert_array_equal(batch["id"], np.arange(3000))
    np.testing.assert_array_equal(batch["x"], np.arange(3000) / 7)
    storage.remove(uri, recursive=True)
    with pytest.raises(ValueError, match="holds no shards"):
        ShardManifest.load(uri)


@pytest.mark.spark
def test_a_failed_upload_commits_nothing(spark_on_store, store, capfd):
    uri = "s3://bucket/spark/failing"
    df = spark_on_store.range(0, 3000, 1, 3)
    store.fail("internal", times=99, pattern="PUT .*part-")
    with pytest.raises(
        RuntimeError, match=r"^writing 's3://.*/part-.*' failed, nothing is committed \("
    ) as caught:
        write_shards(df, uri)
    assert "We encountered an internal error" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    store.tell("clear")
    # Spark may not have stopped a task yet, which can still write into the folder of the failed write.
    left = storage.list_names(uri)
    assert len(left) <= 1
    assert all(name.startswith("_shards-") for name in left)
    old = write_shards(df, uri)
    # Fails for one of three files, and in the second case for the manifest.
    for pattern in ("PUT .*part-00001", "PUT .*manifest.json"):
        store.fail("internal", times=99, pattern=pattern)
        with pytest.raises(RuntimeError, match=r"^writing .* failed.*We encountered an internal error"):
            write_shards(df.limit(5), uri, overwrite=True, num_files=2)
        store.tell("clear")
        assert ShardManifest.load(uri).files == old.files
        owned = {old.files[0].path.split("/")[0], "manifest.json"}
        names = set(storage.list_names(uri))
        assert owned <= names
        assert all(name.startswith("_shards-") for name in names - owned)
    old.verify()
    storage.remove(uri, recursive=True)
    capfd.readouterr()


@pytest.mark.telling
@pytest.mark.extras
@pytest.mark.spark
def test_shards_in_a_bucket_are_used_again(spark_on_store: Any, store: Store, tmp_path: Path) -> None:
    from ringspark.pipelines import cached_shards

    source = str(tmp_path / "source")
    spark_on_store.range(100).write.parquet(source)
    first = cached_shards(spark_on_store.read.parquet(source), "s3://bucket/spark/cache", key="v1")
    store.tell("clear")
    again = cached_shards(spark_on_store.read.parquet(source), "s3://bucket/spark/cache", key="v1")
    assert again.uri == first.uri
    assert not store.requests("PUT")
    storage.remove("s3://bucket/spark/cache", recursive=True)
