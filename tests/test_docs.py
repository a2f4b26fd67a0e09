"""The pages of docs/ are built, and what they name exists."""

import doctest
import re
import runpy
import subprocess
import sys
from collections.abc import Collection
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

import ringspark
from ringspark.estimators.training.settings.table import SETTINGS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = re.compile(r"""make bench ARGS="([^"]*)"|tests/benchmarks/(\w+)\.py""")


@pytest.mark.extras
def test_the_page_of_settings_has_each_setting_and_each_class_of_options() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "show_settings.py")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    printed = {line.split("`")[1] for line in lines if line.startswith("| `")}
    assert printed >= set(SETTINGS)
    kinds = [setting.options for setting in SETTINGS.values() if setting.options is not None]
    variants = {each.__name__ for kind in kinds for each in kind.variants().values() or [kind]}
    assert {line.removeprefix("### ") for line in lines} >= variants


@cache
def _benchmarks() -> Collection[str]:
    found: Collection[str] = runpy.run_path(str(ROOT / "tests" / "benchmarks" / "run.py"))["benchmarks"]()
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_benchmark_that_a_page_names_is_there(page: Path) -> None:
    known = _benchmarks()
    for words, program in COMMANDS.findall(page.read_text()):
        names = re.split(r"\s+-", words)[0].split() or [program]
        assert set(names) <= {*known, "run"}, f"{page.name} names {names}; there are {', '.join(known)}"


@pytest.mark.telling
def test_the_pages_are_built_without_a_warning_and_hold_each_public_name(tmp_path: Path) -> None:
    options = ["--quiet", "--fail-on-warning", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path / "html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    inventory = InventoryFile.loads((tmp_path / "html" / "objects.inv").read_bytes(), uri="").data
    names = {name for kind, entries in inventory.items() if kind.startswith("py:") for name in entries}
    assert not [name for name in names if "._" in name]
    extras = ("search", "tuning", "certificate")
    for package in ("pipelines", "models", "estimators", *(f"extras.{name}" for name in extras)):
        module = import_module(f"ringspark.{package}")
        public = {f"{module.__name__}.{name}" for name in module.__all__}
        # Tables have no docstring.
        assert public - names <= {"ringspark.pipelines.READERS", "ringspark.models.MODELS"}


@pytest.mark.extras
@pytest.mark.parametrize("page", ["design.md", "promises.md"])
def test_every_test_that_a_page_cites_is_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for folder, file, name in re.findall(r"(tests/extras/)?[\w/]*?(test_\w+\.py)::(\w+)", text):
        if folder and not (ROOT / folder).exists():  # the core is tested without extras, too
            continue
        texts = [path.read_text() for path in (ROOT / "tests").rglob(file)]
        assert any(f"def {name}(" in text for text in texts), f"{page} cites {file}::{name}"


def test_changelog_and_citation_have_the_package_s_version() -> None:
    releases = re.findall(r"^## \[(\d[^\]]*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    cited = tuple(
        re.findall(rf"^{key}: (\S+)$", citation, re.MULTILINE)[0] for key in ("version", "date-released")
    )
    assert releases[0] == cited
    assert cited[0] == ringspark.__version__


WITH_EXAMPLES = [
    path
    for package in ("pipelines", "models", "estimators", "extras")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_of_docstrings_say_what_happens(path: Path) -> None:
    name = ".".join(("ringspark", *path.relative_to(ROOT).with_suffix("").parts))
    failed, tried = doctest.testmod(import_module(name))
    assert (failed, tried > 0) == (0, True)
