"""Saved models predict in a new process without the file of their class and environment variables."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from programs import run_program
from pyspark.ml import Pipeline
from ready_models import ready_model
from spark_tables import quiet
from torch import nn

from ringspark.estimators import TorchClassifier, TorchModel
from ringspark.estimators.columns.inputs import ModelInput, model_inputs
from ringspark.estimators.stages.persistence import ALLOW_PICKLE
from ringspark.extras.export.samples import record_module
from ringspark.extras.hugging_face import build, describe
from ringspark.models import ModelSpec
from ringspark.models.program import NoProgramError, Program
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import Array, Padded, Ragged, Scalar
from ringspark.pipelines.kinds.base import BatchArray

FILE = Path(__file__).parents[2] / "support" / "networks_of_a_user.py"
ROWS = (0, 1, 2, 1000)

# Inputs (name -> dtype and row shape) and row shapes of outputs.
FLOATS = {"numbers": ("float32", (4,))}
PICTURES = {"numbers": ("float32", (3, 6, 6))}
IDS = {"ids": ("int64", (5,)), "is_there": ("int64", (5,))}


@dataclass(frozen=True)
class Case:
    make: Callable[[Any], Any]
    inputs: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=lambda: FLOATS)
    outputs: tuple[tuple[int, ...], ...] = ((2,),)


def _tied_layers(own: Any) -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), nn.Sequential(layer, nn.Linear(4, 2).requires_grad_(False)))


def _convolutions(own: Any) -> nn.Module:
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 2))


def _bert(own: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=3, **sizes)
    return BertForSequenceClassification(config)


CASES = {
    "ModelSpec": Case(lambda own: ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 2})),
    "Sequential": Case(lambda own: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))),
    "nested, with a layer in two places": Case(_tied_layers),
    "convolutions in a Sequential": Case(_convolutions, PICTURES),
    "transformers": Case(_bert, IDS, ((3,),)),
    "own convolutions": Case(lambda own: own.Residual(), PICTURES),
    "own transformer encoder": Case(lambda own: own.Encoder(), IDS),
    "own LSTM": Case(lambda own: own.Recurrent(), {"numbers": ("float32", (5, 3))}, ((),)),
    "own embedding and numbers": Case(
        lambda own: own.Table(), {"key": ("int64", ()), "numbers": ("float32", (3,))}
    ),
    "own with two outputs": Case(lambda own: own.Outputs(), outputs=((), (2, 3))),
    "own without layers": Case(lambda own: own.Functional()),
    "own with recomputation": Case(lambda own: own.Recomputed()),
    "own, tied, float64": Case(lambda own: own.Tied(), outputs=((4,),)),
}

# Loads every model, compares its predictions, and prints the largest difference per model.
CHILD = """
import json, sys
import numpy as np
from ringspark.estimators import TorchClassifier, TorchModel, TorchRegressor
from ringspark.estimators.inference.predict import cached_module

worst = {}
for name, (folder, arrays) in json.load(open(sys.argv[1])).items():
    predictor = TorchModel.load(folder)._predictor()
    known = np.load(arrays)
    for rows in ROWS:
        inputs = [known[key] for key in sorted(known) if key.startswith(f"{rows}-input")]
        found = predictor.predict(cached_module(predictor), inputs)
        expected = known[f"{rows}-output"]
        assert found.shape == expected.shape, name
        largest = float(np.abs(found - expected).max(initial=0.0))
        worst[name] = max(worst.get(name, 0.0), largest)
assert "networks_of_a_user" not in sys.modules
print(json.dumps(worst))
"""


@pytest.fixture
def own(tmp_path):
    """Imports the user's file from a folder and then removes the folder."""
    folder = tmp_path / "job"
    folder.mkdir()
    shutil.copy(FILE, folder)
    spec = importlib.util.spec_from_file_location("networks_of_a_user", folder / FILE.name)
    module = sys.modules["networks_of_a_user"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shutil.rmtree(folder)
    yield module
    del sys.modules["networks_of_a_user"]


def _fitted(case: Case, own: Any, folder: Path) -> TorchModel:
    """Builds a model with random statistics of batch normalization."""
    torch.manual_seed(0)
    made = case.make(own)
    for layer in made.modules() if isinstance(made, nn.Module) else ():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.running_mean = torch.randn_like(layer.running_mean)
    columns = [
        Column(name=name, kind=Array(dtype, shape=shape) if shape else Scalar(dtype))
        for name, (dtype, shape) in case.inputs.items()
    ]
    params: dict[str, Any] = {"inputCols": list(case.inputs)}
    if len(case.outputs) > 1:
        params["predictionCols"] = [f"prediction_{i}" for i in range(len(case.outputs))]
    return ready_model(TorchModel, made, folder, case.outputs, columns, **params)


def _inputs(case: Case, rows: int) -> list[np.ndarray]:
    rng = np.random.default_rng(rows)
    return [
        rng.normal(size=(rows, *shape)).astype(dtype) if dtype == "float32" else _ids(rng, rows, shape)
        for dtype, shape in case.inputs.values()
    ]


def _ids(rng: np.random.Generator, rows: int, shape: tuple[int, ...]) -> np.ndarray:
    ids = rng.integers(0, 20, (rows, *shape))
    if shape:
        ids[:, 0] = 1  # Each row of a mask needs at least one token.
    return ids


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != ALLOW_PICKLE}


