"""Output of ranks: where it goes, what the run folder keeps, and the error after a rank dies."""

from __future__ import annotations

import ctypes
import io
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from acting_callback import Acts
from hypothesis import given
from hypothesis import strategies as st
from programs import run_program
from small_networks import Net, linear
from small_training import columns_of, config_of
from spark_tables import quiet
from torch import nn
from waiting import wait_for

from ringspark.estimators import TorchRegressor, TrainingState, WorkerError
from ringspark.estimators.collectives import Collective
from ringspark.estimators.inference.predictor import Predictor
from ringspark.estimators.inference.results import Values
from ringspark.estimators.launch.local import run_spawned, train_here
from ringspark.estimators.launch.log_process import HEAD_BYTES, TAIL_BYTES, KeptEnds, write_all
from ringspark.estimators.training import rank_log
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import UserObjects

LIBRARY = b"terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"

# Starts every program below.
HEAD = """
import ctypes, logging, os, subprocess, sys, time
from ringspark.estimators.launch.heartbeat import Pulse
from ringspark.estimators.launch.rank_output import RankOutput

pulse = Pulse(run_uri=sys.argv[1], token="t")
"""

RANK = """
print("before", file=sys.stderr)
with RankOutput(pulse, 3, "host-a"):
    # A child that lives longer holds the rank's standard error open.
    child = os.fork()
    if not child:
        time.sleep(600)
    print(child, flush=True)
    for number in range(400_000):
        os.write(2, b"line %d\\n" % number)
    if sys.argv[2] == "dies":
        os._exit(9)
    os.kill(child, 9)
    os.wait()
print("after", file=sys.stderr)
"""


