"""`mlflow models serve` in a new environment with only the packages that a logged model asks for."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from mlflow_server import mlflow_server
from without_ringspark import Served, same

# MLflow's libraries warn about each other's next versions.
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def programs(late: Served, pictures: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    programs = folder / "bin"

    def run(program: str, *arguments: str) -> str:
        command = [str(programs / program), *arguments]
        # In another folder, because Python would find the checkout's `ringspark` in its own.
        done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()

    for model in (late, pictures):
        run("pip", "install", "--quiet", "-r", str(model.folder / "requirements.txt"))
    names = ["ringspark", "pyspark", "torch"]
    code = f"from importlib.util import find_spec; print([n for n in {names} if find_spec(n)])"
    assert run("python", "-c", code) == "[]"
    return programs


@pytest.mark.parametrize("name", ["late", "pictures"])
def test_a_server_answers_rows_as_transform(request: Any, programs: Any, tmp_path: Path, name: str) -> None:
    model: Served = request.getfixturevalue(name)
    command = [str(programs / "mlflow"), "models", "serve", "--model-uri", str(model.folder)]
    command += ["--env-manager", "local"]
    with mlflow_server(tmp_path, command, "ping", _environment(programs)) as server:
        address = f"{server.uri}/invocations"
        same(post(address, {"dataframe_records": model.rows}), model.wanted)
        columns = list(model.rows[0])
        split = {"columns": columns, "data": [[row[name] for name in columns] for row in model.rows]}
        same(post(address, {"dataframe_split": split}), model.wanted)
        # A single row has the same prediction as among others.
        same(post(address, {"dataframe_records": model.rows[:1]}), model.wanted[:1])


def post(address: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["predictions"]


def _environment(programs: Path | None = None) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYSPARK", "PYTHON"))}
    return kept if programs is None else {**kept, "PATH": f"{programs}{os.pathsep}{kept['PATH']}"}
