"""Programs that a test runs in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_program(
    code: str,
    *arguments: object,
    folder: Path | None = None,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs Python code, which must end well; returns its output.

    Args:
        folder: Working directory, which then gets the code as the file driver.py.
        cwd: Working directory without the file.
        env: The whole environment; this process's if None.
    """
    if folder is not None:
        (folder / "driver.py").write_text(code)
    command = [sys.executable, *(["-c", code] if folder is None else ["driver.py"]), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder or cwd, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def spark_free_environment() -> dict[str, str]:
    """Returns the environment without the settings that this process's Spark session left in it."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("SPARK", "PYSPARK_GATEWAY"))}
