"""The tests marked `modes` again, on executor processes of their own and through Spark Connect.

Each mode needs a process of its own: one Python process holds one kind of Spark session.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUITES = [
    "tests/estimators/test_stages.py",
    "tests/estimators/launch/test_gang.py",
    "tests/pipelines/test_reuse.py",
]


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("master", ["local-cluster[2,1,1024]", "connect"])
def test_the_stages_in_other_modes(master: str) -> None:
    environment = os.environ | {"RINGSPARK_TEST_MASTER": master}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "modes", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *SUITES], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
