"""A logged model predicts what `transform` predicts, in processes without ringspark and pyspark."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from programs import run_program
from ready_models import ready_model
from torch import nn
from without_ringspark import Served, predict_without, same

from ringspark.estimators import TorchModel
from ringspark.extras.serving.logged_model import save
from ringspark.extras.serving.plain import load
from ringspark.extras.serving.served_folder import write_served
from ringspark.extras.serving.served_model import ServedModel, load_stage
from ringspark.extras.serving.wheel_file import write_wheel
from ringspark.pipelines import Column, Scalar

# MLflow's libraries warn about each other's next versions.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@pytest.mark.spark
def test_a_table_is_predicted_without_ringspark_and_torch(late: Served) -> None:
    assert {row["predictedLabel"] for row in late.wanted} == {"late", "on time"}
    same(predict_without(late.folder, late.rows, "torch"), late.wanted)
    same(ServedModel(late.stage).predict(pd.DataFrame(late.rows)).to_dict("records"), late.wanted)


@pytest.mark.slow
@pytest.mark.spark
def test_images_are_predicted_without_ringspark_and_torch(pictures: Served) -> None:
    assert [row["prediction"] for row in pictures.wanted[-2:]] == [None, None]
    same(predict_without(pictures.folder, pictures.rows, "torch"), pictures.wanted)


@pytest.mark.slow
@pytest.mark.spark
def test_torch_runs_a_logged_model_without_onnx_runtime(late: Served, tmp_path: Path) -> None:
    save(late.stage, str(tmp_path / "model"), runtime="torch")
    assert not list((tmp_path / "model").rglob("*.onnx"))
    same(predict_without(tmp_path / "model", late.rows, "onnxruntime", "onnx"), late.wanted)


@pytest.mark.slow
@pytest.mark.spark
def test_a_logged_model_holds_the_stage_and_a_wheel_of_ringspark(late: Served, tmp_path: Path) -> None:
    assert load_stage(late.folder.as_uri()).labels == late.stage.labels
    needs = (late.folder / "requirements.txt").read_text()
    assert not re.search("ringspark|pyspark|torch", needs)
    assert re.search(r"^onnxruntime==", needs, re.MULTILINE)
    (wheel,) = (late.folder / "wheels").iterdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, str(tmp_path), str(wheel)], check=True)
    code = "import ringspark.extras.serving.plain, ringspark.jobs.command as c; print(c.__file__)"
    # The path of this process would find the checkout first.
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    assert run_program(code, cwd=tmp_path, env=environment).stdout.startswith(str(tmp_path))


def test_equal_sources_make_equal_wheels(tmp_path: Path) -> None:
    first, second = write_wheel(tmp_path / "a"), write_wheel(tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, None] if x.sum() > 0 else -x[:, None])


def stage_of(network: nn.Module, folder: Path, **params: Any) -> TorchModel:
    names = {
        "featuresCol": "x",
        "predictionCols": ["y"],
        "columns": [Column(name="x", kind=Scalar("float32"))],
    }
    return ready_model(TorchModel, network, folder / "checkpoint", **names, **params)


def line() -> nn.Module:
    return nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 1))


def test_a_row_that_cannot_be_predicted_is_named(tmp_path: Path) -> None:
    write_served(stage_of(line(), tmp_path), tmp_path / "served")
    served = load(str(tmp_path / "served"))
    with pytest.raises(ValueError, match=r"column 'x' has a missing value in row 1 .* handleInvalid='keep'"):
        served.predict(pd.DataFrame({"x": [1.0, None]}))
    with pytest.raises(ValueError, match=r"needs the column 'x', .* the request has \['z'\]"):
        served.predict(pd.DataFrame({"z": [1.0]}))
    assert served.predict(pd.DataFrame({"X": [1.0]}, index=["a"])).index.tolist() == ["a"]
    assert served.predict(pd.DataFrame({"x": np.zeros(0)})).to_dict("list") == {"y": []}


def test_rows_are_predicted_in_passes_of_limited_size(tmp_path: Path) -> None:
    stage = stage_of(line(), tmp_path, inferenceBatchSize=3, handleInvalid="keep")
    write_served(stage, tmp_path / "served")
    served, rows = load(str(tmp_path / "served")), [0.0, 1.0, None, 3.0, None, 5.0, 6.0]
    found = served.predict(pd.DataFrame({"x": rows}))["y"]
    assert found.isna().tolist() == [row is None for row in rows]
    single = [served.predict(pd.DataFrame({"x": [row]}))["y"][0] for row in rows if row is not None]
    assert found.dropna().tolist() == pytest.approx(single, abs=1e-6)


@pytest.mark.slow
def test_a_network_that_cannot_be_exported_is_served_by_ringspark(tmp_path: Path, caplog: Any) -> None:
    stage = stage_of(Branching(1, 1), tmp_path)
    with caplog.at_level(logging.WARNING, "ringspark"):
        save(stage, str(tmp_path / "model"))
    assert "needs ringspark and pyspark where it is served, because the network cannot" in caplog.text
    needs = (tmp_path / "model" / "requirements.txt").read_text().splitlines()
    (wheel,) = [line for line in needs if line.startswith("wheels/ringspark-")]
    assert (tmp_path / "model" / wheel).exists()
    with pytest.raises(ValueError, match="runtime='onnx' cannot serve this model: the network cannot"):
        save(stage, str(tmp_path / "other"), runtime="onnx")


def test_a_served_folder_holds_no_code_and_no_pickle(tmp_path: Path) -> None:
    for runtime in ("onnx", "torch"):
        write_served(stage_of(line(), tmp_path / runtime), tmp_path / runtime / "served", runtime)
    names = {path.name for path in tmp_path.glob("*/served/*")}
    assert names == {"serving.json", "network.onnx", "network.json", "network.safetensors"}
    assert json.loads((tmp_path / "onnx" / "served" / "serving.json").read_text())["runtime"] == "onnx"
