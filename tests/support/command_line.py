"""Runs `ringspark` in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def run_ringspark(
    *words: object, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command with some environment variables set; returns its exit code and output."""
    command = [sys.executable, "-m", "ringspark.jobs.command", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True)
