"""Exports to other runtimes compute what the network computes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import run_program
from torch import nn

from ringspark.estimators import TorchClassificationModel, TorchModel
from ringspark.estimators.training.checkpoint.weights import save_checkpoint
from ringspark.pipelines import Array, Column, Scalar, Vocabulary

pytestmark = pytest.mark.filterwarnings("ignore")

# Versions that the tests install, besides those of requirements/.
ONNXRUNTIME_WEB = "onnxruntime-web@1.30.0"
EXECUTORCH = ("executorch==1.5.1", "torchao==0.18.0", "ruamel.yaml", "flatbuffers", "tabulate")


class Looked(nn.Module):
    """Embeds an id and adds a layer over numbers; erfinv has no ONNX operator."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.line = nn.Linear(2, 3)

    def forward(self, key: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.table(key) + self.line(torch.erfinv(numbers / 3))


@pytest.fixture
def stage(tmp_path: Path) -> Any:
    torch.manual_seed(3)
    save_checkpoint(str(tmp_path / "checkpoint"), network := Looked())
    columns = (
        Column(name="key", kind=Scalar("int64")),
        Column(name="numbers", kind=Array("float32", (2,))),
        Column(name="label", kind=Vocabulary(words=("no", "maybe", "yes"))),
    )
    names = {"input_columns": ["key", "numbers"], "label_columns": ["label"]}
    model = TorchClassificationModel(model=network, inputCols=names["input_columns"])
    return model._set_trained(str(tmp_path / "checkpoint"), [(3,)], None, columns=columns, **names)


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(count) % 5, torch.linspace(-2.9, 2.9, 2 * count).reshape(count, 2)


def expected(stage: TorchModel, count: int) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        found: np.ndarray[Any, Any] = stage.module()(*rows(count)).numpy()
    return found


def test_a_triton_repository_describes_what_onnx_runtime_runs(stage: Any, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    stage.export(str(tmp_path / "late"), format="triton")
    folder = tmp_path / "late" / "late"
    config = (folder / "config.pbtxt").read_text()
    assert 'name: "late"\nbackend: "onnxruntime"\nmax_batch_size: 2048\n' in config
    assert (folder / "labels.txt").read_text().splitlines() == ["no", "maybe", "yes"]
    pattern = r'(?:in|out)put \{\n  name: "(\w+)"\n  data_type: TYPE_(\w+)\n  dims: \[ (.*) \]'
    found = re.findall(pattern, config)
    session = runtime.InferenceSession(str(folder / "1" / "model.onnx"))
    types = {"tensor(float)": "FP32", "tensor(int64)": "INT64"}
    entries = [*session.get_inputs(), *session.get_outputs()]
    assert [name for name, _, _ in found] == [entry.name for entry in entries]
    assert [kind for _, kind, _ in found] == [types[entry.type] for entry in entries]
    # Triton adds the rows; a scalar input has no other dimension.
    shapes = [[int(size) for size in dims.split(", ")] for _, _, dims in found]
    assert shapes == [entry.shape[1:] or [1] for entry in entries] == [[1], [2], [3]]
    assert config.count("reshape: { shape: [ ] }") == 1
    for count in (1, 7):
        inputs = {entry.name: value.numpy() for entry, value in zip(entries, rows(count), strict=False)}
        np.testing.assert_allclose(session.run(None, inputs)[0], expected(stage, count), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_aotinductor_predicts_any_number_of_rows(stage: Any, tmp_path: Path) -> None:
    stage.export(str(tmp_path / "model.pt2"), format="aotinductor")
    code = (
        "import sys, torch; from torch._inductor import aoti_load_package as load\n"
        "network = load(sys.argv[1])\n"
        "keys, numbers = torch.load(sys.argv[2])\n"
        "torch.save([network(keys[:n], numbers[:n]) for n in (1, 7)], sys.argv[3])"
    )
    torch.save(rows(7), tmp_path / "rows.pt")
    run_program(code, *(tmp_path / name for name in ("model.pt2", "rows.pt", "found.pt")))
    for found in torch.load(tmp_path / "found.pt"):
        np.testing.assert_allclose(found, expected(stage, 7)[: len(found)], rtol=1e-4, atol=1e-5)


def test_aotinductor_without_a_compiler_is_one_sentence(stage: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    with pytest.raises(ValueError, match=r"^format 'aotinductor' needs a C\+\+ compiler; install g\+\+"):
        stage.export(str(tmp_path / "model.pt2"), format="aotinductor")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm")
def test_onnx_runtime_web_predicts_the_same_under_node(stage: Any, tmp_path: Path) -> None:
    stage.export(str(tmp_path / "model.onnx"), format="onnx")
    subprocess.run(["npm", "install", "--silent", ONNXRUNTIME_WEB], cwd=tmp_path, check=True)
    keys, numbers = rows(7)
    (tmp_path / "rows.json").write_text(json.dumps([keys.tolist(), numbers.flatten().tolist()]))
    # Of the package's backends, node has WebAssembly, as every browser.
    program = """
import * as ort from 'onnxruntime-web';
import { readFileSync } from 'node:fs';
ort.env.wasm.numThreads = 1;
const [keys, numbers] = JSON.parse(readFileSync('rows.json'));
const options = { executionProviders: ['wasm'] };
const session = await ort.InferenceSession.create(readFileSync('model.onnx'), options);
const inputs = {
  key: new ort.Tensor('int64', BigInt64Array.from(keys.map(BigInt)), [keys.length]),
  numbers: new ort.Tensor('float32', Float32Array.from(numbers), [keys.length, 2]),
};
const outputs = await session.run(inputs);
console.log(JSON.stringify(Array.from(outputs[session.outputNames[0]].data)));
"""
    (tmp_path / "predict.mjs").write_text(program)
    done = subprocess.run(["node", "predict.mjs"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = np.array(json.loads(done.stdout.splitlines()[-1])).reshape(7, 3)
    np.testing.assert_allclose(found, expected(stage, 7), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_executorch_predicts_any_number_of_rows(stage: Any, tmp_path: Path) -> None:
    # The package asks for many others, which these networks do not use; so it gets its own environment, which
    # finds the packages of this one.
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    own = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in own))
    python = str(environment / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps"]
    subprocess.run([*pip, *EXECUTORCH], check=True)
    code = """
import sys, numpy, torch
from executorch.runtime import Runtime
from ringspark.estimators import TorchClassificationModel
stage = TorchClassificationModel.load(sys.argv[1])
stage.export(sys.argv[2], format="executorch")
method = Runtime.get().load_program(sys.argv[2]).load_method("forward")
keys, numbers = torch.load(sys.argv[3])
for n in (1, 7):
    found = method.execute([keys[:n], numbers[:n]])[0]
    torch.testing.assert_close(found, stage.module()(keys[:n], numbers[:n]), rtol=1e-4, atol=1e-5)
"""
    stage.save(str(tmp_path / "stage"))
    torch.save(rows(7), tmp_path / "rows.pt")
    files = [str(tmp_path / name) for name in ("stage", "model.pte", "rows.pt")]
    done = subprocess.run([python, "-c", code, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_executorch_that_is_not_installed_is_named(stage: Any, tmp_path: Path) -> None:
    code = (
        "import sys; from ringspark.estimators import TorchClassificationModel as M\n"
        "sys.modules['executorch'] = None\n"
        "M.load(sys.argv[1]).export(sys.argv[2], format='executorch')"
    )
    stage.save(str(tmp_path / "stage"))
    command = [sys.executable, "-c", code, str(tmp_path / "stage"), str(tmp_path / "x.pte")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "needs executorch; pip install 'ringspark[executorch]'" in done.stderr
