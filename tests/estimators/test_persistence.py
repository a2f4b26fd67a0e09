"""Saving and loading stages: the written files, and the state after a failure."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from torch import nn

from ringspark.estimators import TorchClassificationModel, TorchEstimator, TorchRegressionModel
from ringspark.estimators.stages.held_weights import HeldWeights
from ringspark.estimators.stages.persistence import DESCRIPTION, FORMAT_VERSION
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

LINE = ModelSpec("linear", {"in_features": 2, "out_features": 1})


@pytest.fixture
def pairs(spark):
    rows = [(i, float(i), float(-i)) for i in range(4)]
    frame = spark.createDataFrame(rows, "id long, a double, b double")
    return VectorAssembler(inputCols=["a", "b"], outputCol="features").transform(frame)


def make(folder: Path, model: ModelSpec | nn.Module = LINE, seed: int = 0) -> TorchRegressionModel:
    """Builds a model from initial weights."""
    torch.manual_seed(seed)
    module = model.build() if isinstance(model, ModelSpec) else model
    save_checkpoint(str(folder), module)
    return TorchRegressionModel(model=model)._set_trained(str(folder), [(1,)], None)


def predictions(model: Any, frame: Any) -> list[float]:
    return [row.prediction for row in model.transform(frame).orderBy("id").collect()]


@pytest.mark.slow
@pytest.mark.modes
def test_a_pipeline_may_be_saved_over_the_folder_it_came_from(pairs, tmp_path):
    """Spark removes the folder before it saves the model's weights."""
    path = str(tmp_path / "pipeline")
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    model = make(tmp_path / "c")
    expected = predictions(model, pairs)
    PipelineModel([assembler, model]).save(path)
    loaded = PipelineModel.load(path)
    loaded.write().overwrite().save(path)
    for pipeline in (loaded, PipelineModel.load(path)):
        assert predictions(pipeline, pairs.drop("features")) == expected


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
    broken = make(tmp_path / "new", seed=2)
    # Imitates a store that cannot keep a file open.
    broken._weights = HeldWeights(str(tmp_path / "new"))
    os.remove(tmp_path / "new" / WEIGHTS)
    with pytest.raises(FileNotFoundError):
        broken.write().overwrite().save(path)
    assert predictions(TorchRegressionModel.load(path), pairs) == expected
    assert sorted(os.listdir(tmp_path)) == ["model", "new", "old"]


def test_a_failed_save_leaves_nothing_and_an_empty_folder_as_it_was(tmp_path, spark):
    broken = make(tmp_path / "c")
    broken._weights = HeldWeights(str(tmp_path / "c"))
    os.remove(tmp_path / "c" / WEIGHTS)
    with pytest.raises(FileNotFoundError):
        broken.save(str(tmp_path / "model"))
    assert os.listdir(tmp_path) == ["c"]
    (tmp_path / "empty").mkdir(mode=0o750)
    before = (tmp_path / "empty").stat()
    with pytest.raises(FileNotFoundError):
        broken.save(str(tmp_path / "empty"))
    assert os.listdir(tmp_path / "empty") == []
    after = (tmp_path / "empty").stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


def test_weights_that_are_gone_are_told_before_anything_is_written(tmp_path, spark):
    model = make(tmp_path / "c")
    model._weights = HeldWeights(str(tmp_path / "c"))
    os.remove(tmp_path / "c" / COMMIT)
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


@pytest.mark.parametrize("name", ["metrics.json", "thesis.pkl", "weights/thesis.bin", "metadata/notes.md"])
def test_overwrite_keeps_a_file_that_somebody_put_into_a_saved_stage(name, tmp_path, spark):
    make(tmp_path / "c").save(str(tmp_path / "model"))
    (tmp_path / "model" / name).write_text("mine")
    with pytest.raises(ValueError, match=f"holds '{name}', which ringspark did not write there"):
        make(tmp_path / "d").write().overwrite().save(str(tmp_path / "model"))
    assert (tmp_path / "model" / name).read_text() == "mine"


