"""The files in deploy/: scripts run in a new virtual environment; types of the services read the settings."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"


@pytest.mark.parametrize("script", sorted(DEPLOY.rglob("*.sh")), ids=lambda path: path.parent.name)
def test_scripts_have_no_syntax_errors(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


def test_every_file_says_what_was_run() -> None:
    for file in (
        path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix not in (".md", ".json")
    ):
        assert re.search(r"\bRun: ", "\n".join(file.read_text().splitlines()[:20])), file


def test_kubernetes_names_what_the_image_contains() -> None:
    spec = YAML().load((DEPLOY / "kubernetes" / "train.yaml").read_text())["spec"]
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    *sources, target = re.findall(r"^COPY (.*)$", dockerfile, re.MULTILINE)[0].split()
    for source in sources:
        assert source == "dist/*.whl" or (ROOT / source).is_file()
    folder, _, name = spec["mainApplicationFile"].removeprefix("local://").rpartition("/")
    assert f"{folder}/" == target
    assert name in {Path(source).name for source in sources}
    assert f"SPARK={spec['sparkVersion']}\n" in dockerfile
    assert f"AS {spec['image'].partition(':')[2]}\n" in dockerfile
    (config,) = spec["driver"]["configMaps"]
    assert spec["arguments"][1].startswith(config["path"])


def test_databricks_reads_every_field_of_the_job() -> None:
    jobs = pytest.importorskip("databricks.sdk.service.jobs")
    job = YAML().load((DEPLOY / "databricks" / "databricks.yml").read_text())["resources"]["jobs"]["train"]
    assert jobs.JobSettings.from_dict(job).as_dict() == job
    (task,) = job["tasks"]
    assert (DEPLOY / "databricks" / task["spark_python_task"]["python_file"]).is_file()


# botocore still calls datetime.utcnow.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_simulated_emr_starts_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of a simulation")
    settings = json.loads((DEPLOY / "emr" / "cluster.json").read_text())
    with moto.mock_aws():
        emr = boto3.client("emr", region_name="eu-central-1")
        started = emr.run_job_flow(**settings)["JobFlowId"]
        (bootstrap,) = emr.list_bootstrap_actions(ClusterId=started)["BootstrapActions"]
        (step,) = emr.list_steps(ClusterId=started)["Steps"]
    assert bootstrap["ScriptPath"].endswith("/bootstrap.sh")
    # The bootstrap action copies its folder there.
    copied = re.findall(r"aws s3 cp --recursive .* (\S+)", (DEPLOY / "emr" / "bootstrap.sh").read_text())[0]
    assert f"{copied}/command.py" in step["Config"]["Args"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with install.sh and the wheels of ringspark and, if there is a Horovod, of Horovod."""
    from ringspark.extras.commands.build_horovod import Build

    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, str(ROOT / "scripts" / "build_package.py"), "--output", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    shutil.copy(DEPLOY / "install.sh", folder)
    shutil.copy(Build(python=sys.executable, log=folder / "log").wheel(), folder)
    return folder


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Python of a new environment that has this one's packages, except pyspark, Horovod and ringspark."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (tmp_path / "packages").mkdir()
    for folder in (Path(place) for place in sys.path if place.endswith("-packages")):
        for entry in folder.iterdir():
            link = tmp_path / "packages" / entry.name
            if (
                not re.match(r"(__editable__|ringspark|pyspark|horovod)|.*\.pth$", entry.name)
                and not link.exists()
            ):
                link.symlink_to(entry)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{tmp_path}/packages\n")
    return tmp_path / "venv" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["databricks", "emr", "dataproc"])
def test_init_scripts_install_the_wheels(place: str, wheels: Path, python: Path) -> None:
    (script,) = (DEPLOY / place).glob("*.sh")
    options = {"databricks": [], "emr": [str(wheels), "horovod"], "dataproc": [str(wheels)]}[place]
    environment = {"RINGSPARK_PYTHON": str(python), "RINGSPARK_WHEELS": str(wheels)}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, **environment}
        return subprocess.run(command, env=variables, cwd=wheels, capture_output=True, text=True, check=False)

    done = run("bash", str(script), *options)
    assert done.returncode == 0, done.stderr
    assert "ringspark 0." in done.stdout
    where = run(str(python), "-c", "import ringspark; print(ringspark.__file__)").stdout
    assert where.startswith(str(python.parent.parent))
    assert (run(str(python), "-c", "import horovod.torch").returncode == 0) == (place != "dataproc")
    assert "No module named 'pyspark'" in run(str(python), "-c", "import pyspark").stderr
    if place == "databricks":
        train = str(DEPLOY / "databricks" / "train.py")
        assert run(str(python), train, "check", "--help").returncode == 0
        refused = run(str(python), train, "train", "missing.yaml")
        assert refused.returncode == 2, refused.stderr
        assert "missing.yaml" in refused.stderr