def _end_as_a_library_does() -> None:
    """Ends like std::terminate: a line on the C library's stderr, then abort()."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None)
    libc.write(2, LIBRARY, len(LIBRARY))
    libc.abort()


SENTENCE = "a word of its own before the end"


def _raises() -> None:
    raise ValueError("the rank's own error")


def _is_killed() -> None:
    # The log process reads everything in the pipe, even if the rank dies suddenly.
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("end", "message", "last"),
    [
        (_end_as_a_library_does, "ended with exit code -6", LIBRARY.decode().strip()),
        (_is_killed, "ended with exit code -9", SENTENCE),
        (_raises, "ValueError: the rank's own error", SENTENCE),
    ],
)
def test_the_error_of_a_rank_that_ends_has_its_last_lines(end, message, last):
    def work(collective: Collective, device: str, status: Status) -> str:
        if collective.rank == 1:
            print(SENTENCE)  # not flushed: a pipe has no line buffering
            end()
        collective.barrier()
        return "unreachable"

    with pytest.raises(WorkerError, match=message) as caught:
        run_spawned(2, "torch", work)
    *_, above, told = str(caught.value).splitlines()
    assert told == f"  | {last}"
    assert SENTENCE in above or above == "  | the last lines that the rank printed:"


def _snowman(network: Net, x: torch.Tensor) -> torch.Tensor:
    print("\N{SNOWMAN}")
    return network.line(x)


@pytest.mark.distributed
@pytest.mark.parametrize("place", ["here", "rank", "prediction"])
def test_a_print_that_the_encoding_lacks_ends_nothing(place, make_shards, tmp_path, monkeypatch):
    network = Net(_snowman, line=nn.Linear(1, 1))

    if place == "rank":
        assert run_spawned(1, "local", lambda *rank: str(sys.stdout.errors)) == ["backslashreplace"]
        return
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    if place == "here":
        train_here(config_of(make_shards(columns_of(4, 1)), tmp_path), UserObjects(module=network))
    else:
        results = Values(shapes=((1,),))
        predictor: Any = SimpleNamespace(layout=(), output_widths=(1,), batch_size=4, results=results)
        Predictor.predict(predictor, network, [np.ones((4, 1), np.float32)])
    assert stream.errors == "strict"
    stream.flush()
    assert b"\\u2603" in stream.buffer.getvalue()


def _end_rank_1(end: str, state: TrainingState) -> None:
    """Prints a line, then ends rank 1 or makes it wait forever."""
    print(f"epoch {state.epoch} of rank {state.rank}")
    if state.rank == 1 and end:
        print(SENTENCE, file=sys.stderr)
    if state.rank == 1 and end == "aborts":
        _end_as_a_library_does()
    if state.rank == 1 and end == "hangs":
        time.sleep(600)


def _fit(spark: Any, folder: Path, end: str) -> Any:
    table = spark.range(64).selectExpr("array(double(id) / 64) as x", "double(id) / 32 as y")
    names = {"inputCols": ["x"], "labelCol": "y", "callbacks": [Acts(epoch_end=partial(_end_rank_1, end))]}
    settings = {"model": linear(1, 1), "batchSize": 16, "numWorkers": 2, "maxRestarts": 0}
    seconds = 5.0 if end == "hangs" else 600.0
    return quiet(TorchRegressor, folder, timeoutSeconds=seconds, **names, **settings).fit(table)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize(
    ("end", "message", "last"),
    [
        ("aborts", "its process died", LIBRARY.decode().strip()),
        ("hangs", r"the worker .*timeoutSeconds=5", SENTENCE),
    ],
)
def test_the_error_of_a_training_says_what_the_rank_printed_last(end, message, last, spark, tmp_path):
    with pytest.raises(WorkerError, match=rf"^rank 1 on host .* {message}") as caught:
        _fit(spark, tmp_path / "storage", end)
    assert str(caught.value).endswith(f"  | {last}")
    assert not list((tmp_path / "storage").rglob("rank-*")), "nothing is left of the run"


@pytest.mark.slow
@pytest.mark.spark
def test_what_the_ranks_print_is_read_on_the_driver(spark, tmp_path):
    summary = _fit(spark, tmp_path, "").summary
    for rank in (0, 1):
        (line,) = [line for line in summary.logs() if f"epoch 1 of rank {rank}" in line]
        assert re.fullmatch(rf"\[rank {rank} \S+\] epoch 1 of rank {rank}", line)
        assert line in summary.logs(rank)
        assert line not in summary.logs(1 - rank)


def test_a_rank_that_dies_before_it_reads_an_answer_is_stored(tmp_path):
    """A child of the rank holds the pipe of the answers open, as this process does, and never reads it."""
    (tmp_path / "heartbeat").mkdir()
    died = tmp_path / "heartbeat" / "rank-3.died"
    rank = subprocess.Popen(["sleep", "600"])
    (out, out_target), (err, err_target), (answers, answers_target) = (os.pipe() for _ in range(3))
    command = [sys.executable, "-m", "ringspark.estimators.launch.log_process"]
    line = rank_log.format_start(3, "host-a", rank.pid, "t.0")
    arguments = [rank.pid, out, err, answers_target, tmp_path, 3, "t.0", line]
    log_process = subprocess.Popen(
        [*command, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(out, err, answers_target),
    )
    lines = [f"line {number}" for number in range(20_000)]
    with log_process.stdin:
        write_all(err_target, "".join(f"{line}\n" for line in lines).encode())
        os.write(log_process.stdin.fileno(), b"?")
        # The answer is longer than a pipe takes, so the log process waits for a reader.
        wait_for("the first bytes of the answer", lambda: select.select([answers], [], [], 0)[0] != [])
        rank.kill()
        rank.wait()
        wait_for("the log process", died.exists, seconds=60)
    assert log_process.wait(60) == 0
    assert rank_log.last_lines(str(tmp_path), 3, "t.0") == tuple(lines[-10:])
    for descriptor in (out, out_target, err, err_target, answers, answers_target):
        os.close(descriptor)


@pytest.mark.parametrize("end", ["dies", "leaves"])
def test_every_line_reaches_the_log_and_the_ends_the_run(tmp_path, end):
    """This also holds if a child process keeps the rank's standard error open after the rank ends."""
    (tmp_path / "heartbeat").mkdir()
    log, died = tmp_path / "log", tmp_path / "heartbeat" / "rank-3.died"
    lines = ["before", *(f"line {number}" for number in range(400_000)), "after"]
    with (tmp_path / "child").open("wb") as child, log.open("ab") as file:
        command = [sys.executable, "-c", HEAD + RANK, str(tmp_path), end]
        code = subprocess.call(command, stdout=child, stderr=file)
    if end == "leaves":
        assert code == 0
        assert log.read_text().splitlines() == lines
        assert not died.exists()
    else:
        assert code == 9
        wait_for("the log process", died.exists)
        assert died.read_text() == "t.0"
        os.kill(int((tmp_path / "child").read_text().split()[0]), signal.SIGKILL)
        assert log.read_text().splitlines() == lines[:-1]
    stored = tmp_path / "logs" / "rank-3.txt"
    assert os.stat(stored).st_size < HEAD_BYTES + TAIL_BYTES + 200
    start, child_id, first, *rest = stored.read_text().splitlines()
    assert start.startswith("=== rank 3 on host-a, process ")
    assert child_id == (tmp_path / "child").read_text().strip()
    assert [first, rest[-1]] == [lines[1], lines[-2]]
    assert sum("bytes left out" in line for line in rest) == 1
    assert rank_log.last_lines(str(tmp_path), 3, "t.0") == tuple(lines[-11:-1])


