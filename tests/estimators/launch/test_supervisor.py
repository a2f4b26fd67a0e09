"""Hang detection from heartbeats, and Spark errors of failed jobs."""

from __future__ import annotations

import json
import math
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from supervised_gang import supervisor_of
from waiting import wait_for

from ringspark.estimators.collectives.rendezvous.client import START_SECONDS
from ringspark.estimators.failures import Failure, WorkerError, WorkerStoppedError
from ringspark.estimators.launch import monitor as monitor_module
from ringspark.estimators.launch import slots
from ringspark.estimators.launch.hang_detector import HangDetector
from ringspark.estimators.launch.heartbeat import (
    Beat,
    Heartbeat,
    Pulse,
    beat_uri,
    interval_seconds,
    read_beats,
)
from ringspark.estimators.launch.monitor import Monitor
from ringspark.estimators.launch.owner import write_owner
from ringspark.estimators.launch.spark_job import find_lost_workers, was_cancelled
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.training.phase import Status
from ringspark.pipelines import storage

TIMEOUT = 20.0  # one heartbeat per 5 s, and a rank may miss two: 11 s


def _beat(rank: int, **changes: Any) -> Beat:
    first = Beat(
        token="t", rank=rank, host=f"host{rank}", task=rank, pid=100 + rank, launch=0, phase="p",
        ticks=1, beats=1,
    )  # fmt: skip
    return replace(first, **changes)


def _peer_failure(rank: int) -> str:
    return Failure.of(RuntimeError("peer"), rank, "step 3", from_peer=True).to_json()


