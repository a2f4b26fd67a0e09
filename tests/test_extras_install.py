"""Every extra of the package can be installed together with the pinned torch."""

import json
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # Python 3.10 has none

ROOT = Path(__file__).parent.parent
EXTRAS = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
TORCH = re.findall(r"^torch==(\S+)", (ROOT / "requirements" / "lock.txt").read_text(), re.MULTILINE)[0]


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the Python of an environment in which pip finds the pinned torch and nothing else."""
    folder = tmp_path_factory.mktemp("install") / "venv"
    venv.create(folder)
    (installed,) = Path(sysconfig.get_path("purelib")).glob(f"torch-{TORCH}*.dist-info")
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / installed.name).symlink_to(installed)
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize(
    "extras", [*([name] for name in EXTRAS), pytest.param(EXTRAS, id="all", marks=pytest.mark.telling)]
)
def test_pip_installs_an_extra_and_leaves_torch(with_torch: Path, tmp_path: Path, extras: list[str]) -> None:
    report = tmp_path / "report.json"
    pip = [sys.executable, "-m", "pip", "--python", str(with_torch), "install", "--quiet", "--dry-run"]
    command = [*pip, "--report", str(report), f"{ROOT}[{','.join(extras)}]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if re.search(r"NewConnectionError|No matching distribution found for setuptools", done.stderr):
        pytest.skip("pip reaches no index of packages")
    assert done.returncode == 0, done.stderr
    chosen = {item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]}
    assert "ringspark" in chosen
    assert not [name for name in chosen if name == "torch" or name.startswith("nvidia-cu")]
