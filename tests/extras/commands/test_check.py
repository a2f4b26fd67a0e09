"""Output of `ringspark check` for ready and for broken sessions."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import run_ringspark
from standalone import SPARK, spark_environment, standalone_cluster

from ringspark.extras.commands.check import _Answer, _ask_driver, _check_packages, _Findings

COMMAND = Path(__file__).parents[3] / "jobs" / "command.py"


def check(*options: str, **variables: str) -> tuple[int, dict[str, str], str]:
    """Runs the command; returns its exit code, subject -> line, and its last line."""
    done = run_ringspark("check", *options, **variables)
    # Spark's log goes to stderr as well.
    end = done.stderr if done.returncode else done.stdout
    return done.returncode, lines_of(done.stdout), end.strip().rpartition("\n")[2]


def lines_of(text: str) -> dict[str, str]:
    lines = (row.split(maxsplit=2) for row in text.splitlines() if row[:8].strip() in ("ok", "-", "PROBLEM"))
    return {subject: f"{word} {rest}" for word, subject, rest in lines}


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [pytest.param({}, marks=pytest.mark.telling), {"SPARK_REMOTE": "local[2]"}],
    ids=["classic", "connect"],
)
def test_a_ready_session(variables: dict[str, str], tmp_path: Path) -> None:
    code, found, last = check("--storage-uri", str(tmp_path), **variables)
    assert (code, last) == (0, "ready to train")
    assert not [line for line in found.values() if line.startswith("PROBLEM")]
    assert "a small network in " in found["training"]
    assert ("Connect" in found["versions"]) == bool(variables)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spark
@pytest.mark.slow
def test_problems_of_a_local_session() -> None:
    code, found, last = check("--workers", "3", "--storage-uri", "/proc/nothing")
    assert (code, last) == (2, "ringspark check: error: 2 problems, see above")
    assert "lower numWorkers or add executor cores" in found["slots"]
    assert "choose a folder that this process may write to" in found["storage"]
    assert "training" not in found


def test_java_is_missing(tmp_path: Path) -> None:
    code, found, _ = check(JAVA_HOME=str(tmp_path))
    assert code == 2
    assert f"JAVA_HOME ({tmp_path}) has no bin/java: install Java 17 or 21" in found["session"]
    assert len(found) == 1
    done = run_ringspark("demo", JAVA_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "error: Spark did not start: [JAVA_" in done.stderr.splitlines()[-1]


def test_the_master_does_not_exist() -> None:
    code, found, _ = check("--master", "sc://127.0.0.1:1/")
    assert code == 2
    assert "no Spark server answers at 127.0.0.1:1" in found["session"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ringspark": "0.0.1"}, "PROBLEM packages a has ringspark 0.0.1, the driver has"),
        ({"ringspark": ""}, "ok packages"),
        ({"torch": "2.13.0+cu130"}, "ok packages"),
        ({"torch": "2.12.0+cpu"}, "PROBLEM packages a has torch 2.12.0+cpu, the driver has 2.13.0"),
        ({"torch": ""}, "PROBLEM packages a lacks torch, the driver has 2.13.0"),
        ({"pillow": ""}, "ok packages"),
        ({"pillow": "1.0"}, "PROBLEM packages a has pillow 1.0, the driver has"),
        ({"Python": "3.11.99"}, "ok packages"),
        ({"Python": "3.10.4"}, "PROBLEM packages a has Python 3.10.4, the driver has"),
    ],
)
def test_packages_are_compared_as_a_training_needs_them(changes: Any, expected: str, capsys: Any) -> None:
    there = {name: version for name, version in {**_ask_driver().versions, **changes}.items() if version}
    _check_packages([_Answer(host="a", versions=there)], _Findings())
    assert " ".join(capsys.readouterr().out.split()).startswith(expected)


@pytest.mark.spark
@pytest.mark.slow
def test_problems_of_a_cluster(tmp_path: Path) -> None:
    older = tmp_path / "packages" / "safetensors-0.0.1.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 0.0.1\n")

    def submit(master: str, conf: dict[str, str], *options: str) -> dict[str, str]:
        confs = [f"--conf={name}={value}" for name, value in {"spark.executor.memory": "1g", **conf}.items()]
        command = [str(SPARK / "spark-submit"), "--master", master, *confs, str(COMMAND), "check", *options]
        given = {"env": spark_environment(), "cwd": tmp_path, "capture_output": True, "text": True}
        done = subprocess.run(command, **given)
        assert done.returncode == 2, done.stdout + done.stderr
        return lines_of(done.stdout)

    with standalone_cluster(tmp_path, {"PYTHONPATH": str(older.parent)}) as master:
        found = submit(master, {})
        assert "tasks run: 2, hosts: 1" in found["executors"]
        assert "has safetensors 0.0.1, the driver has" in found["packages"]
        assert "--storage-uri is not set" in found["storage"]
        dynamic = {"spark.dynamicAllocation.enabled": "true"}
        found = submit(master, dynamic, "--storage-uri", f"memory://{tmp_path.name}")
        assert found["slots"] == "ok dynamic allocation, needed: 2"
        assert "executors cannot use memory://" in found["storage"]
        # More memory than a worker has: no executor ever starts.
        found = submit(master, {"spark.executor.memory": "100g"})
        assert list(found) == ["versions", "slots"]
        assert "no executor has registered" in found["slots"]
