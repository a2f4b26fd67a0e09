"""The pages in docs/ that are printed from the package's own tables, and the commands that pages name."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = re.compile(r"""make bench ARGS="([^"]*)"|tests/benchmarks/(\w+)\.py""")


@pytest.mark.parametrize(
    "page", ["settings", pytest.param("errors", marks=[pytest.mark.spark, pytest.mark.slow])]
)
def test_a_page_is_what_its_script_prints(page: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / f"show_{page}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (ROOT / "docs" / f"{page}.md").read_text() == done.stdout, (
        f"run `python scripts/show_{page}.py > docs/{page}.md`"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_benchmark_that_a_page_names_is_there(page: Path) -> None:
    known = runpy.run_path(str(ROOT / "tests" / "benchmarks" / "run.py"))["benchmarks"]()
    for words, program in COMMANDS.findall(page.read_text()):
        names = re.split(r"\s+-", words)[0].split() or [program]
        assert set(names) <= {*known, "run"}, f"{page.name} names {names}; there are {', '.join(known)}"
