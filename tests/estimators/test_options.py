"""Each setting's options are one frozen dataclass, and earlier forms of a setting still work."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from typing import Any

import pytest
from pyspark.ml.tuning import ParamGridBuilder

from ringspark.estimators import (
    AllReduce,
    DiLoCo,
    ElasticAveraging,
    Hogwild,
    LocalSGD,
    LoRA,
    Mesh,
    ParameterServer,
    Pipeline,
    PowerSGD,
    Pretrained,
    Privacy,
    ScaleLearningRate,
    TorchRegressor,
    Uncompressed,
    Zero,
)
from ringspark.estimators.options.base import Options
from ringspark.estimators.options.compression import Compression
from ringspark.estimators.options.sync import EARLIER, Sync, read_earlier, write_earlier
from ringspark.estimators.run.identity import list_differences
from ringspark.estimators.stages.to_config import config_of
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.models import ModelSpec

MODEL = ModelSpec("linear", {"in_features": 1, "out_features": 1})
# The earlier form of a setting, and its present form.
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"sharding": "gradients"}, {"sync": Zero(stage=2)}),
    ({"gradientCompression": "topk"}, {"sync": {"name": "AllReduce", "compression": "TopK"}}),
    (
        {"gradientCompression": {"name": "powersgd", "rank": 4}},
        {"sync": AllReduce(compression=PowerSGD(rank=4))},
    ),
    (
        {"gradientCompression": {"name": "none", "between": "hosts"}},
        {"sync": AllReduce(compression=Uncompressed(between="hosts"))},
    ),
    ({"localSteps": 4}, {"sync": LocalSGD(steps=4)}),
    (
        {"localSteps": {"name": "diloco", "steps": 8, "outerRate": 0.5}},
        {"sync": {"name": "DiLoCo", "steps": 8, "outer_rate": 0.5}},
    ),
    ({"localSteps": {"name": "elastic", "steps": 3}}, {"sync": ElasticAveraging(steps=3)}),
    ({"consistency": {"name": "ssp", "staleness": 3}}, {"sync": ParameterServer(staleness=3)}),
    ({"consistency": "hogwild"}, {"sync": Hogwild()}),
    (
        {"parallelism": {"pipeline": 2, "schedule": "gpipe", "time_chunks": 2}},
        {"parallelism": Mesh(pipeline=Pipeline(2, schedule="gpipe", sequence_chunks=2))},
    ),
    (
        {"parallelism": {"tensor": 2, "between": "parts"}},
        {"parallelism": Mesh(tensor=2, sequence_parallel=True)},
    ),
    (
        {"scaleLearningRate": {"name": "sqrt", "baseBatchSize": 4, "warmupEpochs": 0.5}},
        {"scaleLearningRate": ScaleLearningRate(base_batch_size=4, rule="sqrt", warmup_epochs=0.5)},
    ),
    ({"lora": {"rank": 2, "targets": "*"}}, {"lora": LoRA(rank=2, targets=("*",))}),
    ({"pretrained": "/some/folder"}, {"pretrained": Pretrained(uri="/some/folder")}),
]
# The stored defaults of these settings in a run of an earlier version.
STORED = {
    "sharding": "none",
    "gradient_compression": {"name": "none"},
    "local_steps": 1,
    "consistency": {"name": "bsp"},
    "scale_learning_rate": {"name": "none"},
}


def _config(**settings: Any) -> TrainConfig:
    workers = 1 if {"lora", "pretrained", "scaleLearningRate"} & settings.keys() else 2
    stage = TorchRegressor(model=MODEL, numWorkers=workers, epochs=2, **settings)
    return config_of(stage, "regression", ["y"])[0]


@pytest.mark.parametrize(("earlier", "present"), FORMS)
def test_both_forms_of_a_setting_give_the_same_config(earlier: Any, present: Any) -> None:
    config = _config(**present)
    assert _config(**earlier) == config != _config()
    assert TrainConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(("earlier", "present"), FORMS)
def test_a_stored_config_of_an_earlier_version_is_read(earlier: Any, present: Any) -> None:
    stored = json.loads(_config(**present).to_json())
    ((name, value),) = earlier.items()
    del stored["sync"]
    stored |= STORED | {EARLIER[name].field if name in EARLIER else SETTINGS[name].field: value}
    if name == "pretrained":
        stored["pretrained"] = {"uri": value, "ignore": [], "strict": True}
    assert TrainConfig.from_json(json.dumps(stored)) == _config(**present)


def test_the_identity_of_an_earlier_run_is_that_of_the_same_settings_today() -> None:
    common = {"epochs": 2, "lora": None}
    now = common | {
        "sync": DiLoCo(steps=8, outer_rate=0.5).to_values(),
        "scaleLearningRate": ScaleLearningRate(base_batch_size=4, rule="sqrt").to_values(),
    }
    then = common | {
        "sharding": "none",
        "gradientCompression": {"name": "none"},
        "consistency": {"name": "bsp"},
        "localSteps": {"name": "diloco", "steps": 8, "after": 0, "outerRate": 0.5, "outerMomentum": 0.9}
        | {"send": "fp32", "fragments": 1, "delay": 0, "alpha": 0.0},
        "scaleLearningRate": {"name": "sqrt", "baseBatchSize": 4, "warmupEpochs": 0.0},
    }
    assert list_differences({"settings": then}, {"settings": now}) == []
    then["localSteps"] = 1
    (changed,) = list_differences({"settings": then}, {"settings": now})
    assert changed.startswith("sync: ")


def test_a_run_of_a_version_without_a_setting_had_its_default() -> None:
    then = {"epochs": 2}
    assert list_differences({"settings": then}, {"settings": then | {"alpha": 0.5, "temperature": 2.0}}) == []
    (changed,) = list_differences({"settings": then}, {"settings": then | {"alpha": 0.25}})
    assert changed == "alpha: 0.5 -> 0.25"


def _variants(kind: type[Options]) -> list[type[Options]]:
    return list(kind.variants().values()) or [kind]


REQUIRED: dict[str, dict[str, Any]] = {
    "Zero": {"stage": 3},
    "LocalSGD": {"steps": 4},
    "DiLoCo": {"steps": 4},
    "ElasticAveraging": {"steps": 4},
    "LoRA": {"rank": 1, "targets": ["*"]},
    "Pretrained": {"uri": "/some/file"},
    "ScaleLearningRate": {"base_batch_size": 2},
    "CpSGD": {"trials": 100, "max_norm": 1.0},
    "Privacy": {"epsilon": 3.0, "delta": 1e-6, "max_grad_norm": 1.0},
}


@pytest.mark.parametrize(
    "kind",
    [
        v
        for k in (Sync, Compression, Mesh, Pipeline, LoRA, Pretrained, Privacy, ScaleLearningRate)
        for v in _variants(k)
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_class_of_options_keeps_the_promises(kind: type[Options]) -> None:
    options = kind(**REQUIRED.get(kind.__name__, {}))
    assert kind.of(json.loads(json.dumps(options.to_values()))) == options
    assert eval(repr(options), {kind.__name__: kind}) == options
    words = " ".join(base.__doc__ or "" for base in kind.__mro__)
    assert all(f"        {each.name}: " in words for each in fields(kind))
    with pytest.raises(ValueError, match=f"{kind.__name__} takes "):
        kind.of(options.to_values() | {"unheard_of": 1})
    with pytest.raises(AttributeError):
        options.other = 1  # type: ignore[attr-defined]


def test_a_signature_has_the_options_and_their_defaults() -> None:
    assert str(inspect.signature(LoRA)).startswith("(*, rank: 'int', targets: 'tuple[str, ...]', alpha:")
    assert inspect.signature(DiLoCo).parameters["outer_rate"].default == 0.7
    assert not inspect.signature(Hogwild).parameters


def test_a_misspelled_option_names_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r"Mesh takes .*, got 'tensors'; did you mean 'tensor'"):
        Mesh(tensors=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(("earlier", "present"), FORMS[:9])
def test_an_earlier_setting_and_sync_answer_for_each_other(earlier: Any, present: Any) -> None:
    one, other = TorchRegressor(**earlier), TorchRegressor(**present)
    assert one.getSync() == other.getSync()
    ((name, _),) = earlier.items()
    getter = f"get{name[0].upper()}{name[1:]}"
    assert getattr(one, getter)() == getattr(other, getter)() != EARLIER[name].default
    assert write_earlier(AllReduce(), read_earlier(one.getSync())) == one.getSync()
    assert {n for n in EARLIER if other.isSet(n)} == {name}
    for stage in (one, other):
        getattr(stage, f"set{getter[3:]}")(None)
        assert (stage.getSync(), stage.isSet(name)) == (AllReduce(), False)


def test_two_settings_of_how_workers_agree_are_refused_in_one_sentence() -> None:
    for given in (
        {"sharding": "gradients", "localSteps": 4},
        {"gradientCompression": "fp16", "consistency": "asp"},
        {"sync": Zero(stage=1), "localSteps": 4},
        {"sync": AllReduce(compression="topk"), "sharding": "optimizer"},
    ):
        with pytest.raises(ValueError, match="sync") as caught:
            TorchRegressor(**given)
        assert "\n" not in str(caught.value)
    # Default values add nothing.
    plain = TorchRegressor(sharding="none", localSteps=1, consistency="bsp", gradientCompression="fp16")
    assert repr(plain.getSync()) == "AllReduce(compression=FP16())"


def test_grids_over_earlier_settings_write_into_sync() -> None:
    stage = TorchRegressor(sharding="optimizer")
    grid = (
        ParamGridBuilder().addGrid(stage.sharding, ["none", "parameters"]).addGrid(stage.seed, [1, 2]).build()
    )
    found = [stage.copy(values).getSync() for values in grid]
    assert sorted(map(repr, found)) == ["AllReduce()"] * 2 + ["Zero(stage=3)"] * 2
    assert stage.copy({stage.sync: {"name": "LocalSGD", "steps": 4}}).getLocalSteps()["steps"] == 4
    assert (stage.getSync(), stage.copy().getSharding()) == (Zero(stage=1), "optimizer")


@pytest.mark.spark
@pytest.mark.usefixtures("spark_saves")
@pytest.mark.parametrize(("earlier", "present"), FORMS)
def test_a_saved_stage_keeps_its_options(tmp_path: Any, earlier: Any, present: Any) -> None:
    stage = TorchRegressor(model=MODEL, **earlier)
    stage.save(str(tmp_path / "stage"))
    loaded = TorchRegressor.load(str(tmp_path / "stage"))
    ((name, _),) = present.items()
    assert loaded.getOrDefault(name) == stage.getOrDefault(name)
    metadata = json.loads((tmp_path / "stage" / "metadata" / "part-00000").read_text())
    assert not EARLIER.keys() & metadata["paramMap"].keys()
    # In the format of an earlier version.
    metadata["paramMap"] = {k: v for k, v in metadata["paramMap"].items() if k != name} | earlier
    (tmp_path / "stage" / "metadata" / "part-00000").write_text(json.dumps(metadata))
    assert TorchRegressor.load(str(tmp_path / "stage")).getOrDefault(name) == stage.getOrDefault(name)
