"""User code travels: one process pickles it, and another process without the files unpickles it."""

import sys
from pathlib import Path
from typing import Any

import pytest
from programs import run_program

from ringspark.estimators import user_code

LOAD = """
import sys
from ringspark.estimators import user_code
try:
    print(user_code.loads(open(sys.argv[1], "rb").read())())
except ValueError as error:
    print(error)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of importable modules; its modules are removed from `sys.modules` at the end."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def _elsewhere(value: Any, tmp_path: Path) -> str:
    """Prints the value in a process without the folder and returns the output."""
    (tmp_path / "value.pkl").write_bytes(user_code.dumps(value))
    return run_program(LOAD, tmp_path / "value.pkl", cwd="/").stdout.strip()


def test_a_package_of_another_environment_stays_there(folder, monkeypatch):
    """All nodes have the installed packages, also if a job's environment comes before them."""
    installed = folder / "site-packages"
    installed.mkdir()
    monkeypatch.syspath_prepend(installed)
    (installed / "rs_package.py").write_text("def answer():\n    return 42\n")
    import rs_package

    assert user_code.loads(user_code.dumps(rs_package.answer)) is rs_package.answer, "a copy came back"


def test_modules_that_cannot_travel_say_why(folder):
    (folder / "rs_g.py").write_text("import rs_h\ndef answer():\n    return rs_h.value()\n")
    (folder / "rs_h.py").write_text("import rs_g\ndef value():\n    return 1\n")
    import rs_g

    told = _elsewhere(rs_g.answer, folder)
    assert told.startswith("module 'rs_g' is not installed here and could not be pickled with the network (")
    assert "import functions and classes from the module, not the module itself" in told
    assert len(told.splitlines()) == 1


def test_libraries_travel_by_name(tmp_path):
    from json import dumps

    assert len(user_code.dumps(dumps)) < 200