PRINTS = """

before = [os.fstat(descriptor).st_ino for descriptor in (1, 2)]
for launch in range(2):
    with RankOutput(Pulse(run_uri=sys.argv[1], token="t", launch=launch), 0, f"host-{launch}"):
        ctypes.CDLL(None).printf(b"from C\\n")
        print("from Python")
        logging.warning("from logging")
        subprocess.run(["echo", "from a child"], check=True)
assert [os.fstat(descriptor).st_ino for descriptor in (1, 2)] == before
"""


def test_what_c_python_logging_and_children_print_is_kept_of_every_start(tmp_path):
    done = run_program(HEAD + PRINTS, tmp_path)
    printed = {"from C", "from Python", "WARNING:root:from logging", "from a child"}
    assert sorted(done.stdout.splitlines()) == sorted([*printed - {"WARNING:root:from logging"}] * 2)
    assert done.stderr.splitlines() == ["WARNING:root:from logging"] * 2
    lines = rank_log.read_lines(str(tmp_path))
    for launch, part in enumerate((lines[:4], lines[4:])):
        assert set(part) == {f"[rank 0 host-{launch}] {line}" for line in printed}
    assert rank_log.read_lines(str(tmp_path), 1) == []


KILLS_LOG_PROCESS = """

with RankOutput(pulse, 0, "host") as output:
    output._log_process.kill()
    output._log_process.wait()
    child = subprocess.Popen([sys.executable, "-c", "for n in range(20_000): print('child', n, flush=True)"])
    for number in range(20_000):  # more than a pipe holds
        print("rank", number, flush=True)
    assert child.wait() == 0
"""


def test_a_print_that_waits_for_a_killed_log_process_reaches_the_log(tmp_path):
    done = run_program(HEAD + KILLS_LOG_PROCESS, tmp_path)
    assert done.stderr == ""
    lines = (f"{who} {number}\n" for who in ("rank", "child") for number in range(20_000))
    # Lines from the pipe may appear in the middle of later lines.
    assert Counter(done.stdout) == Counter("".join(lines))


@given(st.lists(st.binary(max_size=12), max_size=30))
def test_the_kept_ends_are_the_ends(parts):
    kept, whole = KeptEnds(8, 16), b"".join(parts)
    for part in parts:
        kept.add(part)
    text = kept.text()
    if len(whole) <= 24:
        assert text == whole
        return
    head, _, tail = re.split(rb"\n?\[\.\.\. (\d+) bytes left out \.\.\.\]\n", text)
    assert whole.startswith(head.rstrip(b"\n"))
    assert whole.endswith(tail)
    assert len(tail) <= 16


def test_a_rank_that_starts_often_does_not_fill_the_store(tmp_path):
    for launch in range(4):
        line = rank_log.format_start(0, "host", 1, rank_log.name_start("token", launch))
        rank_log.store(str(tmp_path), 0, line, b"%d\n" % launch * 20_000)
    assert (tmp_path / "logs" / "rank-0.txt").stat().st_size < 40_000 + rank_log.EARLIER_BYTES + 200
    # The result holds only lines from the requested start, not from an earlier start.
    assert rank_log.last_lines(str(tmp_path), 0, "token.3") == ("3",) * 10
    assert rank_log.last_lines(str(tmp_path), 0, "token.4") == ()


LEAVES_A_CHILD = """

with RankOutput(pulse, 0, "host"):
    child = subprocess.Popen(["sleep", "600"])
    print(child.pid)
print("after")
"""


def test_a_rank_ends_although_a_child_holds_its_output_open(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", HEAD + LEAVES_A_CHILD, str(tmp_path)]
        # Far shorter than the child's life, and far longer than the rank waits for its log process.
        assert subprocess.call(command, stdout=log, stderr=log, timeout=120) == 0
    child, after = (tmp_path / "log").read_text().splitlines()[:2]
    os.kill(int(child), signal.SIGKILL)
    assert after == "after"
    assert rank_log.read_lines(str(tmp_path)) == [f"[rank 0 host] {child}"]
