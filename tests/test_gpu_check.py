"""The GPU check: every part runs on the CPU, and no broken part stops another one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from check import command, page
from check.registry import PARTS, Entry
from check.runner import run_part
from waiting import wait_for

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "tests" / "support"
# Runs at the start of every process, and hides packages of this environment.
HIDE = """
import os
from importlib.machinery import PathFinder
hidden, find = os.environ["HIDDEN"].split(), PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.split(".")[0] in hidden else find(name, *rest)
)
"""


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    for name, seconds in (("Broken", 60), ("Hanging", 24), ("Unimportable", 60)):
        path = f"broken_parts:{name}"
        monkeypatch.setitem(PARTS, name, Entry(path=path, title=name, seconds=seconds, needs=()))


def run(name: str, folder: Path, seconds: float = 300) -> Any:
    return run_part(name, folder / name, tiny=True, device="cpu", seconds=seconds)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_every_part_runs_on_the_cpu(name: str, tmp_path: Path) -> None:
    result = run(name, tmp_path)
    assert result.state == "ok", (result, result.log)
    assert len({case.case for case in result.cases}) == len(result.cases)
    for case in result.cases:
        if case.state == "ok":
            assert len(case.values) == len(result.columns)
        else:
            assert "CPU" in case.reason or "nvidia-smi" in case.reason


@pytest.mark.slow
@pytest.mark.usefixtures("broken")
def test_each_failure_is_named_and_the_other_cases_run(tmp_path: Path) -> None:
    result = run("Broken", tmp_path)
    assert {case.case: (case.state, case.reason or case.values) for case in result.cases} == {
        "crash": ("failed", "the process was ended by SIGSEGV"),
        "exit": ("failed", "the process ended with exit code 3: the last words"),
        "fail": ("failed", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        "skip": ("skipped", "needs a compiler"),
        "work": ("ok", [1.5]),
    }
    assert result.state == "failed"
    assert any("Segmentation fault" in line for line in result.log)
    text = page.make_page([result], command="check", began="today", seconds=1)
    assert "| crash | failed: the process was ended by SIGSEGV |" in text
    assert "| work | 1.5 |" in text


@pytest.mark.slow
@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(("seconds", "state"), [(300, "failed"), (20, "skipped")])
def test_a_part_that_hangs_is_ended_with_its_processes(seconds: float, state: str, tmp_path: Path) -> None:
    """Without time for the whole limit of the part, nobody knows if it hangs."""
    result = run("Hanging", tmp_path, seconds)
    states = [case.state for case in result.cases]
    assert states == ["ok", state, "skipped"]
    pid = int((tmp_path / "Hanging" / "child").read_text())

    def has_ended() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_for("the end of the case's process", has_ended, seconds=60)


@pytest.mark.usefixtures("broken")
def test_a_part_that_cannot_start_says_why(tmp_path: Path) -> None:
    result = run("Unimportable", tmp_path)
    assert result.state == "failed"
    assert result.reason == (
        "the process ended with exit code 1: ImportError: libcudart.so.12: cannot open shared object file"
    )


def test_a_part_without_its_packages_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = Entry(path="none:None", title="T", seconds=60, needs=("no_such_package", "torch"))
    monkeypatch.setitem(PARTS, "training", entry)
    result = run("training", tmp_path)
    assert (result.state, result.reason) == ("skipped", "needs the package no_such_package")


@pytest.mark.slow
def test_few_packages_run_the_parts_that_need_no_shards(tmp_path: Path) -> None:
    """From the root of a checkout, by its Python file, with every other package hidden."""
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    hidden = "pyarrow fsspec psutil safetensors pandas pyspark petastorm xxhash ruamel torchmetrics"
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "HIDDEN": f"{hidden} pytest hypothesis scipy annotated_types pydantic",
    }
    words = ["--tiny", "--output", str(tmp_path / "page.md"), "training", "offload", "table", "tests"]
    done = subprocess.run(
        [sys.executable, "tests/gpu/run.py", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {part["name"]: part for part in json.loads((tmp_path / "page.json").read_text())["parts"]}
    states = {name: part["state"] for name, part in parts.items()}
    assert states == {"training": "skipped", "offload": "ok", "table": "ok", "tests": "skipped"}
    assert parts["training"]["reason"] == (
        "needs the package annotated_types, fsspec, psutil, pyarrow, pydantic, safetensors"
    )


@pytest.mark.usefixtures("broken")
def test_the_command_writes_the_page_and_returns_1_if_a_part_failed(tmp_path, capsys):
    output = tmp_path / "new" / "page.md"
    assert command.main(["Unimportable", "environment", "--device", "cpu", "--output", str(output)]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("Unimportable failed")
    assert second.startswith("environment  ok")
    assert str(output) in last
    assert "| Unimportable | failed |" in output.read_text()
    parts = json.loads(output.with_suffix(".json").read_text())["parts"]
    assert [part["state"] for part in parts] == ["failed", "ok"]


def test_parts_that_have_no_time_are_skipped(tmp_path: Path) -> None:
    words = "environment table --device cpu --seconds 14.9 --output"
    assert command.main([*words.split(), str(tmp_path / "p.md")]) == 0
    assert "| table | skipped | 0 | no time was left of 15 s |" in (tmp_path / "p.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainnig"], "there is no part trainnig; the parts are environment, training, "),
        (["--device", "gpu"], '--device must be "cpu", "cuda" or "cuda:N", got \'gpu\''),
        (["--seconds", "0"], "--seconds must be above 0, got 0"),
        (["--output", "/dev/null/page.md"], "--output /dev/null/page.md cannot be written: "),
    ],
)
def test_a_wrong_option_is_one_sentence(words, message, capsys):
    with pytest.raises(SystemExit):
        command.main(words)
    assert message in capsys.readouterr().err
