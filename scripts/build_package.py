"""Builds the wheel, the source distribution, and a `.zip` with the wheel's content for Spark's executors.

`spark-submit --py-files` and `SparkSession.addArtifacts(pyfile=True)` accept a `.zip` but not a `.whl`.

setuptools builds in a copy of the sources, because a `build/` folder in the checkout would put deleted files
into the next wheel.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ringspark", "pipelines", "models", "estimators", "extras", "jobs")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", *FOLDERS)


def build_distributions(root: Path, folder: Path) -> tuple[Path, Path]:
    """Builds the wheel and the source distribution of the checkout at `root` into `folder`."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, "ringspark")
        copy.mkdir()
        for source in SOURCES:
            if (root / source).is_dir():
                shutil.copytree(root / source, copy / source, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(root / source, copy / source)
        program = "import sys; from setuptools import build_meta as b; b.build_sdist(sys.argv[1])"
        build = [sys.executable, "-c", program, f"{name}/dist"]
        subprocess.run(build, cwd=copy, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
        options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", f"{name}/dist"]
        # Built from the source distribution, so this fails if the source distribution lacks a file.
        (archive,) = Path(name, "dist").glob("*.tar.gz")
        subprocess.run([*pip, "wheel", *options, str(archive)], check=True, stdin=subprocess.DEVNULL)
        (wheel,) = Path(name, "dist").glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, folder)), Path(shutil.copy(archive, folder))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Build the wheel, the source distribution, and the zip for spark-submit."
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder to build into")
    options = parser.parse_args()
    try:
        wheel, source = build_distributions(ROOT, options.output)
    except subprocess.CalledProcessError as error:
        what = "wheel" if "pip" in error.cmd else "source distribution"
        print(f"cannot build the {what}: exit code {error.returncode}", file=sys.stderr)
        return 1
    archive = shutil.copy(wheel, wheel.with_name("-".join(wheel.name.split("-")[:2]) + ".zip"))
    for file in (wheel, source, archive):
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
