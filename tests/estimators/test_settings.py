"""Each setting is declared once; stages, config and command lines use its message and default."""

from dataclasses import fields
from typing import Any

import pytest
from small_networks import linear
from torch.optim import SGD

from ringspark.estimators import (
    AllReduce,
    LocalSGD,
    ParameterServer,
    TorchClassifier,
    TorchEstimator,
    TorchRegressor,
    Zero,
)
from ringspark.estimators.collectives import COLLECTIVES
from ringspark.estimators.stages.to_config import config_of, settings_without_effect
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.pipelines import READERS

STAGES = (TorchEstimator, TorchClassifier, TorchRegressor)
# An invalid value for each type of setting.
MISTAKES: dict[Any, Any] = {int: -1, float: -1.0, str: "nonsense"}


def _config(**changes: Any) -> TrainConfig:
    required = {"shards_uri": "s", "run_uri": "r", "input_columns": ("x",), "label_columns": ("y",)}
    return TrainConfig(**(required | changes))


def test_the_stages_have_every_declared_setting_and_no_other():
    found = {param.name: param.doc for kind in STAGES for param in kind().params}
    declared = {name: setting.words for name, setting in SETTINGS.items()}
    assert found == declared


def test_a_gang_on_gpus_sums_by_torch_unless_told_otherwise():
    """torch includes NCCL, while a Horovod build may lack it."""
    stage = TorchRegressor(model=linear(1, 1), useGpu=True)
    assert config_of(stage, "regression", ["y"])[0].collective == "torch"
    stage.setCollective("horovod")
    assert config_of(stage, "regression", ["y"])[0].collective == "horovod"


def test_a_config_without_wishes_is_that_of_a_stage_without_wishes():
    plain = _config()
    for setting in SETTINGS.values():
        if setting.field and setting.default is not None and setting.name not in ("loss", "labelCol"):
            assert getattr(plain, setting.field) == setting.default


@pytest.mark.parametrize(
    "name", [n for n, s in SETTINGS.items() if s.rule and not (s.on_driver or s.rule_words)]
)
def test_one_mistake_has_one_sentence_wherever_it_is_made(name):
    setting = SETTINGS[name]
    mistake = MISTAKES.get(setting.kinds[0], "nonsense")
    with pytest.raises(ValueError, match=f"^{name} must .*, got ") as in_config:
        _config(**{setting.field: mistake})
    with pytest.raises(ValueError, match=f"^{name} must ") as at_stage:
        TorchEstimator(**{name: mistake})
    assert str(at_stage.value) == str(in_config.value)


@pytest.mark.parametrize(("name", "registry"), [("reader", READERS), ("collective", COLLECTIVES)])
def test_a_part_that_is_listed_is_reachable_from_the_stages(name, registry, monkeypatch):
    monkeypatch.setitem(registry, "of my own", next(iter(registry.values())))
    stage = TorchRegressor(**{name: "of my own"})
    assert getattr(_config(**{name: stage.getOrDefault(name)}), name) == "of my own"


def test_every_field_of_a_config_is_a_setting_or_of_the_run_itself():
    declared = {setting.field for setting in SETTINGS.values() if setting.field}
    of_the_run = "shards_uri run_uri task output_widths own_metrics pause_after pause_after_step"
    of_the_start = "charged_before initial_weights soft_label_column initial_training_state"
    names = {*of_the_run.split(), *of_the_start.split()}
    assert {f.name for f in fields(TrainConfig)} - declared == names


FP16 = {"sync": AllReduce(compression="fp16"), "optimizer": "momentum"}
CUT = {"stages": 2, "schedule": "gpipe", "cuts": ["blocks.1"]}
NO_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": SGD, "learningRate": 0.1}, "learningRate has no effect: the optimizer's"),
    ({"monitor": "train_loss"}, "monitor has no effect: neither patience nor keep='best'"),
    ({"minDelta": 0.1}, "minDelta has no effect: patience is not set"),
    ({"patience": 2, "epochs": 1}, "patience has no effect: epochs is not above patience"),
    ({"inputCols": ["x"], "featuresCol": "x"}, "featuresCol has no effect: inputCols"),
    ({"sync": AllReduce(compression="sign"), "numWorkers": 1}, "sync has no effect: there is one"),
    (
        {"sync": AllReduce(compression="topk"), "optimizer": "adamw", "numWorkers": 2},
        "sync=AllReduce(compression=TopK()) sends a part of each gradient in later steps",
    ),
    ({"noiseScale": True, "numWorkers": 1}, "noiseScale has no effect"),
    *(
        ({"noiseScale": True, "numWorkers": 2, "sync": sync}, "noiseScale has no effect")
        for sync in (Zero(stage=2), AllReduce(compression="fp16"), ParameterServer(), LocalSGD(steps=4))
    ),
    (
        {"parallelism": {"tensor": 2, "pipeline": CUT | {"stages": 1, "schedule": "1f1b"}}},
        "parallelism's pipeline.cuts has no effect: pipeline has",
    ),
    (
        {"parallelism": {"pipeline": 2, "plan": {"head": "row"}}},
        "parallelism's plan has no effect: tensor has one worker",
    ),
    ({"parallelism": {"tensor": 2}, "numWorkers": 2, **FP16}, "sync's compression has no effect"),
]


@pytest.mark.parametrize(("settings", "message"), NO_EFFECT)
def test_a_setting_without_effect_is_said(settings, message):
    found = list(settings_without_effect(TorchRegressor(**settings), on_shards=False))
    assert any(text.startswith(message) for text in found), found


@pytest.mark.parametrize(
    "settings",
    [
        {"noiseScale": True, "numWorkers": 2},
        {"noiseScale": True, "numWorkers": 1, "gradientAccumulation": 2},
        {"parallelism": {"pipeline": CUT}},
        {"parallelism": "auto"},
        {"parallelism": {"data": 2, "tensor": 2}, "numWorkers": 4, **FP16},
    ],
)
def test_a_setting_with_an_effect_is_not(settings):
    assert not list(settings_without_effect(TorchRegressor(**settings), on_shards=False))
