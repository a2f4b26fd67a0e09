"""The core works without `ringspark.extras`: its tests pass in a copy of the tree without the folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Python runs this file at startup, so no test process imports extras from another checkout.
NO_EXTRAS = """
import sys

class NoExtras:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "ringspark.extras" or name.startswith("ringspark.extras."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoExtras)
"""


@pytest.mark.slow
def test_the_core_passes_its_tests_without_extras(tmp_path: Path) -> None:
    copy, start = tmp_path / "checkout", tmp_path / "start"
    left_out = shutil.ignore_patterns(".*", "extras", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=left_out)
    start.mkdir()
    (start / "sitecustomize.py").write_text(NO_EXTRAS)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    done = subprocess.run(
        [*command, "-m", "not slow and not extras and not places"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(start), str(copy)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10_000:]
