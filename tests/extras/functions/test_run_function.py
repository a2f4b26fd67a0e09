"""`ringspark.run`: any function on every rank of a gang."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from waiting import wait_for

import ringspark
from ringspark.estimators.collectives import Member
from ringspark.estimators.collectives.rendezvous.client import RendezvousClient
from ringspark.estimators.collectives.rendezvous.server import KeyValues, RendezvousServer, unpack
from ringspark.estimators.failures import TrainingCancelledError, WorkerError
from ringspark.estimators.training.phase import Status
from ringspark.extras.functions.function_rank import RESULT
from ringspark.extras.functions.function_task import _visible_device, _wait

pytestmark = [pytest.mark.spark, pytest.mark.distributed]


def _environment(*names: str) -> list[str]:
    return [os.environ[name] for name in names]


@pytest.mark.modes
def test_each_rank_has_its_place_and_returns_its_result(spark: Any) -> None:
    names = ("RANK", "LOCAL_RANK", "HOROVOD_RANK")
    found = ringspark.run(_environment, *names, "WORLD_SIZE", "MINE", numWorkers=2, environment={"MINE": "x"})
    assert found == [["0"] * 3 + ["2", "x"], ["1"] * 3 + ["2", "x"]]


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)


def test_ranks_ask_rank_0_once_while_the_function_runs(tmp_path: Path, monkeypatch: Any) -> None:
    """Rank 0's function ends at once, and rank 1's runs for longer than a task takes to look ten times."""
    names: list[bytes] = []
    answer = KeyValues.answer

    def record(self: KeyValues, message: bytes, reply: Any) -> None:
        names.append(unpack(message)[0])
        answer(self, message, reply)

    monkeypatch.setattr(KeyValues, "answer", record)
    (tmp_path / RESULT).write_bytes(b"")
    secret = os.urandom(32)

    def rank(number: int) -> tuple[str, int]:
        client = RendezvousClient(Member(rank=number, size=2), server.address, secret, 60.0)
        with closing(client), subprocess.Popen(["sleep", str(1.2 * number)]) as process:
            return _wait(process, tmp_path, client, Status())

    with closing(RendezvousServer("127.0.0.1", 2, secret)) as server, ThreadPoolExecutor() as pool:
        assert list(pool.map(rank, range(2))) == [("done", 0)] * 2
    assert sorted(names) == [b"add", b"add", b"get", b"get", b"set"]


class _OddError(Exception):
    """Cannot be made again from its `args`."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def _fails_on_rank_1(folder: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        print("the last words")
        raise _OddError(1, 2)
    time.sleep(600)


