"""HDFS that cannot be reached, refuses a request, or loses its NameNode."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from acting_callback import Acts
from hadoop import Hadoop, free_ports
from pyspark.sql import functions as F
from small_networks import linear
from spark_tables import quiet, waves
from waiting import wait_for

from ringspark.estimators import TorchRegressionModel, TorchRegressor
from ringspark.estimators.failures import Failure
from ringspark.pipelines import storage
from ringspark.pipelines.readers import retry

pytest.importorskip("hdfs_native")
from ringspark.extras.stores import hdfs


@pytest.fixture(autouse=True)
def a_new_client() -> Iterator[None]:
    """Forgets open clients, so that each test reads the variables of Hadoop again."""
    yield
    _forget()


def _forget() -> None:
    hdfs._open.cache_clear()
    hdfs.Hdfs.clear_instance_cache()


def _act_as(monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", user)
    _forget()


def test_an_address_without_a_name_node_is_named(cluster: Hadoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdfs, "ANSWER_SECONDS", 1.0)
    (port,) = free_ports(1)
    for authority in (f"127.0.0.1:{port}", "no-such-host.invalid:8020", "no-such-service"):
        with pytest.raises(ConnectionError, match=rf"no NameNode of '.*//{authority}' answers: {authority} "):
            storage.exists(f"hdfs://{authority}/x")
        with pytest.raises(ValueError, match=r"cannot be written .*no NameNode of"):
            storage.check_writable(f"hdfs://{authority}/x")


def test_a_name_node_that_does_not_answer_is_named(cluster: Hadoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdfs, "ANSWER_SECONDS", 2.0)
    process = cluster.processes["namenode"]
    process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(ConnectionError, match=r"accepted a connection, but did not answer within 2 s"):
            storage.exists(f"{cluster.uri}/x")
    finally:
        process.send_signal(signal.SIGCONT)
    assert storage.exists(f"{cluster.uri}/")


def test_hadoops_conf_names_the_name_nodes(
    cluster: Hadoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, other = free_ports(2)

    def configure(second: int) -> None:
        names = {"dfs.nameservices": "pair", "dfs.ha.namenodes.pair": "one,two"}
        names["dfs.client.failover.proxy.provider.pair"] = (
            "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"
        )
        for name, port in (("one", closed), ("two", second)):
            names[f"dfs.namenode.rpc-address.pair.{name}"] = f"127.0.0.1:{port}"
        cluster.write_conf(tmp_path / "conf", names, default="hdfs://pair")
        monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
        _forget()

    configure(cluster.port)
    for uri in ("hdfs://pair/service", "hdfs:///service"):
        storage.write_atomic(f"{uri}/file", b"through the second")
        assert storage.read_bytes(f"{cluster.uri}/service/file") == b"through the second"
        storage.remove(uri, recursive=True)
    configure(other)
    monkeypatch.setattr(hdfs, "ANSWER_SECONDS", 1.0)
    with pytest.raises(ConnectionError, match=rf"'hdfs://pair' answers: 127.0.0.1:{closed} .*:{other} "):
        storage.exists("hdfs://pair/service")
    monkeypatch.delenv("HADOOP_CONF_DIR")
    _forget()
    with pytest.raises(OSError, match=r"'hdfs:///' leaves the NameNode to Hadoop's conf, but"):
        storage.exists("hdfs:///service")


def test_a_denied_write_is_one_sentence(cluster: Hadoop, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"{cluster.uri}/denied"
    storage.write_atomic(f"{uri}/file", b"mine")
    _act_as(monkeypatch, "bob")
    assert storage.read_bytes(f"{uri}/file") == b"mine"
    for write in (
        partial(storage.write_atomic, f"{uri}/file", b"his"),
        partial(storage.make_dirs, f"{uri}/folder"),
        partial(storage.remove, uri, recursive=True),
    ):
        with pytest.raises(PermissionError, match="Permission denied: user=bob") as caught:
            write()
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"cannot be written \(PermissionError: .*user=bob.*\); choose a"):
        storage.check_writable(uri)
    with pytest.raises(OSError, match=r"'hdfs://bob@.*' names a user, which hdfs-native takes from "):
        storage.exists(uri.replace("//", "//bob@"))


@pytest.mark.parametrize("error", [RuntimeError("DataTransferError(x)"), OSError("Broken pipe")])
def test_a_lost_connection_is_tried_again(error: Exception) -> None:
    with pytest.raises(OSError, match=str(error).partition("(")[0]) as caught, hdfs._one_sentence():
        raise error
    assert retry.may_pass(caught.value)
    assert Failure.of(caught.value, 0, "training", from_peer=False).may_pass


def test_a_folder_that_cannot_be_listed_is_not_an_empty_folder(
    cluster: Hadoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a copy of the folder would lack its files, and a removal would overlook them."""
    uri = f"{cluster.uri}/walked"
    storage.write_atomic(f"{uri}/secret/file", b"mine")
    fs, path = storage.filesystem(uri)
    fs.client.set_permission(f"{path}/secret", 0o700)
    assert fs.find(path) == [f"{path}/secret/file"]
    _act_as(monkeypatch, "bob")
    fs, path = storage.filesystem(uri)
    with pytest.raises(PermissionError, match="user=bob"):
        fs.find(path)


