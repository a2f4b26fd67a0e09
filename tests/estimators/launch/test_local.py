"""Spawned ranks run their work, and do not run the script that starts them."""

from __future__ import annotations

import pytest
from programs import run_program

SCRIPT = """
from pathlib import Path

from ringspark.estimators.launch.local import run_spawned

with open({notes!r}, "a") as notes:
    notes.write("the script ran\\n")


class Work:
    def __call__(self, collective, device, status):
        return f"rank {{collective.rank}}"


print(run_spawned(2, "torch", Work()), __file__)
"""


@pytest.mark.distributed
def test_a_script_without_a_guard_is_not_run_again_by_its_ranks(tmp_path):
    notes = tmp_path / "notes.txt"
    printed = run_program(SCRIPT.format(notes=str(notes)), folder=tmp_path).stdout
    assert printed.startswith("['rank 0', 'rank 1']")
    assert "driver.py" in printed, "the script has its name again"
    assert notes.read_text() == "the script ran\n"
