"""Follows docs/install.md and docs/quickstart.md in an empty folder, and prints each step's time.

    python scripts/time_quickstart.py          # this checkout
    python scripts/time_quickstart.py dist/ringspark-0.1.0-py3-none-any.whl

Creates a new environment with the pinned torch and ringspark, and runs `ringspark demo --quick` and the code
of the page. The second run is faster, because pip caches the packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read_program(folder: Path) -> str:
    """Returns the page's programs as one, with `/shared` replaced by the folder."""
    text = (ROOT / "docs" / "quickstart.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return "\n".join(blocks).replace("/shared/", f"{folder}/")


def main() -> int:
    """Runs the steps. Returns 1 if one fails."""
    source = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "first.py").write_text(read_program(folder))
        python = str(folder / "venv" / "bin" / "python")
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        steps = {
            "an environment": [sys.executable, "-m", "venv", str(folder / "venv")],
            "torch": [
                *install,
                re.findall(r"pip install (torch==\S+)", (ROOT / "docs/install.md").read_text())[0],
            ],
            "ringspark": [*install, str(source)],
            "ringspark demo --quick": [str(folder / "venv" / "bin" / "ringspark"), "demo", "--quick"],
            "the first program": [python, "first.py"],
            "the same again": [python, "first.py"],
        }
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYSPARK", "PYTHON"))
        }
        # Spark's workers must use this Python, as in an activated environment.
        environment["PATH"] = f"{folder / 'venv' / 'bin'}{os.pathsep}{environment['PATH']}"
        total = 0.0
        for what, command in steps.items():
            start = time.perf_counter()
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            seconds = time.perf_counter() - start
            total += seconds
            print(f"{what:24} {seconds:6.1f} s", flush=True)
            if done.returncode:
                print(done.stdout[-2000:] + done.stderr[-2000:], file=sys.stderr)
                return 1
        print(f"{'in all':24} {total:6.1f} s\n\nthe program's last lines:")
        print("\n".join(done.stdout.splitlines()[-20:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
