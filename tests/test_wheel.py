"""Installs the wheel in a new environment, without optional packages and outside of the checkout."""

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import ringspark

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, str(ROOT / "scripts" / "build_package.py"), "--output", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.telling
@pytest.mark.extras
def test_its_metadata_is_valid(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Metadata.from_email(archive.read(name), validate=True)
    assert metadata.description_content_type == "text/markdown"
    assert "Apache-2.0" in str(metadata.license_expression)
    assert Parser().parsestr(archive.read(name).decode())["License-File"] == "LICENSE"
    assert metadata.version.public == ringspark.__version__
    assert "ringspark/py.typed" in archive.namelist()
    # Horovod as published does not compile; `ringspark build-horovod` builds it.
    assert "horovod" not in (metadata.provides_extra or [])


@pytest.mark.telling
@pytest.mark.extras
def test_its_bill_of_materials_names_the_required_packages(wheel: Path) -> None:
    (path,) = wheel.parent.glob("*.cdx.json")
    bill = json.loads(path.read_text())
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert bill["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    (name,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA")]
    required = Metadata.from_email(zipfile.ZipFile(wheel).read(name)).requires_dist or []
    here = {one.name: version(one.name) for one in required if one.marker is None}
    assert {part["name"]: part["version"].partition("+")[0] for part in bill["components"]} == {
        name: found.partition("+")[0] for name, found in here.items()
    }


@pytest.mark.slow
def test_the_demo_and_the_quickstart_run_from_it(wheel: Path, tmp_path: Path) -> None:
    torch = re.findall(r"pip install (torch==\S+)", (ROOT / "docs" / "install.md").read_text())[0]
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    programs = tmp_path / "venv" / "bin"
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYSPARK", "PYTHON"))
    }
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    for package in (torch, str(wheel)):
        run(str(programs / "pip"), "install", "--quiet", package)
    assert "ROC AUC" in run("ringspark", "demo", "--quick")
    assert "ready to train" in run("ringspark", "check")
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "quickstart.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "first.py").write_text("\n".join(blocks).replace("/shared/", f"{tmp_path}/"))
    run("python", "first.py")
    code = (
        "from ringspark.estimators.collectives import collective_class as find\n"
        "try:\n    find('horovod')\nexcept ValueError as error:\n    print(error)"
    )
    assert "ringspark build-horovod" in run("python", "-c", code)