def test_a_setting_of_another_version_is_not_reported_as_damage(tmp_path, spark):
    make(tmp_path / "c").save(str(tmp_path / "model"))
    (file,) = (tmp_path / "model" / METADATA).glob("part-*")
    text = json.loads(file.read_text())
    text["paramMap"]["localSteps"] = 4
    file.write_text(json.dumps(text))
    (tmp_path / "model" / METADATA / f".{file.name}.crc").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"setting 'localSteps', which .* does not have in this version"):
        TorchRegressionModel.load(str(tmp_path / "model"))


def test_overwrite_takes_no_folder_of_something_else(tmp_path, spark):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"holds something else than a saved stage \(thesis.tex\)"):
        make(tmp_path / "c").write().overwrite().save(str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


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


def test_a_frame_made_before_the_folder_was_replaced_is_not_computed_with_other_weights(pairs, tmp_path):
    path = str(tmp_path / "model")
    make(tmp_path / "one", seed=1).save(path)
    lazy = TorchRegressionModel.load(path).transform(pairs)
    make(tmp_path / "two", seed=2).write().overwrite().save(path)
    with pytest.raises(Exception, match="now has the weights of another model; load the model again"):
        lazy.collect()


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
        with pytest.raises(ValueError, match="now has the weights of another model"):
            map_checkpoint(uri, module, expected_id=info.checkpoint_id)
    assert module.weight.equal(before)
    with pytest.raises(ValueError, match="now has the weights of another model"):
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
        with pytest.raises(ValueError, match="now has the weights of another model"):
            use()


def test_a_folder_that_was_replaced_by_another_model_is_noticed(pairs, tmp_path):
    path = str(tmp_path / "model")
    make(tmp_path / "one", seed=1).save(path)
    first = TorchRegressionModel.load(path)
    make(tmp_path / "two", seed=2).write().overwrite().save(path)
    with pytest.raises(ValueError, match="now has the weights of another model; load the model again"):
        first.transform(pairs)
    # The loaded weights are still open, so the model can be saved elsewhere.
    first.save(str(tmp_path / "kept"))
    kept = (tmp_path / "kept" / "weights" / WEIGHTS).read_bytes()
    assert kept == (tmp_path / "one" / WEIGHTS).read_bytes()


class Big(nn.Module):
    """Holds half a megabyte that must not be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)
        self.ballast = nn.Parameter(torch.zeros(1 << 17))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)


def test_a_users_module_is_saved_with_its_weights_once(pairs, tmp_path, monkeypatch):
    model = make(tmp_path / "c", Big())
    path = tmp_path / "model"
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
    with pytest.raises(
        ValueError, match=r"pickled Python code for \['lrSchedule'\].*RINGSPARK_ALLOW_PICKLE=1"
    ):
        TorchEstimator.load(str(path))
    monkeypatch.setenv("RINGSPARK_ALLOW_PICKLE", "1")
    loaded = Pipeline.load(_in_pipeline(estimator, tmp_path)).getStages()[0]
    assert loaded.getLrSchedule()(1, 4) == 0.75
    assert loaded.getEpochs() == 3
    assert loaded.getModel() == LINE


def _in_pipeline(stage: Any, tmp_path: Path) -> str:
    path = str(tmp_path / "pipeline")
    Pipeline(stages=[stage]).save(path)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory, spark):
    """A saved model that tests copy and damage."""
    folder = tmp_path_factory.mktemp("saved")
    make(folder / "c").save(str(folder / "model"))
    return folder / "model"


def _describe(folder: Path, **changes: Any) -> None:
    description = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps(description | changes))


DAMAGES = {
    "a newer version": (
        lambda folder: _describe(folder, format_version=FORMAT_VERSION + 1),
        r"cannot be loaded: its format is 3, but this ringspark reads 2; upgrade ringspark",
    ),
    "a version before the first release": (
        lambda folder: _describe(folder, format_version=FORMAT_VERSION - 1),
        r"model cannot be loaded: its format is 1, from before the first release, but this ringspark reads 2",
    ),
    "no JSON": (
        lambda folder: (folder / DESCRIPTION).write_text('{"format_ver'),
        r"model is damaged \(",
    ),
    "another JSON": (lambda folder: (folder / DESCRIPTION).write_text("[1]"), r"model is damaged \("),
    "a missing key": (
        lambda folder: (folder / DESCRIPTION).write_text('{"format_version": 2}'),
        r"model is damaged \(",
    ),
    "no description": (lambda folder: (folder / DESCRIPTION).unlink(), "holds no saved TorchRegressionModel"),
    "no metadata": (
        lambda folder: (folder / "metadata").rename(folder / "elsewhere"),
        "is incomplete .metadata/ is missing",
    ),
    "no weights": (lambda folder: (folder / "weights" / WEIGHTS).unlink(), "holds no model.safetensors"),
    "no checkpoint": (lambda folder: (folder / "weights" / COMMIT).unlink(), "holds no checkpoint"),
    "a damaged checkpoint": (
        lambda folder: (folder / "weights" / COMMIT).write_text("{}"),
        "checkpoint.json is damaged",
    ),
    "short weights": (
        lambda folder: os.truncate(folder / "weights" / WEIGHTS, 10),
        "has 10 bytes, .* were written",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_loaded_is_said_in_one_sentence(saved, tmp_path, damage):
    shutil.copytree(saved, tmp_path / "model")
    apply, message = DAMAGES[damage]
    apply(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        TorchRegressionModel.load(str(tmp_path / "model"))


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
def test_a_network_whose_class_lies_with_the_stage_is_not_imported(
    tmp_path, monkeypatch, stage, module, packages, told
):
    make(tmp_path / "c").save(str(tmp_path / stage))
    file = tmp_path / f"{module.replace('.', '/')}.py"
    file.write_text(f"import pathlib\nimport torch\npathlib.Path({str(tmp_path)!r}, 'ran').touch()\n"
                    "class Net(torch.nn.Linear): pass\n")  # fmt: skip
    for package in packages:
        (tmp_path / package / "__init__.py").touch()
    _describe(tmp_path / stage, model=json.dumps({"target": f"{module}:Net", "kwargs": {}}))
    monkeypatch.syspath_prepend(str(tmp_path))
    if told is None:
        assert TorchRegressionModel.load(str(tmp_path / stage)).getModel().target == "net:Net"
    else:
        with pytest.raises(ValueError, match=f"is not imported: .*{told}.* set RINGSPARK_ALLOW_PICKLE=1"):
            TorchRegressionModel.load(str(tmp_path / stage)).module()
        monkeypatch.setenv("RINGSPARK_ALLOW_PICKLE", "1")
        assert TorchRegressionModel.load(str(tmp_path / stage)).getModel().target == f"{module}:Net"
    assert not (tmp_path / "ran").exists()


def test_another_class_is_named(saved):
    with pytest.raises(ValueError, match=r"holds a .*TorchRegressionModel, not a TorchClassificationModel"):
        TorchClassificationModel.load(str(saved))


def test_a_model_survives_a_store_that_is_no_disk(pairs, tmp_path):
    """Saves to an object store, overwrites itself there, loads from there, and saves to a disk."""
    store, uri = storage.filesystem("memory://")[0], "memory://ringspark-test/model"
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
        storage.remove("memory://ringspark-test", recursive=True)
    assert predictions(TorchRegressionModel.load(str(tmp_path / "model")), pairs) == expected


def test_an_overwrite_that_a_store_breaks_off_leaves_the_new_stage_whole(tmp_path, monkeypatch):
    store, uri = storage.filesystem("memory://")[0], "memory://ringspark-test/model"
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
            with pytest.raises(
                OSError, match=r"the new stage is whole in (\S+): load it from there"
            ) as caught:
                model.write().overwrite().save(uri)
        kept = str(caught.value).split(" is whole in ")[1].split(": load")[0]
        again = TorchRegressionModel.load(kept)
        for a, b in zip(again.module().parameters(), model.module().parameters(), strict=True):
            assert a.equal(b)
    finally:
        storage.remove("memory://ringspark-test", recursive=True)


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
    from safetensors.torch import load_file

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
    with pytest.raises(
        ValueError, match=r"'_extra_state' is of type dict, .* rather than in get_extra_state"
    ):
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