def test_safe_mode_and_a_full_quota_keep_the_old_file(cluster: Hadoop) -> None:
    uri = f"{cluster.uri}/full"
    storage.write_atomic(f"{uri}/file", b"old")
    cluster.admin("-safemode", "enter")
    with pytest.raises(OSError, match="Name node is in safe mode") as caught:
        storage.write_atomic(f"{uri}/file", b"new")
    assert "\n" not in str(caught.value)
    cluster.admin("-safemode", "leave")
    for option, value, kind in (("-setQuota", "2", "NameSpace"), ("-setSpaceQuota", "1m", "DiskSpace")):
        cluster.admin(option, value, "/full")
        with pytest.raises(OSError, match=rf"The {kind} quota .*full is exceeded") as caught:
            storage.write_atomic(f"{uri}/file", bytes(4 << 20))
        assert "\n" not in str(caught.value)
        assert storage.list_names(uri) == ["file"]
        assert storage.read_bytes(f"{uri}/file") == b"old"
        cluster.admin(option.replace("set", "clr"), "/full")


PHASES = ("rows", "steps", "last epoch", "saving", "loading")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("phase", PHASES)
def test_a_fit_outlives_its_name_node(cluster: Hadoop, spark: Any, tmp_path: Path, phase: str) -> None:
    """The NameNode is killed in a phase of the fit, and needs seconds to start again."""
    uri = f"{cluster.uri}/outlived {phase}"
    begun, killed = tmp_path / "begun", tmp_path / "killed"

    def kill_and_start() -> None:
        wait_for(phase, begun.exists)
        cluster.kill("namenode")
        killed.touch()
        cluster.start("namenode")

    def enter(state: Any) -> None:
        if (phase == "last epoch" and state.epoch == 8) or (phase == "steps" and state.epoch == 4):
            begin()
        time.sleep(0.2 if phase == "steps" else 0)

    def begin() -> None:
        begun.touch()
        wait_for("the NameNode's end", killed.exists)

    def slow(label: Any) -> Any:
        if phase == "rows":
            begun.touch()
            time.sleep(0.1)
        return label

    rows = waves(spark).withColumn("label", F.udf(slow, "double", useArrow=False)("label"))
    params: dict[str, Any] = {"model": linear(), "epochs": 8, "batchSize": 16, "numWorkers": 2, "seed": 1}
    params |= {"collective": "torch", "checkpointEverySteps": 5}
    calm = quiet(TorchRegressor, tmp_path, **params).fit(waves(spark))
    thread = threading.Thread(target=kill_and_start)
    thread.start()
    try:
        model = quiet(TorchRegressor, uri, **params, callbacks=[Acts(epoch_end=enter)]).fit(rows)
        if phase == "saving":
            begin()
        model.write().save(f"{uri}/model")
        if phase == "loading":
            begin()
        found = TorchRegressionModel.load(f"{uri}/model")
    finally:
        begun.touch()
        thread.join()
        cluster.wait_until_writable()
    assert model.summary.steps == calm.summary.steps
    assert model.summary.restarts == 0
    for one, other in zip(found.module().parameters(), calm.module().parameters(), strict=True):
        assert torch.equal(one, other)
