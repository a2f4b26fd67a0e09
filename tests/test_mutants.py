"""The table of `make mutants` matches the code. `make mutants` itself takes a quarter of an hour."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script() -> Any:
    return runpy.run_path(str(ROOT / "scripts" / "run_mutants.py"), run_name="run_mutants")


@pytest.mark.extras
def test_every_mutant_fits_the_tree(script: Any) -> None:
    mutants = script["read_tables"]()
    script["check"](mutants)
    assert {mutant.file.split("/")[0] for mutant in mutants} == {
        "pipelines",
        "models",
        "estimators",
        "extras",
        "jobs",
    }
    claims = [mutant.claim for mutant in mutants]
    assert len(set(claims)) == len(claims)


def test_a_mutant_that_does_not_fit_is_refused(script: Any) -> None:
    mutant = script["read_tables"]()[0]
    for changed, message in (
        (replace(mutant, old="no such text"), "must occur once, but occurs 0 times"),
        (replace(mutant, old=" "), "must occur once, but occurs "),
        (replace(mutant, new="("), "is not valid Python"),
        (replace(mutant, tests=("tests/test_nothing.py",)), "does not exist; fix tests/mutants"),
        (replace(mutant, tests=("tests/test_mutants.py::test_no",)), "does not exist; fix tests/mutants"),
    ):
        with pytest.raises(ValueError, match=message):
            script["check"]([changed])


@pytest.mark.slow
def test_a_mutant_is_judged_by_its_tests_and_leaves_the_copy_as_it_was(script: Any, tmp_path: Path) -> None:
    copy = script["Copy"](tmp_path)
    file = tmp_path / "pipelines" / "kinds" / "strings.py"
    text = file.read_text()
    mutant = next(m for m in script["read_tables"]() if m.file == "pipelines/kinds/strings.py")
    assert copy.judge(mutant, 120.0)[0] == "killed"
    assert copy.judge(replace(mutant, new=mutant.old), 120.0)[0] == "survived"
    assert copy.judge(replace(mutant, tests=("tests/pipelines/test_vocabulary.py::no",)), 120.0)[0] == "error"
    assert file.read_text() == text
