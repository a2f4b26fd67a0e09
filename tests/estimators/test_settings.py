"""Each setting is declared once; stages, config and command lines use its message and default."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from small_networks import linear

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
    with pytest.raises(ValueError, match="must ") as at_option:
        setting.from_text(str(mistake))
    assert f"{name} {at_option.value}" == str(in_config.value)


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


@pytest.mark.parametrize(
    ("others", "is_measured"),
    [
        ({"numWorkers": 2}, True),
        ({"numWorkers": 1, "gradientAccumulation": 2}, True),
        ({"numWorkers": 1}, False),
        *(
            ({"numWorkers": 2, "sync": sync}, False)
            for sync in (Zero(stage=2), AllReduce(compression="fp16"), ParameterServer(), LocalSGD(steps=4))
        ),
    ],
)
def test_a_noise_scale_that_nothing_measures_is_said(others, is_measured):
    told = list(settings_without_effect(TorchRegressor(noiseScale=True, **others), on_shards=False))
    assert any(text.startswith("noiseScale has no effect") for text in told) is not is_measured


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        (
            {"tensor": 2, "pipeline": {"stages": 1, "cuts": ["blocks.1"]}},
            ["'s pipeline.cuts has no effect: pipeline has"],
        ),
        (
            {"pipeline": 2, "plan": {"head": "row"}},
            ["'s plan has no effect: tensor has one worker"],
        ),
        ({"pipeline": {"stages": 2, "schedule": "gpipe", "cuts": ["blocks.1"]}}, []),
        ("auto", []),
    ],
)
def test_ways_of_an_axis_that_has_no_workers_are_said(mesh, told):
    found = list(settings_without_effect(TorchRegressor(parallelism=mesh), on_shards=False))
    assert len(found) == len(told)
    assert all(re.search(pattern, text) for pattern, text in zip(told, found, strict=True))


@pytest.mark.parametrize(("data", "is_used"), [(1, False), (2, True)])
def test_a_compression_without_replicas_is_said(data, is_used):
    mesh = {"data": data, "tensor": 2}
    stage = TorchRegressor(
        parallelism=mesh, numWorkers=2 * data, sync=AllReduce(compression="fp16"), optimizer="momentum"
    )
    found = list(settings_without_effect(stage, on_shards=False))
    assert any(text.startswith("sync's compression has no effect") for text in found) is not is_used