def _alive(rank: int, second: int, until: int = 10**6) -> Beat:
    """Returns the heartbeat of a rank that makes a step per second until a second, and beats on."""
    return _beat(rank, beats=second // 5, ticks=min(second, until))


def _stopped(second: int) -> Beat:
    """Returns the heartbeat of rank 1, whose process stops at second 30."""
    return _beat(1, beats=min(second, 30) // 5, ticks=min(second, 30))


def _play(script: Any, size: int = 2, timeout: float = TIMEOUT, seconds: int = 200) -> tuple[float, Any]:
    """Feeds `script(second)` to a detector every second; returns the time and the rank that it blames."""
    detector = HangDetector(size, timeout)
    for now in range(seconds):
        detector.update(script(now), float(now))
        if (hung := detector.find_hung(float(now))) is not None:
            return float(now), hung
    return seconds, None


def test_ranks_that_beat_and_tick_do_not_hang():
    assert _play(lambda s: [_beat(r, beats=s // 5, ticks=s // 3) for r in (0, 1)])[1] is None


def test_a_silent_rank_is_blamed_and_not_the_one_that_waits_for_it():
    when, hung = _play(lambda s: [_alive(0, s, until=31), _stopped(s)])
    assert (hung.rank, hung.beat.host) == (1, "host1")
    assert "no heartbeat" in hung.reason
    assert when <= 30 + TIMEOUT + 1


def test_a_peer_that_has_given_up_makes_a_silent_rank_hang_sooner():
    failed = _beat(0, beats=9, ended=True, failure=_peer_failure(0))
    when, hung = _play(lambda s: [failed if s > 32 else _alive(0, s), _stopped(s)])
    assert hung.rank == 1
    assert when < 30 + TIMEOUT


@pytest.mark.parametrize("ended", [True, False])
def test_after_a_failure_a_rank_that_waits_for_ever_is_not_waited_for(ended):
    """Imitates NCCL: the rank spins for data and still sends heartbeats; the failed rank may hang in its
    abort.
    """
    patience = 600.0

    def script(second: int) -> list[Beat]:
        waits = _alive(1, second, until=30)
        if second < 30:
            return [_alive(0, second), waits]
        failure = Failure.of(ZeroDivisionError("user"), 0, "step 30", from_peer=False).to_json()
        return [replace(_alive(0, second, until=30), ended=ended, failure=failure), waits]

    when, hung = _play(script, timeout=patience, seconds=2000)
    # Two heartbeat periods plus one second after the failure became known.
    assert when == 30 + 2 * interval_seconds(patience) + 1
    assert "no progress" in hung.reason
    assert "another worker has failed" in hung.reason


def test_after_a_failure_ranks_that_end_by_themselves_are_not_blamed():
    def script(second: int) -> list[Beat]:
        failed = _beat(0, beats=9, ended=True, failure=_peer_failure(0))
        # The rank computes for a long time and notices the failure in its next collective call.
        slow = _beat(1, beats=second // 5, ticks=1 if second < 38 else second, ended=second > 40)
        return [_alive(0, second) if second < 30 else failed, slow]

    assert _play(script, timeout=600.0)[1] is None


def test_of_ranks_that_stall_together_the_one_that_did_the_least_is_blamed():
    when, hung = _play(lambda s: [_alive(r, s, until=40 - (r == 2)) for r in range(3)], size=3)
    assert hung.rank == 2
    assert "no progress" in hung.reason
    # Waiting ranks get time to end through their own timeout.
    assert when > 40 + TIMEOUT


def test_a_rank_that_never_started_is_blamed():
    when, hung = _play(lambda s: [_alive(0, s)])
    assert (hung.rank, hung.beat, when) == (1, None, START_SECONDS)
    longer = 2 * START_SECONDS
    when, hung = _play(lambda s: [_beat(0, beats=s // 5)], timeout=longer)
    assert (hung.rank, hung.beat, when) == (1, None, longer)


def test_those_that_wait_for_one_that_starts_late_do_not_hang():
    def script(second: int) -> list[Beat]:
        late = [_alive(1, second, until=60)] if second > 50 else []
        return [_beat(0, beats=second // 5, ticks=max(1, min(second, 60) - 50)), *late]

    when, hung = _play(script)
    # The detector waits until both ranks have stalled for that long.
    assert when > 60 + TIMEOUT
    assert "no progress" in hung.reason


def test_a_driver_that_could_not_look_blames_nobody_for_that_time():
    detector = HangDetector(1, TIMEOUT)
    detector.update([_beat(0)], 0.0)
    detector.update([_beat(0)], 1000.0)
    assert detector.find_hung(1000.0) is None


def test_a_silent_rank_is_found_where_every_look_takes_long():
    """Reads take long on a slow store or with many ranks. One very slow read must not blame a rank."""
    detector = HangDetector(1, TIMEOUT)
    looks = [(30.0 * look, detector.update([_beat(0)], 30.0 * look)) for look in range(4)]
    assert detector.find_hung(looks[-1][0]) is not None
    detector = HangDetector(1, TIMEOUT)
    for look in range(4):
        detector.update([_beat(0, beats=look, ticks=look)], 30.0 * look)
    detector.update([_beat(0, beats=3, ticks=3)], 1000.0)
    assert detector.find_hung(1000.0) is None


def _pulse(folder: Path) -> Pulse:
    """Returns the pulse of a run whose only rank has sent one heartbeat."""
    pulse = Pulse(run_uri=str(folder), token="t", timeout_seconds=1.0)
    storage.write_atomic(beat_uri(pulse.run_uri, 0), json.dumps(asdict(_beat(0))).encode())
    return pulse


def test_a_cancel_that_gets_lost_is_sent_again(tmp_path):
    sent: list[int] = []
    job: Any = SimpleNamespace(cancel=lambda: sent.append(1))  # Spark never reports it
    with Monitor(_pulse(tmp_path), 1, job, lambda: 1) as monitor:
        wait_for("the third cancel", lambda: len(sent) >= 3)
        assert monitor.verdict is not None


class _Client(LocalFileSystem):
    """Some clients raise other types: aiohttp raises RuntimeError for a closed session."""

    protocol = "client"
    readers: ClassVar[list[threading.Thread]] = []
    is_broken = False

    def cat_file(self, path: str, *_: Any, **__: Any) -> bytes:
        self.readers.append(threading.current_thread())
        if self.is_broken:
            raise RuntimeError("Session is closed")
        return super().cat_file(path)


def test_a_remote_store_is_read_by_few_threads_and_its_last_error_hides_no_result(monkeypatch, tmp_path):
    fsspec.register_implementation("client", _Client, clobber=True)
    monkeypatch.setattr(monitor_module, "POLL_SECONDS", 0.05)
    pulse = Pulse(run_uri=f"client://{tmp_path}", token="t", timeout_seconds=0.4)
    with Monitor(pulse, 2, Any, lambda: 2):
        wait_for("four looks at two beats", lambda: len(_Client.readers) >= 8)
        monkeypatch.setattr(_Client, "is_broken", True)
    assert len(set(_Client.readers)) <= 2


@pytest.mark.spark
@pytest.mark.parametrize(
    ("min_workers", "mesh", "room", "go_on"),
    [
        (None, {}, 1, 2),
        (1, {}, 1, 1),
        (2, {"data": 3, "tensor": 2}, 5, 4),
        (2, {"data": 2, "pipeline": 2}, 3, 2),
        (4, {"data": 3, "tensor": 2}, 3, 6),
    ],
)
def test_a_restart_waits_for_new_executors_longer_than_a_start_does(
    spark, monkeypatch, min_workers, mesh, room, go_on
):
    """If fewer workers are allowed, the run continues with whole replicas after the normal startup wait."""
    monkeypatch.setattr(slots, "REGISTRATION_SECONDS", 0.3)
    workers = math.prod(mesh.values()) if mesh else 2
    settings = {"num_workers": workers, "min_workers": min_workers, "parallelism": Mesh.of(mesh)}
    supervisor = supervisor_of(spark, timeout_seconds=60.0, collective="torch", **settings)
    counted = iter([room] * 8)
    supervisor._stage = SimpleNamespace(slots=lambda: next(counted, workers))
    supervisor._make_room(Failure.lost(0, "host", "step 3", "its process died"))
    assert supervisor.config.num_workers == go_on
    assert supervisor.config.axes["data"] == (go_on if not mesh else go_on * mesh["data"] // workers)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("mesh", "room", "remedy"),
    [
        ({"data": 3, "tensor": 2}, 5, "add executors or set minWorkers=4"),
        ({"data": 2, "tensor": 2}, 1, "add executors; one replica needs 2 workers"),
        ({"data": 2}, 0, "add executors"),
    ],
)
def test_a_lower_minimum_is_suggested_only_if_a_replica_fits(spark, mesh, room, remedy):
    settings = {"num_workers": math.prod(mesh.values()), "parallelism": Mesh.of(mesh)}
    supervisor = supervisor_of(spark, timeout_seconds=0.1, collective="torch", **settings)
    supervisor._stage = SimpleNamespace(slots=lambda: room)
    with pytest.raises(RuntimeError, match=f"workers of the training; {remedy}$"):
        supervisor._make_room(Failure.lost(0, "host", "step 3", "its process died"))


@contextmanager
def _no_file_can_be_written() -> Iterator[None]:
    """Makes all writes of this process fail as on a full disk; reads still work."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_where_the_store_takes_no_files_a_silent_rank_does_not_hang(tmp_path):
    cancelled = threading.Event()
    job: Any = SimpleNamespace(cancel=cancelled.set)
    with Monitor(_pulse(tmp_path), 1, job, lambda: 1) as monitor:
        with _no_file_can_be_written():
            assert not cancelled.wait(4)
        wait_for("the verdict", cancelled.is_set)
    assert "no heartbeat" in monitor.verdict.sentence


def test_a_gang_is_idle_if_all_are_done_or_silent():
    detector = HangDetector(2, TIMEOUT)
    assert detector.is_idle(0.0)
    detector.update([_beat(0), _beat(1, ended=True)], 0.0)
    assert not detector.is_idle(1.0)
    assert detector.is_idle(12.0)


def test_nonsense_in_the_folder_is_no_beat(tmp_path):
    folder = tmp_path / "heartbeat"
    folder.mkdir()
    for text in (b"", b"[]", b'{"rank": "0"}', b"\xff", b'{"__reduce__": 1}'):
        (folder / "rank-0.json").write_bytes(text)
        assert read_beats(str(tmp_path), 1, "t", 0) == []


def test_a_heartbeat_tells_where_the_rank_is_and_how_it_ended(tmp_path):
    pulse, status = Pulse(run_uri=str(tmp_path), token="t", timeout_seconds=1.0), Status("phase one")
    with Heartbeat(pulse, status, rank=0, host="h", task=0) as beating:
        wait_for("a beat", lambda: len(read_beats(str(tmp_path), 1, "t", 0)) == 1)
        beating.fail(Failure.of(ValueError("no"), 0, "phase two", from_peer=False))
    (beat,) = read_beats(str(tmp_path), 1, "t", 0)
    assert (beat.pid, beat.phase, beat.ended) == (os.getpid(), "phase two", True)
    assert "ValueError" in str(beat.failure)
    # Ignores heartbeats of an earlier start or of another driver.
    assert read_beats(str(tmp_path), 1, "t", 1) == read_beats(str(tmp_path), 1, "other", 0) == []


def test_rank_0_stops_where_another_driver_works_on_the_run(tmp_path):
    status = Status()
    write_owner(str(tmp_path), "mine", 0)
    with Heartbeat(Pulse(run_uri=str(tmp_path), token="mine", timeout_seconds=1.0), status, 0, "h", 0):
        status.phase = "working"
        write_owner(str(tmp_path), "theirs", 0)
        with pytest.raises(WorkerStoppedError, match="another driver has taken over the run"):
            _tick_on(status)


def _tick_on(status: Status) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        status.tick()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("text", "cancelled", "lost"),
    [
        ("Job 3 cancelled part of cancelled job group x", True, False),
        ("[SPARK_JOB_CANCELLED] Job 0 cancelled as part of cancellation of all jobs", True, False),
        ("[OPERATION_CANCELED] Operation was canceled", True, False),
        ("Job 1 cancelled because SparkContext was shut down", True, False),
        ("Job aborted due to stage failure: ... ExecutorLostFailure (executor 1 exited", False, True),
        ("Job aborted due to stage failure: Could not recover from a failed barrier ResultSt", False, True),
        ("Job aborted due to stage failure:\nTraceback (most recent call last):\nImportError", False, False),
        ("Connection refused", False, False),
    ],
)  # fmt: skip
def test_what_spark_says_of_a_job(text, cancelled, lost):
    error = RuntimeError(text)
    assert was_cancelled(error) is cancelled
    assert (find_lost_workers(error) is not None) is lost


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (ConnectionResetError(104, "reset"), True),
        (TimeoutError("store"), True),
        (OSError(28, "No space left on device"), True),
        (FileNotFoundError(2, "gone"), False),
        (OSError("Couldn't deserialize thrift"), False),
        (ValueError("user"), False),
        (SystemExit(1), False),
        (MemoryError(), False),
    ],
)
def test_only_faults_of_the_infrastructure_may_pass(error, may_pass):
    own = Failure.of(error, 1, "p", from_peer=False)
    assert own.may_pass is may_pass
    peer = Failure.of(RuntimeError("peer"), 0, "p", from_peer=True)
    failed = WorkerError([peer, own])
    assert failed.may_pass is may_pass
    assert failed.rank == 1
