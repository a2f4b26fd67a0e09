"""The files for Airflow, Dagster, Kubeflow and dbt run with these tools, where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
pytestmark = [pytest.mark.spark, pytest.mark.slow]

JOB = """
stage: TorchClassifier
data: {{parquet: {folder}/rows}}
params:
  model: {{target: linear, kwargs: {{in_features: 2, out_features: 2}}}}
  featuresCol: x
  labelCol: y
  runUri: {folder}/run
save: {{model: {folder}/model, overwrite: true}}
"""


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Returns a job file, its model, rows, and a folder for predictions; the command is on the PATH."""
    (tmp_path / "rows").mkdir()
    x = [[float(i % 7), float(i % 5)] for i in range(64)]
    pq.write_table(pa.table({"x": x, "y": [int(a > b) for a, b in x]}), tmp_path / "rows" / "0.parquet")
    (tmp_path / "job.yaml").write_text(JOB.format(folder=tmp_path))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    if shutil.which("ringspark") is None:
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    names = ("model", "rows", "predictions")
    return {"job": str(tmp_path / "job.yaml"), **{name: str(tmp_path / name) for name in names}}


def load(file: str) -> ModuleType:
    spec = spec_from_file_location(Path(file).stem, DEPLOY / file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(paths: dict[str, str]) -> None:
    table = pq.read_table(paths["predictions"])
    assert table.num_rows == 64
    assert "prediction" in table.column_names


def test_airflow_runs_both_tasks(paths: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("airflow")
    # A process of its own, because Airflow reads its settings when it is imported.
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import train_and_score\n"
        "run = train_and_score.dag.test(); assert run.state == 'success', run.state"
    )
    variables = {f"AIRFLOW_VAR_RINGSPARK_{name.upper()}": path for name, path in paths.items()}
    environment = os.environ | variables | {"AIRFLOW_HOME": str(tmp_path / "airflow")}
    folder = str(DEPLOY / "airflow")
    environment |= {"AIRFLOW__CORE__LOAD_EXAMPLES": "false", "AIRFLOW__CORE__DAGS_FOLDER": folder}
    for command in (["-m", "airflow", "db", "migrate"], ["-c", code, folder]):
        subprocess.run([sys.executable, *command], env=environment, check=True)
    check(paths)


def test_dagster_materializes_the_assets(paths: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    dagster = pytest.importorskip("dagster")
    for name, path in paths.items():
        monkeypatch.setenv(f"RINGSPARK_{name.upper()}", path)
    assets = load("dagster/assets.py")
    assert dagster.materialize([assets.model, assets.predictions]).success
    check(paths)


# The runner warns of the image, which it does not use.
@pytest.mark.filterwarnings("ignore:.*custom or non-Python base image:RuntimeWarning")
def test_kubeflow_compiles_and_runs_the_pipeline(paths: dict[str, str], tmp_path: Path) -> None:
    kfp = pytest.importorskip("kfp")
    pipeline = load("kubeflow/pipeline.py")
    kfp.compiler.Compiler().compile(pipeline.train_and_score, str(tmp_path / "pipeline.yaml"))
    assert "ringspark:cpu" in (tmp_path / "pipeline.yaml").read_text()
    kfp.local.init(kfp.local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "root"))
    assert pipeline.train_and_score(**paths).output == paths["predictions"]
    check(paths)


def test_dbt_compiles_the_model_and_it_predicts(paths: dict[str, str], tmp_path: Path, spark: Any) -> None:
    pytest.importorskip("dbt.cli.main")
    from dbt.cli.main import dbtRunner

    project = tmp_path / "project"
    (project / "models").mkdir(parents=True)
    shutil.copy(DEPLOY / "dbt" / "predictions.py", project / "models")
    (project / "models" / "new_rows.sql").write_text("select 1 as id")
    (project / "dbt_project.yml").write_text(
        "{name: example, profile: example, "
        f"models: {{example: {{predictions: {{+model_uri: {paths['model']}}}}}}}}}"
    )
    (project / "profiles.yml").write_text(
        "example: {target: t, outputs: {t: {type: spark, method: session, schema: s, host: none}}}\n"
    )
    where = ["--project-dir", str(project), "--profiles-dir", str(project)]
    parsed = dbtRunner().invoke(["parse", *where])
    assert parsed.success, parsed.exception
    node = parsed.result.nodes["model.example.predictions"]
    assert node.depends_on.nodes == ["model.example.new_rows"]
    subprocess.run(["ringspark", "train", paths["job"]], check=True)
    rows = spark.read.parquet(paths["rows"])

    class Config:
        get = staticmethod(node.config.get)

        def __call__(self, **options: Any) -> None:
            assert options == {"materialized": "table"}

    # What dbt passes to a model: its configuration, and the table of each reference.
    dbt = SimpleNamespace(config=Config(), ref={"new_rows": rows}.__getitem__)
    assert load("dbt/predictions.py").model(dbt, spark).count() == 64
