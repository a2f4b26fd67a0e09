"""Commit subjects are imperative and short."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("Keep a checkpoint when exists() fails", ""),
        ("Address rows by their index", ""),
        ("Kept a checkpoint", ""),  # an accepted gap: the check does not know every past tense
        ("Rewrites the reader", "begin with an imperative"),
        ("The reader is faster", "begin with an imperative"),
        ("fix the reader", "capital letter"),
        ("Fix", "too short"),
        ("Fix the reader.", "period"),
        ("Fix " + "x" * 70, "shorten it to 72"),
    ],
)
def test_a_commit_subject_is_imperative_and_short(subject: str, problem: str, tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\nWhy.\n")
    command = [sys.executable, str(ROOT / "scripts" / "check_commit_subject.py"), str(message)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not problem), done.stderr
    assert problem in done.stderr