@pytest.mark.slow
def test_every_kind_of_network_predicts_in_a_new_process(own, tmp_path):
    paths = {}
    for number, (name, case) in enumerate(CASES.items()):
        model = _fitted(case, own, tmp_path / f"checkpoint-{number}")
        folder, arrays = tmp_path / f"model-{number}", tmp_path / f"arrays-{number}.npz"
        model.save(str(folder))
        assert not (folder / "objects.pkl").exists(), name
        known, predictor, module = {}, model._predictor(), model.module()
        for rows in ROWS:
            inputs = _inputs(case, rows)
            known |= {f"{rows}-input-{i}": values for i, values in enumerate(inputs)}
            known[f"{rows}-output"] = predictor.predict(module, inputs)
        np.savez(arrays, **known)
        paths[name] = [str(folder), str(arrays)]
    (tmp_path / "paths.json").write_text(json.dumps(paths))
    code = f"ROWS = {ROWS}\n{CHILD}"
    done = run_program(code, tmp_path / "paths.json", folder=tmp_path, env=_environment())
    worst = json.loads(done.stdout.splitlines()[-1])
    assert worst.keys() == CASES.keys()
    assert max(worst.values()) <= 1e-6, worst


@pytest.mark.slow
@pytest.mark.spark
def test_a_fitted_pipeline_predicts_in_a_new_session(spark, own, tmp_path):
    """A whole run: fit, save a Pipeline, remove the file, start a new Spark, `transform`."""
    frame = spark.range(40).selectExpr(
        "id", "array(id / 40, 1.0, 0.5, 0.0) as numbers", "cast(id % 2 as double) as label"
    )
    estimator = quiet(
        TorchClassifier, tmp_path / "runs", model=own.Recomputed(), featuresCol="numbers", epochs=1
    )
    fitted = Pipeline(stages=[estimator]).fit(frame)
    expected = [list(row.probability) for row in fitted.transform(frame).orderBy("id").collect()]
    fitted.save(str(tmp_path / "pipeline"))
    frame.write.parquet(str(tmp_path / "rows"))
    child = f"""
import json
from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
frame = spark.read.parquet({str(tmp_path / "rows")!r})
model = PipelineModel.load({str(tmp_path / "pipeline")!r})
print(json.dumps([list(row.probability) for row in model.transform(frame).orderBy("id").collect()]))
"""
    environment = {k: v for k, v in _environment().items() if not k.startswith(("SPARK", "PYSPARK_GATEWAY"))}
    done = run_program(child, folder=tmp_path, env=environment)
    np.testing.assert_allclose(json.loads(done.stdout.splitlines()[-1]), expected, rtol=0, atol=1e-6)


def test_what_cannot_be_recorded_is_pickled_with_a_warning(own, tmp_path, monkeypatch):
    model = _fitted(Case(lambda own: own.Branches()), own, tmp_path / "c")
    path = str(tmp_path / "model")
    with pytest.warns(
        UserWarning, match=r"Branches cannot be recorded as a program \(.*RINGSPARK_ALLOW_PICKLE"
    ):
        model.save(path)
    refusal = r"holds pickled Python code for \['model'\].* trained only by its class"
    with pytest.raises(ValueError, match=refusal):
        TorchModel.load(path)
    monkeypatch.setenv(ALLOW_PICKLE, "1")
    assert type(TorchModel.load(path).module()).__name__ == "Branches"


