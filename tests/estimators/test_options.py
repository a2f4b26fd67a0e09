"""Each setting's options are one frozen dataclass, and earlier forms of a setting still work."""

import inspect
import json
from dataclasses import fields
from typing import Any

import pytest
from small_networks import linear

from ringspark.estimators import (
    AllReduce,
    DiLoCo,
    Hogwild,
    LoRA,
    Mesh,
    Pipeline,
    Pretrained,
    Privacy,
    ScaleLearningRate,
    TopK,
    TorchRegressor,
    Zero,
)
from ringspark.estimators.options.compression import Compression
from ringspark.estimators.options.sync import Sync
from ringspark.estimators.stages.to_config import config_of
from ringspark.estimators.training.settings.config import TrainConfig

# The plain form of a setting, and its options.
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"sync": {"name": "AllReduce", "compression": "TopK"}}, {"sync": AllReduce(compression=TopK())}),
    ({"sync": {"name": "DiLoCo", "steps": 8, "outerRate": 0.5}}, {"sync": DiLoCo(steps=8, outer_rate=0.5)}),
    (
        {"parallelism": {"pipeline": {"stages": 2, "schedule": "gpipe", "sequence_chunks": 2}}},
        {"parallelism": Mesh(pipeline=Pipeline(2, schedule="gpipe", sequence_chunks=2))},
    ),
    (
        {"parallelism": {"tensor": 2, "sequence_parallel": True}},
        {"parallelism": Mesh(tensor=2, sequence_parallel=True)},
    ),
    (
        {"scaleLearningRate": {"rule": "sqrt", "baseBatchSize": 4, "warmupEpochs": 0.5}},
        {"scaleLearningRate": ScaleLearningRate(base_batch_size=4, rule="sqrt", warmup_epochs=0.5)},
    ),
    ({"lora": {"rank": 2, "targets": "*"}}, {"lora": LoRA(rank=2, targets=("*",))}),
    ({"gradientCheckpointing": ("trunk.0",)}, {"gradientCheckpointing": ["trunk.0"]}),
    ({"pretrained": "/some/folder"}, {"pretrained": Pretrained(uri="/some/folder")}),
]


def _config(**settings: Any) -> TrainConfig:
    workers = 1 if {"lora", "pretrained", "scaleLearningRate"} & settings.keys() else 2
    stage = TorchRegressor(model=linear(), numWorkers=workers, epochs=2, **settings)
    return config_of(stage, "regression", ["y"])[0]


@pytest.mark.parametrize(("plain", "present"), FORMS)
def test_both_forms_of_a_setting_give_the_same_config(plain, present):
    config = _config(**present)
    assert _config(**plain) == config != _config()
    assert TrainConfig.from_json(config.to_json()) == config


KINDS = (Sync, Compression, Mesh, Pipeline, LoRA, Pretrained, Privacy, ScaleLearningRate)
REQUIRED: dict[str, dict[str, Any]] = {
    "Zero": {"stage": 3},
    **{name: {"steps": 4} for name in ("LocalSGD", "DiLoCo", "ElasticAveraging")},
    "LoRA": {"rank": 1, "targets": ["*"]},
    "Pretrained": {"uri": "/some/file"},
    "ScaleLearningRate": {"base_batch_size": 2},
    "CpSGD": {"trials": 100, "max_norm": 1.0},
    "Privacy": {"epsilon": 3.0, "delta": 1e-6, "max_grad_norm": 1.0},
}


@pytest.mark.parametrize(
    "kind", [v for k in KINDS for v in list(k.variants().values()) or [k]], ids=lambda kind: kind.__name__
)
def test_every_class_of_options_keeps_the_promises(kind):
    options = kind(**REQUIRED.get(kind.__name__, {}))
    assert kind.of(json.loads(json.dumps(options.to_values()))) == options
    assert eval(repr(options), {kind.__name__: kind}) == options
    words = " ".join(base.__doc__ or "" for base in kind.__mro__)
    assert all(f"        {each.name}: " in words for each in fields(kind))
    with pytest.raises(ValueError, match=f"{kind.__name__} has no option 'unheard_of'"):
        kind.of(options.to_values() | {"unheard_of": 1})
    with pytest.raises(AttributeError):
        options.other = 1


def test_a_signature_has_the_options_and_their_defaults():
    assert str(inspect.signature(LoRA)).startswith("(*, rank: int, targets: tuple[str, ...], alpha:")
    assert inspect.signature(DiLoCo).parameters["outer_rate"].default == 0.7
    assert not inspect.signature(Hogwild).parameters


def test_true_is_no_stage_of_zero():
    with pytest.raises(ValueError, match="Zero's stage must be 1, 2 or 3, got True"):
        Zero(stage=True)


@pytest.mark.spark
@pytest.mark.usefixtures("spark_saves")
@pytest.mark.parametrize(("plain", "present"), FORMS)
def test_a_saved_stage_keeps_its_options(tmp_path, plain, present):
    stage = TorchRegressor(model=linear(), **plain)
    stage.save(str(tmp_path / "stage"))
    loaded = TorchRegressor.load(str(tmp_path / "stage"))
    ((name, _),) = present.items()
    assert loaded.getOrDefault(name) == stage.getOrDefault(name)
