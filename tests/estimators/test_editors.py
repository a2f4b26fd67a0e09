"""Tests what editors, type checkers and `help` show about the stages."""

import inspect
import json
import pydoc
import runpy
import subprocess
import sys
from pathlib import Path

import jedi
import pytest

from ringspark.estimators import TorchClassifier
from ringspark.estimators.lazy_imports import load_object

ROOT = Path(__file__).resolve().parents[2]
# The layout of an installed package, which tools without imports need.
INSTALLED = ROOT / ".dev"
PROJECT = jedi.Project(INSTALLED, sys_path=[str(INSTALLED), *sys.path])


def _completions(line: str, *imported: str) -> list[str]:
    text = "\n".join([*imported, line])
    return [each.name for each in jedi.Script(text, project=PROJECT).complete(len(imported) + 1, len(line))]


@pytest.mark.extras
@pytest.mark.parametrize("module", runpy.run_path(str(ROOT / "scripts" / "show_stubs.py"))["STUBS"])
def test_a_stub_is_what_the_script_prints(module):
    printed = runpy.run_path(str(ROOT / "scripts" / "show_stubs.py"))["stub"](module)
    assert (ROOT / f"{module.replace('.', '/')}.pyi").read_text() == printed


@pytest.mark.extras
@pytest.mark.parametrize(
    ("line", "module", "found"),
    [
        ("TorchClassifier(ep", "ringspark.estimators", ["epochs="]),
        ("TorchClassifier().setEp", "ringspark.estimators", ["setEpochs"]),
        ("TorchAutoencoder(maskI", "ringspark.estimators", ["maskId="]),
        ("SequenceWindows(maxG", "ringspark.estimators", ["maxGap="]),
        ("OptunaSearch(numT", "ringspark.extras.search", ["numTrials="]),
    ],
)
def test_an_editor_completes_settings_without_running_code(line, module, found):
    name = line.partition("(")[0]
    assert _completions(line, f"from {module} import {name}") == found


def test_a_notebook_completes_settings_of_a_stage_that_it_imported():
    line = "TorchClassifier(checkpointEveryS"
    found = jedi.Interpreter(line, [{"TorchClassifier": TorchClassifier}]).complete(1, len(line))
    assert [each.name for each in found] == ["checkpointEverySeconds=", "checkpointEverySteps="]


@pytest.mark.extras
@pytest.mark.parametrize(
    "path",
    [
        "ringspark.estimators:TorchClassifier",
        "ringspark.estimators:TorchAutoencoder",
        "ringspark.estimators:SequenceWindows",
        "ringspark.extras.search:OptunaSearch",
    ],
)
def test_help_lists_every_setting_once_with_its_sentence(path):
    stage = load_object(path)
    settings = stage.SETTINGS
    assert list(inspect.signature(stage).parameters) == list(settings)
    lines = [line.strip(" |") for line in pydoc.render_doc(stage, renderer=pydoc.plaintext).splitlines()]
    for name, setting in settings.items():
        assert lines.count(f"{name}: {setting.words}") == 1


@pytest.mark.slow
def test_a_type_checker_knows_the_settings(tmp_path):
    (tmp_path / "job.py").write_text(
        "from ringspark.estimators import Mesh, TorchClassifier\n"
        "stage = TorchClassifier(epochs=2, parallelism=Mesh(tensor=2), sync='zero', labelCol='y')\n"
        "reveal_type(stage.setEpochs(3).getEpochs())\n"
        "TorchClassifier(epoch=2)\n"
        "TorchClassifier(epochs='two')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), tmp_path / "job.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    told = [line.partition("job.py:")[2] for line in done.stdout.splitlines() if "job.py:" in line]
    assert told[0] == '3: note: Revealed type is "int"'
    assert 'Unexpected keyword argument "epoch" for "TorchClassifier"; did you mean "epochs"?' in told[1]
    assert 'Argument "epochs" to "TorchClassifier" has incompatible type "str"' in " ".join(told[2:])
    assert len([line for line in told if "error" in line]) == 2


@pytest.mark.extras
def test_the_schema_of_a_job_file_is_what_the_script_prints():
    printed = runpy.run_path(str(ROOT / "scripts" / "show_job_schema.py"))["text"]()
    assert (ROOT / "docs" / "job.schema.json").read_text() == printed
    assert json.loads(printed)["properties"]["params"]