def test_the_class_comes_back_where_pickles_are_allowed(own, tmp_path, monkeypatch):
    model = _fitted(CASES["own with recomputation"], own, tmp_path / "c")
    path, again = tmp_path / "model", tmp_path / "again"
    monkeypatch.setenv(ALLOW_PICKLE, "1")
    model.save(str(path))
    loaded = TorchModel.load(str(path))
    assert type(loaded.module()).__name__ == "Recomputed"
    # This also works after the folder of the loaded weights is removed.
    shutil.rmtree(path / "weights")
    loaded.save(str(again))
    monkeypatch.delenv(ALLOW_PICKLE)
    program = TorchModel.load(str(again)).module()
    assert type(program) is Program
    # State-dict names match the class, so a network of the class can load them and train.
    network = own.Recomputed()
    network.load_state_dict(program.state_dict())
    rows = torch.randn(3, 4)
    assert network(rows).equal(program(rows))


def _edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "model.program.json"
        text = json.loads(file.read_text())
        change(text)
        file.write_text(json.dumps(text))

    return apply


def _first_step(name: str, *arguments: Any) -> Callable[[Path], None]:
    def change(text: dict[str, Any]) -> None:
        text["steps"][0] = [name, list(arguments) or text["steps"][0][1], {}]

    return _edit(change)


def _first_tensor(**changes: Any) -> Callable[[Path], None]:
    return _edit(lambda text: text["tensors"][0].update(changes))


FIRST = {"at": 0}
NOT_ALLOWED = "uses '{}', which is not an allowed operator"
# Operators that open files, skip checks, or write into a tensor.
OPERATORS: dict[str, list[Any]] = {
    "aten.from_file.default": ["/etc/passwd"],
    "aten._sparse_coo_tensor_unsafe.default": [FIRST, FIRST, [4]],
    "aten.add_.Tensor": [FIRST, FIRST],
    "aten.add.out": [FIRST, FIRST],
}


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    **{name: (_first_step(name, *given), NOT_ALLOWED.format(name)) for name, given in OPERATORS.items()},
    "no constants": (lambda folder: (folder / "model.constants.safetensors").unlink(), "or .* is missing"),
    "cut constants": (
        lambda folder: os.truncate(folder / "model.constants.safetensors", 20),
        "model.constants.safetensors: SafetensorError",
    ),
    "half a text": (lambda folder: os.truncate(folder / "model.program.json", 100), "cannot be loaded: "),
    "a later format": (_edit(lambda text: text.update(format_version=2)), "format 2, .*upgrade ringspark"),
    "a sparse tensor": (
        _first_step("aten.zeros.default", [4], None, {"layout": "sparse_coo"}),
        "the layout torch.sparse_coo, which is not allowed",
    ),
    "a sparse tensor by a number": (
        _first_step("aten.zeros.default", [4], None, 1),
        "the layout 1, which is not allowed",
    ),
    "a quantized tensor": (_first_tensor(dtype="qint8"), "torch has no dtype 'qint8'"),
    "no operator at all": (_first_step("aten.__class__.mro"), "'aten.__class__.mro'|does not fit torch"),
    "an entry that is not there yet": (
        _first_step("aten.relu.default", {"at": 99}),
        "uses value 99, which does not exist",
    ),
    "a dtype that is none": (_first_tensor(dtype="hub"), "torch has no dtype 'hub'"),
    "other weights": (_first_tensor(shape=[9, 9]), "is not of this model"),
}


def test_a_damaged_program_is_refused_in_one_sentence(own, tmp_path):
    _fitted(CASES["own without layers"], own, tmp_path / "c").save(str(tmp_path / "model"))
    for name, (damage, message) in DAMAGES.items():
        folder = tmp_path / "damaged" / name
        shutil.copytree(tmp_path / "model", folder)
        damage(folder)
        with pytest.raises(ValueError, match=message) as caught:
            TorchModel.load(str(folder)).module()
        assert "\n" not in str(caught.value), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transformers": "pipeline"}, "has no network 'pipeline'; use the version"),
        ({"transformers": "os.system"}, "has no network 'os.system'; use the version"),
        ({"attention": "somebody/kernels"}, "attention of Bert.* must be one of .*, got 'somebody/kernels'"),
        ({"config": {"auto_map": {"AutoModel": "x"}}}, "names 'auto_map', which may fetch code or weights"),
        ({"config": {"model_args": {"depth": 3}}}, "names 'model_args', which may fetch code"),
        ({"transformers": "TimmWrapperModel"}, "TimmWrapperModel builds its network by timm, which may"),
        ({"transformers": "TimmBackbone"}, "TimmBackbone builds its network by timm, which may"),
        ({"config": {"hidden_size": 3}}, "the config of Bert.* does not fit transformers"),
    ],
)
def test_a_description_of_transformers_builds_nothing_else(change, message):
    description = describe(_bert(None))
    with pytest.raises(ValueError, match=message):
        build(description | change)


