"""Options of the jobs: help without Spark, and one clear error per mistake."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from ringspark.estimators.run.folder import remove_old_run
from ringspark.jobs import cli, demo, etl, score, train

ROOT = Path(__file__).parent.parent.parent
JOBS = {"etl": etl, "train": train, "score": score, "demo": demo}


def test_a_job_is_a_script() -> None:
    command = [sys.executable, str(ROOT / "jobs" / "train.py"), "--num-workers", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "train: error: argument --num-workers: must be at least 1, got 0; see --help\n"


@pytest.mark.parametrize("job", JOBS)
def test_help_names_every_option_with_its_default(job: str) -> None:
    text = JOBS[job].build_parser().format_help()
    assert text.startswith(f"usage: {job}")
    assert "default:" in text


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        ("etl", ["--fraction", "2"], "argument --fraction: must be above 0 and at most 1, got '2'"),
        (
            "train",
            ["--precision", "fp8"],
            "argument --precision: must be 'fp32', 'bf16' or 'fp16', got 'fp8'",
        ),
        ("score", ["--sed", "1"], "unrecognized arguments: --sed 1"),
        ("demo", ["--epochs", "x"], "argument --epochs: must be a whole number, got 'x'"),
    ],
)
def test_a_bad_option_is_one_line(
    job: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(JOBS[job].build_parser(), JOBS[job].run, options)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert told.startswith(f"{job}: error: ")


@pytest.mark.spark
@pytest.mark.parametrize(
    ("job", "message"),
    [
        (train, "no rows at"),
        (score, "no model at"),
    ],
)
def test_a_folder_without_data_is_one_line_that_says_where_spark_looked(
    job: ModuleType, message: str, mounts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for data in ("/data/flights", f"viewfs://{mounts.name}/data/flights"):
        assert cli.main(job.build_parser(), job.run, ["--data", data]) == 1
        told = capsys.readouterr().err
        assert told.startswith(job.build_parser().prog + ": error: ")
        assert message in told
        assert f"{mounts}/flights/" in told
        assert told.count("\n") == 1


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
def test_a_run_is_not_removed_with_files_that_no_run_writes(
    tmp_path: Path, name: str, resume: bool | None
) -> None:
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
