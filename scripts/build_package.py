"""Builds the wheel, the source distribution, a `.zip` for Spark's executors, and a bill of materials (SBOM).

`spark-submit --py-files` and `SparkSession.addArtifacts(pyfile=True)` accept a `.zip` but not a `.whl`. The
bill of materials is CycloneDX JSON: the wheel with its hash, and the required packages at the versions that
the tests run with.

setuptools builds in a copy of the sources, because a `build/` folder in the checkout would put deleted files
into the next wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

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


def write_bill_of_materials(root: Path, wheel: Path) -> Path:
    """Writes the SBOM of a wheel next to it, in CycloneDX 1.6."""
    name, version = wheel.name.split("-")[:2]
    pins = dict(
        re.findall(r"^([\w.-]+)==([\w.+-]+)", (root / "requirements/lock.txt").read_text(), re.MULTILINE)
    )
    required = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [re.split(r"[<>=!~\[ ]", requirement)[0] for requirement in required]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    own = _component(name, version) | {
        "hashes": [{"alg": "SHA-256", "content": digest}],
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
    packages = [_component(package, pins[package]) for package in names]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": packages,
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": [package["bom-ref"] for package in packages]}],
    }
    path = wheel.with_name(f"{name}-{version}.cdx.json")
    path.write_text(json.dumps(bill, indent=2) + "\n")
    return path


def _component(name: str, version: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{name.lower()}@{version}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Build the wheel, the source distribution, the zip for spark-submit, and the SBOM."
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
    for file in (wheel, source, archive, write_bill_of_materials(ROOT, wheel)):
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