def test_a_network_of_transformers_that_was_changed_has_no_description():
    network: Any = _bert(None)
    network.dropout.p = 0.5
    assert describe(network) is None
    network = _bert(None)
    # Lists change the computation too: a layer norm's shape sets the dimensions of its mean.
    network.bert.encoder.layer[0].output.LayerNorm.normalized_shape = (3,)
    assert describe(network) is None


def test_a_network_of_from_pretrained_is_described_as_it_was(tmp_path):
    network: Any = _bert(None)
    network.save_pretrained(tmp_path)
    loaded = type(network).from_pretrained(tmp_path).eval()
    description = describe(loaded)
    again = build(description).eval()
    again.load_state_dict(loaded.state_dict())
    ids = torch.tensor([[1, 2, 3]])
    assert torch.allclose(again(ids).logits, loaded(ids).logits, atol=1e-6)


def test_a_tie_or_a_method_that_was_changed_by_hand_is_no_description():
    from transformers import GPT2Config, GPT2LMHeadModel

    network: Any = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    assert describe(network) is not None
    network.lm_head.weight = nn.Parameter(torch.zeros(20, 8))
    assert describe(network) is None
    network = _bert(None)
    network.bert.pooler.forward = MethodType(lambda pooler, hidden: hidden[:, 1], network.bert.pooler)
    assert describe(network) is None


def test_an_lstm_and_bags_do_not_read_past_their_tensors(own):
    bags = record_module(own.Bags(), model_inputs([Column(name="words", kind=Ragged("int64"))], ["words"]))
    with pytest.raises(ValueError, match="offsets of an EmbeddingBag must rise"):
        bags(torch.tensor([1, 2, 3]), torch.tensor([0, 1 << 40, 2]))
    steps = [Column(name="steps", kind=Array("float32", shape=(5, 3)))]
    text = record_module(own.Recurrent(), model_inputs(steps, ["steps"])).text
    for tensor in text["tensors"]:
        if tensor["name"] == "lstm.weight_hh_l1":
            tensor["shape"] = [1, 6]
    program = Program(text).to_empty(device="cpu")
    with pytest.raises(ValueError, match="an LSTM whose weights do not fit"):
        program(torch.zeros(2, 5, 3))


def test_writes_of_a_network_are_recorded_without_writes(own):
    network = own.Writes().eval()
    image = [Column(name="image", kind=Array("float32", shape=(3, 6, 6)))]
    program = record_module(network, model_inputs(image, ["image"]))
    rows = torch.randn(3, 3, 6, 6)
    kept = rows.clone()
    torch.testing.assert_close(program(rows), network(rows.clone()))
    assert rows.equal(kept)


@dataclass(frozen=True)
class AsLongAsTheLongest(Padded):
    """Takes ids and a mask whose length varies between batches."""

    def arrays(self, name: str) -> dict[str, BatchArray]:
        return {
            f"{name}.ids": BatchArray("int64", (32,), varies=True),
            f"{name}.mask": BatchArray("bool", (32,), varies=True),
        }


def test_rows_and_batches_of_varying_length_are_recorded(own):
    bags, texts = own.Bags().eval(), own.Texts().eval()
    program = record_module(bags, model_inputs([Column(name="words", kind=Ragged("int64"))], ["words"]))
    for values, offsets in (([], [0]), ([3], [0]), ([1, 2, 3, 4], [0, 0, 3])):
        inputs = torch.tensor(values, dtype=torch.int64), torch.tensor(offsets)
        assert program(*inputs).equal(bags(*inputs))
    column = Column(name="text", kind=AsLongAsTheLongest(dtype="int64", length=32))
    program = record_module(texts, [ModelInput(column=column, part=part) for part in (".ids", ".mask")])
    for rows, length in ((1, 1), (1, 32), (7, 3)):
        ids = torch.randint(0, 20, (rows, length))
        mask = torch.ones(rows, length)
        assert program(ids, mask).equal(texts(ids, mask))


def test_a_branch_on_the_length_is_no_program():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 2)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            means = (self.table(ids) * mask[:, :, None]).mean(1)
            return 2 * means if 9 <= ids.shape[1] <= 20 else means

    column = Column(name="text", kind=AsLongAsTheLongest(dtype="int64", length=32))
    inputs = [ModelInput(column=column, part=part) for part in (".ids", ".mask")]
    with pytest.raises(NoProgramError, match="different results for 2 rows of length 9"):
        record_module(Branching().eval(), inputs)
