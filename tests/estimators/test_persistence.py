"""Saving and loading stages: the written files, and the state after a failure."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from pyspark.ml import Pipeline
from pyspark.ml.feature import VectorAssembler
from ready_models import ready_model
from safetensors.torch import load_file
from small_networks import Net, linear
from spark_tables import values_of
from torch import nn

from ringspark.estimators import TorchEstimator, TorchRegressionModel
from ringspark.estimators.stages.held_weights import HeldWeights
from ringspark.estimators.stages.persistence import DESCRIPTION
from ringspark.estimators.stages.spark_metadata import METADATA
from ringspark.estimators.training.checkpoint import tensor_file
from ringspark.estimators.training.checkpoint.folders import checkpoints_uri, step_uri
from ringspark.estimators.training.checkpoint.snapshot import AVERAGE, OPTIMIZER, RANKS, RECORD
from ringspark.estimators.training.checkpoint.weights import (
    ADAPTER,
    COMMIT,
    WEIGHTS,
    map_checkpoint,
    save_checkpoint,
)
from ringspark.models import ModelSpec
from ringspark.models.meta_device import find_changed_buffers, unsaved_buffers
from ringspark.pipelines import storage

pytestmark = pytest.mark.spark

LINE = linear()
REPLACED = "now has the weights of another model; load the model again"
MEMORY = "memory://ringspark-test"


@pytest.fixture
def pairs(spark):
    rows = [(i, float(i), float(-i)) for i in range(4)]
    frame = spark.createDataFrame(rows, "id long, a double, b double")
    return VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)


def make(folder: Path, network: ModelSpec | nn.Module = LINE, seed: int = 0) -> TorchRegressionModel:
    return ready_model(TorchRegressionModel, network, folder, seed=seed)


def broken(folder: Path, missing: str, seed: int = 0) -> TorchRegressionModel:
    """Returns a model on a store that cannot keep a file open; one of its files is removed."""
    model = make(folder, seed=seed)
    model._weights = HeldWeights(str(folder))
    os.remove(folder / missing)
    return model


def predictions(model: Any, frame: Any) -> list[float]:
    return values_of(model.transform(frame))


def test_a_model_may_be_saved_over_its_own_folder(pairs, tmp_path):
    path = str(tmp_path / "model")
    model = make(tmp_path / "c")
    expected = predictions(model, pairs)
    model.save(path)
    loaded = TorchRegressionModel.load(path)
    loaded.setPredictionCol("guess").write().overwrite().save(path)
    again = TorchRegressionModel.load(path)
    assert again.getPredictionCol() == "guess"
    assert predictions(again.setPredictionCol("prediction"), pairs) == expected
    assert sorted(os.listdir(tmp_path)) == ["c", "model"]


def test_a_failed_overwrite_leaves_the_old_stage(pairs, tmp_path, spark):
    path = str(tmp_path / "model")
    make(tmp_path / "old", seed=1).save(path)
    expected = predictions(TorchRegressionModel.load(path), pairs)
    with pytest.raises(FileNotFoundError):
        broken(tmp_path / "new", WEIGHTS, seed=2).write().overwrite().save(path)
    assert predictions(TorchRegressionModel.load(path), pairs) == expected
    assert sorted(os.listdir(tmp_path)) == ["model", "new", "old"]


def test_a_failed_save_leaves_nothing_and_an_empty_folder_as_it_was(tmp_path, spark):
    model = broken(tmp_path / "c", WEIGHTS)
    with pytest.raises(FileNotFoundError):
        model.save(str(tmp_path / "model"))
    assert os.listdir(tmp_path) == ["c"]
    (tmp_path / "empty").mkdir(mode=0o750)
    before = (tmp_path / "empty").stat()
    with pytest.raises(FileNotFoundError):
        model.save(str(tmp_path / "empty"))
    assert os.listdir(tmp_path / "empty") == []
    after = (tmp_path / "empty").stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


def test_weights_that_are_gone_are_told_before_anything_is_written(tmp_path, spark):
    model = broken(tmp_path / "c", COMMIT)
    with pytest.raises(ValueError, match=r"which is gone; .* to another folder"):
        model.save(str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def test_a_stage_that_was_saved_with_its_training_state_is_overwritten(tmp_path, spark):
    path = tmp_path / "model"
    make(tmp_path / "old", seed=1).save(str(path))
    step = Path(step_uri(checkpoints_uri(str(path)), 7))
    step.mkdir(parents=True)
    shards = ["model-00001-of-00002.5f0e.safetensors", "part-00001-of-00002.5f0e.json"]
    for name in (WEIGHTS, COMMIT, RANKS, RECORD, OPTIMIZER, AVERAGE, *shards):
        (step / name).write_bytes(b"x")
    make(tmp_path / "new", seed=2).write().overwrite().save(str(path))
    assert not step.exists()


def test_a_setting_of_another_version_is_not_reported_as_damage(tmp_path, spark):
    make(tmp_path / "c").save(str(tmp_path / "model"))
    (file,) = (tmp_path / "model" / METADATA).glob("part-*")
    text = json.loads(file.read_text())
    text["paramMap"]["localSteps"] = 4
    file.write_text(json.dumps(text))
    (tmp_path / "model" / METADATA / f".{file.name}.crc").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"setting 'localSteps', which .* does not have in this version"):
        TorchRegressionModel.load(str(tmp_path / "model"))


def test_overwrite_takes_no_folder_that_has_metadata_of_something_else(tmp_path, spark):
    for name in ("data/x.parquet", "metadata/v1.metadata.json", "other/metadata/part-00000"):
        file = tmp_path / "table" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("[]")
    model = make(tmp_path / "c")
    for folder in ("table", "table/other"):
        with pytest.raises(ValueError, match="holds something else than a saved stage"):
            model.write().overwrite().save(str(tmp_path / folder))
    assert (tmp_path / "table" / "data" / "x.parquet").exists()
    # Spark's own stages are valid stages too.
    VectorAssembler(inputCols=["a"], outputCol="b").save(str(tmp_path / "assembler"))
    model.write().overwrite().save(str(tmp_path / "assembler"))
    assert TorchRegressionModel.load(str(tmp_path / "assembler")).uid == model.uid


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_noticed(tmp_path, monkeypatch):
    """Another checkpoint replaces the folder after the record is read and before the tensors are mapped."""
    uri, module = str(tmp_path / "c"), nn.Linear(2, 1)
    info = save_checkpoint(uri, module)
    read = tensor_file.read

    def replace_first(path: str, device: str) -> Any:
        save_checkpoint(uri, nn.Linear(2, 1))
        return read(path, device)

    before = module.weight.clone()
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "read", replace_first)
        with pytest.raises(ValueError, match=REPLACED):
            map_checkpoint(uri, module, expected_id=info.checkpoint_id)
    assert module.weight.equal(before)
    with pytest.raises(ValueError, match=REPLACED):
        map_checkpoint(uri, module, expected_id=info.checkpoint_id)


def test_a_copy_that_fails_at_the_adapter_is_no_checkpoint(tmp_path):
    uri, target = tmp_path / "c", tmp_path / "copy"
    save_checkpoint(str(uri), nn.Linear(2, 1))
    (uri / ADAPTER).write_bytes(b"small matrices")
    held = HeldWeights(str(uri))
    held.hold()
    (target / ADAPTER).mkdir(parents=True)  # a folder here makes the copy fail
    with pytest.raises(IsADirectoryError):
        held.copy_to(str(target))
    assert not (target / COMMIT).exists()


def test_a_pickled_model_takes_no_other_weights(tmp_path):
    """A process that unpickles the model reads the folder, which may hold another model by then."""
    uri, module, other = str(tmp_path / "c"), nn.Linear(2, 1), nn.Linear(2, 1)
    save_checkpoint(uri, module)
    held = HeldWeights(uri)
    held.hold()
    there = pickle.loads(pickle.dumps(held))
    there.map_into(other)
    assert other.weight.equal(module.weight)
    save_checkpoint(uri, nn.Linear(2, 1))
    for use in (lambda: there.map_into(other), there.adapter, lambda: there.copy_to(str(tmp_path / "d"))):
        with pytest.raises(ValueError, match=REPLACED):
            use()


def test_a_folder_that_was_replaced_by_another_model_is_noticed(pairs, tmp_path):
    path = str(tmp_path / "model")
    make(tmp_path / "one", seed=1).save(path)
    first = TorchRegressionModel.load(path)
    lazy = first.transform(pairs)
    make(tmp_path / "two", seed=2).write().overwrite().save(path)
    for use in (lambda: first.transform(pairs), lazy.collect):
        with pytest.raises(Exception, match=REPLACED):
            use()
    # The loaded weights are still open, so the model can be saved elsewhere.
    first.save(str(tmp_path / "kept"))
    kept = (tmp_path / "kept" / "weights" / WEIGHTS).read_bytes()
    assert kept == (tmp_path / "one" / WEIGHTS).read_bytes()


@pytest.mark.telling
@pytest.mark.extras
def test_a_users_module_is_saved_with_its_weights_once(pairs, tmp_path, monkeypatch):
    ballast = nn.Parameter(torch.zeros(1 << 17))
    big = Net(lambda self, x: self.line(x), line=nn.Linear(2, 1), ballast=ballast)
    model, path = make(tmp_path / "c", big), tmp_path / "model"
    with pytest.warns(UserWarning, match="the types of its inputs are not known"):
        model.save(str(path))
    assert (path / "objects.pkl").stat().st_size < 20_000
    monkeypatch.setenv("RINGSPARK_ALLOW_PICKLE", "1")
    loaded = TorchRegressionModel.load(str(path))
    assert predictions(loaded, pairs) == predictions(model, pairs)
    again = tmp_path / "again"
    with pytest.warns(UserWarning, match="the types of its inputs are not known"):
        loaded.save(str(again))
    assert predictions(TorchRegressionModel.load(str(again)), pairs) == predictions(model, pairs)


def test_an_estimator_pickles_only_what_is_python(tmp_path, spark, monkeypatch):
    def schedule(step: int, num_steps: int) -> float:
        return 1 - step / num_steps

    estimator = TorchEstimator(model=LINE, lrSchedule=schedule, epochs=3)
    path = tmp_path / "estimator"
    estimator.save(str(path))
    assert list(cloudpickle.loads((path / "objects.pkl").read_bytes())) == ["lrSchedule"]
    refusal = r"pickled Python code for \['lrSchedule'\].*RINGSPARK_ALLOW_PICKLE=1"
    with pytest.raises(ValueError, match=refusal):
        TorchEstimator.load(str(path))
    monkeypatch.setenv("RINGSPARK_ALLOW_PICKLE", "1")
    Pipeline(stages=[estimator]).save(str(tmp_path / "pipeline"))
    loaded = Pipeline.load(str(tmp_path / "pipeline")).getStages()[0]
    assert loaded.getLrSchedule()(1, 4) == 0.75
    assert loaded.getEpochs() == 3
    assert loaded.getModel() == LINE


def test_a_default_of_the_machine_is_no_choice_of_the_saved_stage(tmp_path):
    """A stage saved on a machine with Horovod and Petastorm loads on a machine without them."""
    path = str(tmp_path / "stage")
    TorchEstimator(model=LINE, reader="arrow").save(path)
    (part,) = (tmp_path / "stage" / METADATA).glob("part-*")
    metadata = json.loads(part.read_text())
    assert not {"collective", "reader"} & set(metadata["defaultParamMap"])
    loaded = TorchEstimator.load(path)
    assert loaded.getCollective() == TorchEstimator().getCollective()
    assert (loaded.getReader(), loaded.isSet("collective"), loaded.isSet("reader")) == ("arrow", False, True)


@pytest.mark.parametrize(
    ("stage", "module", "packages", "told"),
    [
        ("stage", "stage.weights.net", [], "stage is a namespace package"),
        ("stage", "stage.net", ["stage"], "lies in '.*stage', next to the weights"),
        ("pipe/stages/0", "pipe.net", ["pipe"], "the package pipe contains the folder"),
        ("stage", "net", [], None),
    ],
)
def test_a_class_that_the_stage_holds_is_not_imported(tmp_path, monkeypatch, stage, module, packages, told):
    make(tmp_path / "c").save(str(tmp_path / stage))
    file = tmp_path / f"{module.replace('.', '/')}.py"
    file.write_text(f"import pathlib\nimport torch\npathlib.Path({str(tmp_path)!r}, 'ran').touch()\n"
                    "class Net(torch.nn.Linear): pass\n")  # fmt: skip
    for package in packages:
        (tmp_path / package / "__init__.py").touch()
    description = tmp_path / stage / DESCRIPTION
    network = {"target": f"{module}:Net", "kwargs": {}}

    def describe(spec):
        given = json.loads(description.read_text()) | {"model": json.dumps(spec)}
        description.write_text(json.dumps(given))

    describe(network)
    monkeypatch.syspath_prepend(str(tmp_path))
    if told is None:
        assert TorchRegressionModel.load(str(tmp_path / stage)).getModel().target == "net:Net"
    else:
        with pytest.raises(ValueError, match=f"is not imported: .*{told}.* set RINGSPARK_ALLOW_PICKLE=1"):
            TorchRegressionModel.load(str(tmp_path / stage)).module()
        describe({"target": "torch.nn:Sequential", "kwargs": {"network": network}})
        with pytest.raises(ValueError, match=f"is not imported: .*{told}"):
            TorchRegressionModel.load(str(tmp_path / stage))
        describe(network)
        monkeypatch.setenv("RINGSPARK_ALLOW_PICKLE", "1")
        assert TorchRegressionModel.load(str(tmp_path / stage)).getModel().target == f"{module}:Net"
    assert not (tmp_path / "ran").exists()


def test_a_model_survives_a_store_that_is_no_disk(pairs, tmp_path):
    """Saves to an object store, overwrites itself there, loads from there, and saves to a disk."""
    store, uri = storage.filesystem("memory://")[0], f"{MEMORY}/model"
    model = make(tmp_path / "c")
    expected = predictions(model, pairs)
    try:
        model.save(uri)
        assert {path.rsplit("/", 1)[-1] for path in store.find("/ringspark-test/model")} == {
            *("part-00000", "_SUCCESS", DESCRIPTION, WEIGHTS, COMMIT)
        }
        shutil.rmtree(tmp_path / "c")
        # No executor can read this store, so the test predicts with the copy on disk.
        loaded = TorchRegressionModel.load(uri)
        loaded.setPredictionCol("guess").write().overwrite().save(uri)
        again = TorchRegressionModel.load(uri)
        assert again.getPredictionCol() == "guess"
        again.setPredictionCol("prediction").save(str(tmp_path / "model"))
        storage.remove(uri, recursive=True)
        with pytest.raises(ValueError, match="which is gone"):
            again.save(str(tmp_path / "another"))
    finally:
        storage.remove(MEMORY, recursive=True)
    assert predictions(TorchRegressionModel.load(str(tmp_path / "model")), pairs) == expected


def test_an_overwrite_that_a_store_breaks_off_leaves_the_new_stage_whole(tmp_path, monkeypatch):
    store, uri = storage.filesystem("memory://")[0], f"{MEMORY}/model"
    model = make(tmp_path / "c")
    try:
        model.save(uri)
        copy = store.copy

        def broken(source: str, target: str, **options: Any) -> None:
            if "weights" not in source and target.endswith("model"):
                raise OSError("the store is away")
            copy(source, target, **options)

        with monkeypatch.context() as patch:
            patch.setattr(type(store), "copy", lambda self, *args, **options: broken(*args, **options))
            refusal = r"the new stage is whole in (\S+): load it from there"
            with pytest.raises(OSError, match=refusal) as caught:
                model.write().overwrite().save(uri)
        kept = str(caught.value).split(" is whole in ")[1].split(": load")[0]
        again = TorchRegressionModel.load(kept)
        for a, b in zip(again.module().parameters(), model.module().parameters(), strict=True):
            assert a.equal(b)
    finally:
        storage.remove(MEMORY, recursive=True)


def test_an_overwrite_that_a_disk_refuses_leaves_the_old_stage_alone(tmp_path, monkeypatch):
    model = make(tmp_path / "c")
    model.save(str(tmp_path / "out" / "model"))

    def refused(source: str, target: str) -> None:
        raise PermissionError("no renames here")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refused)
        with pytest.raises(PermissionError):
            model.write().overwrite().save(str(tmp_path / "out" / "model"))
    assert os.listdir(tmp_path / "out") == ["model"]
    TorchRegressionModel.load(str(tmp_path / "out" / "model")).module()


def test_a_checkpoint_is_what_the_safetensors_library_reads(tmp_path):
    state = {
        "odd": torch.arange(3, dtype=torch.int8),
        "wide": torch.randn(2, 3, dtype=torch.float64).t(),
        "half": torch.randn(5).bfloat16(),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "none": torch.zeros(0, 4),
        "complex": torch.randn(2, dtype=torch.complex64),
    }
    with open(tmp_path / "x.safetensors", "wb") as file:
        num_bytes = tensor_file.write(state, file)
    assert (tmp_path / "x.safetensors").stat().st_size == num_bytes
    for found in (load_file(tmp_path / "x.safetensors"), tensor_file.read(tmp_path / "x.safetensors")):
        assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in state.items()}
        assert all(found[name].equal(state[name]) for name in state)


def test_what_a_checkpoint_cannot_hold_is_refused_by_name(tmp_path):
    with open(tmp_path / "x", "wb") as file:
        with pytest.raises(ValueError, match="'sparse' is no dense tensor"):
            tensor_file.write({"sparse": torch.eye(2).to_sparse()}, file)
        with pytest.raises(ValueError, match=r"'z' has dtype torch\.complex128"):
            tensor_file.write({"z": torch.zeros(1, dtype=torch.complex128)}, file)
    refusal = r"'_extra_state' is of type dict, .* rather than in get_extra_state"
    with pytest.raises(ValueError, match=refusal):
        tensor_file.check_state({"weight": torch.zeros(1), "_extra_state": {"k": 1}})
    with pytest.raises(ValueError, match="no readable safetensors file"):
        tensor_file.read(tmp_path / "x")


class Norm(nn.Module):
    """Non-persistent buffers: numbers, NaN, and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.register_buffer("gap", torch.tensor([float("nan"), 1.0]), persistent=False)
        self.register_buffer("later", None, persistent=False)
        self.register_buffer("kept", torch.zeros(1))


def test_state_that_no_checkpoint_holds_is_named_when_it_has_changed():
    module = nn.Sequential(Norm(), Norm())
    start = unsaved_buffers(module)
    with torch.no_grad():
        for tensor in [*module.parameters(), module[0].kept]:
            tensor.add_(1)
    assert find_changed_buffers(start, unsaved_buffers(module)) == []
    module[0].mean.add_(1)
    module[1].later = torch.zeros(1)
    module[1].gap = torch.zeros(3)
    assert find_changed_buffers(start, unsaved_buffers(module)) == ["0.mean", "1.gap", "1.later"]