def test_a_traceback_reaches_the_driver_and_ends_the_other_ranks(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 .*_OddError: 1 and 2") as caught:
        ringspark.run(_fails_on_rank_1, str(tmp_path), numWorkers=2, maxRestarts=1)
    assert "in _fails_on_rank_1" in str(caught.value)
    assert "the last words" in str(caught.value)
    # An exception is not retried, and the sleeping rank is gone.
    assert not psutil.pid_exists(int((tmp_path / "0").read_text()))


def _is_killed_once(folder: str, whom: str) -> str:
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        process = psutil.Process() if whom == "process" else psutil.Process().parent()
        process.kill()
        time.sleep(600)
    return os.environ["TORCHELASTIC_RESTART_COUNT"] + _sum_of_ranks().__repr__()


@pytest.mark.parametrize("whom", ["process", pytest.param("worker", marks=pytest.mark.slow)])
def test_a_killed_rank_restarts_all_ranks(spark: Any, tmp_path: Path, whom: str) -> None:
    found = ringspark.run(_is_killed_once, str(tmp_path), whom, numWorkers=2, maxRestarts=1)
    assert found == ["13.0", "13.0"]


@pytest.mark.slow
def test_a_lost_process_is_the_cause_although_its_peer_raises(spark: Any) -> None:
    def work() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(WorkerError, match=r"rank 1 .*ended by SIGKILL") as caught:
        ringspark.run(work, numWorkers=2)
    assert caught.value.may_pass


def test_an_exception_is_not_retried(spark: Any, tmp_path: Path) -> None:
    # By its type, a lost connection of a reader, after which a training restarts.
    def work() -> None:
        with (tmp_path / "calls").open("a") as calls:
            calls.write("x")
        raise ConnectionResetError(104, "reset by the data base")

    with pytest.raises(WorkerError, match=r"ConnectionResetError: .*reset by the data base"):
        ringspark.run(work, numWorkers=1, maxRestarts=1)
    assert (tmp_path / "calls").read_text() == "x"


def test_an_error_that_only_the_function_can_import_keeps_its_message(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "lib_of_ranks.py").write_text("class LibraryError(Exception): ...")

    def work() -> None:
        sys.path.append(str(tmp_path))
        import lib_of_ranks

        raise lib_of_ranks.LibraryError("the words")

    with pytest.raises(WorkerError, match="LibraryError: the words") as caught:
        ringspark.run(work, numWorkers=1)
    assert "in work" in str(caught.value)


@pytest.mark.parametrize("code", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_function_that_exits_without_a_result_is_named(spark: Any, code: int) -> None:
    message = f"rank 0 .*the process of the function ended with exit code {code}"
    with pytest.raises(WorkerError, match=message):
        ringspark.run(os._exit, code, numWorkers=1)


@pytest.mark.slow
def test_a_script_may_end_its_process(spark: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nos.execvp('true', ['true'])\n")
    assert ringspark.run(script, numWorkers=1) == [None]


def _has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def _forks(folder: str) -> str:
    """On rank 0, a child outlives the function; rank 1 waits for the child."""
    pids = Path(folder, "pids")
    if os.environ["RANK"] == "1":
        wait_for("rank 0", pids.exists)
        rank_0, child = map(int, pids.read_text().split())
        wait_for("the child to end", lambda: _has_ended(child))
        return f"rank 0 is known: {psutil.pid_exists(rank_0)}"
    me = os.getpid()
    child = os.fork()
    if child == 0:
        wait_for("the function to end", lambda: _has_ended(me))
        time.sleep(0.5)  # longer than the task takes to look
        sys.exit(0)
    pids.with_suffix(".new").write_text(f"{me} {child}")
    pids.with_suffix(".new").rename(pids)
    return "of the function"


@pytest.mark.telling
def test_a_forked_child_does_not_replace_the_result(spark: Any, tmp_path: Path) -> None:
    found = ringspark.run(_forks, str(tmp_path), numWorkers=2)
    # The task ends the group of this process id later, so no other process may get the id.
    assert found == ["of the function", "rank 0 is known: True"]


def _waits(folder: str) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    # torchrun starts its workers in new sessions.
    child, apart = subprocess.Popen(command), subprocess.Popen(command, start_new_session=True)
    Path(folder, f"{os.environ['RANK']}.new").write_text(f"{os.getpid()} {child.pid} {apart.pid}")
    Path(folder, f"{os.environ['RANK']}.new").rename(Path(folder, os.environ["RANK"]))
    child.wait()


@pytest.mark.parametrize(
    "cancel",
    [pytest.param("job", marks=pytest.mark.telling), pytest.param("interrupt", marks=pytest.mark.slow)],
)
def test_cancelled_ranks_leave_no_process(spark: Any, tmp_path: Path, cancel: str) -> None:
    files = [tmp_path / "0", tmp_path / "1"]

    def end() -> None:
        wait_for("both ranks to start", lambda: all(file.exists() for file in files))
        if cancel == "job":
            spark.sparkContext.cancelAllJobs()
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(TrainingCancelledError if cancel == "job" else KeyboardInterrupt):
        ringspark.run(_waits, str(tmp_path), numWorkers=2)
    thread.join()
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    wait_for("the processes to end", lambda: not any(psutil.pid_exists(pid) for pid in pids))


@pytest.mark.telling
def test_a_script_gets_its_arguments_and_leaves_its_output(spark: Any, tmp_path: Path) -> None:
    script, logs = tmp_path / "train.py", tmp_path / "run" / "logs"
    code = "if __name__ == '__main__':\n    print('from', os.environ['RANK'], sys.argv[1:])"
    script.write_text(f"import os, sys\n{code}\n")
    arguments: tuple[Any, ...] = ("--lr", 0.1, 32, True, np.float32(0.5), tmp_path)
    found = ringspark.run(script, *arguments, numWorkers=np.int64(2), runUri=str(tmp_path / "run"))
    assert found == [None, None]
    for rank in (0, 1):
        text = f"from {rank} ['--lr', '0.1', '32', 'True', '0.5', '{tmp_path}']"
        assert text in (logs / f"rank-{rank}.txt").read_text()
    assert os.listdir(tmp_path / "run") == ["logs"]


def test_arguments_keep_their_types_and_any_text_is_printed(spark: Any, tmp_path: Path) -> None:
    def prints(*given: Any) -> tuple[Any, ...]:
        print("\N{SNOWMAN}")
        return sys.stdout.encoding, *given

    given = (1, 2.5, True, None, np.float32(0.1), np.int64(3), np.bool_(True), float("inf"))
    settings: dict[str, Any] = {"environment": {"PYTHONIOENCODING": "ascii"}, "runUri": str(tmp_path / "run")}
    ((encoding, *found),) = ringspark.run(prints, *given, numWorkers=1, **settings)
    assert encoding == "ascii"
    assert [(type(one), one) for one in found] == [(type(one), one) for one in given]
    assert "\\u2603" in (tmp_path / "run" / "logs" / "rank-0.txt").read_text()


@pytest.mark.parametrize(
    ("call", "settings", "message"),
    [
        ([_environment], {"numWorkers": 99}, r"numWorkers \(99\) must not exceed"),
        ([_environment], {"numWorkers": 0}, "numWorkers must be at least 1, got 0"),
        ([_environment], {"numWorkers": "2"}, "numWorkers must be a whole number, got '2'"),
        ([_environment], {"numworkers": 2}, "_environment cannot be called .*'numworkers'"),
        ([_waits], {}, "_waits cannot be called .*'folder'"),
        (["none.py"], {}, "the driver has no script 'none.py'"),
        ([__file__, None], {}, r"strings, numbers and paths, .* got \[None\]; convert .* by str\(\)"),
        ([7], {}, "run takes a function or the path of a script, got int"),
        ([_waits, ""], {"environment": {"A=B": 1}}, "environment .* got 'A=B'"),
        ([_waits, ""], {"environment": {"A": None}}, "environment .* got 'A': None"),
        ([_waits, ""], {"environment": ["A"]}, "environment must be a dict"),
    ],
)
def test_a_bad_call_is_refused_before_the_start(spark: Any, call: Any, settings: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ringspark.run(*call, **{"numWorkers": 2, **settings})


def test_a_result_that_cannot_be_sent_is_an_error(spark: Any) -> None:
    with pytest.raises(WorkerError, match="result cannot be sent to the driver"):
        ringspark.run(threading.Lock, numWorkers=1)


def test_a_device_keeps_its_name_in_the_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _visible_device("cuda:1") == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-6f,7")
    assert list(map(_visible_device, ("cuda:0", "cuda:1", "cpu"))) == ["4", "GPU-6f", ""]
