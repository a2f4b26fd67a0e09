"""Folders of earlier runs that a job may remove, and the Java options of its Spark session."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringspark.estimators.run.folder import remove_old_run


def _run_folder(folder: Path, *, checkpoint: bool = False, finished: bool = False) -> Path:
    """Writes the files of a finished training into a folder."""
    names = ["owner.json", "run.json"]
    names += ["checkpoints/step-0000000001/checkpoint.json"] if checkpoint else []
    names += ["result.json"] if finished else []
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def test_only_an_unfinished_run_with_a_checkpoint_is_in_the_way_of_a_new_one(tmp_path: Path) -> None:
    begun = _run_folder(tmp_path / "begun")
    finished = _run_folder(tmp_path / "finished", checkpoint=True, finished=True)
    for folder in (begun, finished, tmp_path / "not there"):
        remove_old_run(str(folder), None)
        assert not folder.exists()
    training = _run_folder(tmp_path / "training")
    (training / "heartbeat").mkdir()
    (training / "heartbeat" / "rank-0.json").write_text("{}")
    with pytest.raises(ValueError, match=r"sent a heartbeat \d+ s ago, so the run may be .* again in 60 s"):
        remove_old_run(str(training), None)
    long_ago = time.time() - 100
    os.utime(training / "heartbeat" / "rank-0.json", (long_ago, long_ago))
    remove_old_run(str(training), None)
    assert not training.exists()
    stopped = _run_folder(tmp_path / "stopped", checkpoint=True)
    with pytest.raises(ValueError, match=r"an unfinished run; give --resume to continue it, --no-resume"):
        remove_old_run(str(stopped), None)
    remove_old_run(str(stopped), True)
    assert (stopped / "run.json").exists()
    remove_old_run(str(stopped), False)
    assert not stopped.exists()
    damaged = _run_folder(tmp_path / "damaged", checkpoint=True, finished=True)
    (damaged / "result.json").write_bytes(b"\xff")
    remove_old_run(str(damaged), False)
    assert not damaged.exists()


@pytest.mark.parametrize("resume", [None, False])
@pytest.mark.parametrize("name", ["report.html", "trials/4/result.json", ".git/config"])
def test_a_run_is_not_removed_with_files_that_no_run_writes(tmp_path, name, resume):
    _run_folder(tmp_path, finished=True)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=f"holds '{name.partition('/')[0]}', which belongs to no run"):
        remove_old_run(str(tmp_path), resume)
    assert (tmp_path / name).exists()
    assert (tmp_path / "result.json").exists()


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    remove_old_run(str(tmp_path), False)
    assert (tmp_path / "thesis.tex").exists()


JAVA_OPTIONS = """
import os
from ringspark.jobs import cli
with cli.spark("options", "local[1]", is_short=True) as spark:
    bean = spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean()
    print(*(option for option in bean.getInputArguments() if "Tiered" in option or "Huge" in option))
print(os.environ["SPARK_SUBMIT_OPTS"])
"""


@pytest.mark.slow
def test_a_local_session_starts_java_with_its_options_and_then_the_users_own() -> None:
    environment = os.environ | {"SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=4"}
    done = subprocess.run(
        [sys.executable, "-c", JAVA_OPTIONS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "-XX:-DontCompileHugeMethods -XX:TieredStopAtLevel=1 -XX:TieredStopAtLevel=4",
        "-XX:TieredStopAtLevel=4",
    ], done.stderr
