"""`localSteps` and `consistency`: what they may be, and what they do not go with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import config_of
from torch import nn

from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.optimizers.adam8bit import Adam8bit
from ringspark.estimators.training.optimizers.lamb import Lamb
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.settings.consistency import CONSISTENCY
from ringspark.estimators.training.settings.large_batches import NOISE_SCALE
from ringspark.estimators.training.settings.local_training import LOCAL_STEPS
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

MakeShards = Callable[..., ShardManifest]
CONFIG = TrainConfig(
    shards_uri="s", run_uri="r", input_columns=("x",), label_columns=("y",), num_workers=2, collective="torch"
)


def _local(value: Any) -> Any:
    assert LOCAL_STEPS.convert is not None
    return LOCAL_STEPS.convert(value)


def _consistency(value: Any) -> Any:
    assert CONSISTENCY.convert is not None
    return CONSISTENCY.convert(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "localSteps must be a whole number of at least 1, 'epoch' or 'training', got 0"),
        (True, "a whole number of at least 1"),
        (2.0, "a whole number of at least 1"),
        (["epoch"], "a whole number of at least 1"),
        ({"name": ["average"], "steps": 2}, "localSteps' name must be one of 'average', .*, got"),
        ({"name": "dilco", "steps": 2}, "did you mean 'diloco'"),
        ({"steps": 2, "aftr": 3}, "takes the keys .* did you mean 'after'"),
        ({"name": "diloco", "steps": "training"}, "localSteps must be .*, got 'training'"),
        ({"steps": 2, "after": -1}, "localSteps' after must be a whole number of at least 0, got -1"),
        ({"steps": 2, "optimizerState": "drop"}, "optimizerState must be one of 'keep', .*, got 'drop'"),
        (
            {"name": "diloco", "steps": 2, "outerMomentum": 1},
            "outerMomentum must be from 0 to below 1, got 1",
        ),
        ({"name": "diloco", "steps": 2, "send": "int4"}, "send must be one of 'fp32', .*, got 'int4'"),
        ({"name": "diloco", "steps": 4, "fragments": 3}, "fragments must divide its steps, got 3 for 4"),
        ({"name": "diloco", "steps": 4, "fragments": 2, "delay": 2}, "delay must be below the 2 steps"),
        ({"name": "diloco", "steps": "epoch", "delay": 1}, "need a period in steps"),
        ({"name": "elastic", "steps": 2, "alpha": 0}, "alpha must be above 0 and at most 1, got 0"),
    ],
)
def test_a_bad_value_of_local_steps_is_one_sentence(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        _local(value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "consistency must be a name or a dict with a name, got 3"),
        ("sps", "must be one of bsp, ssp, asp, hogwild, got 'sps'"),
        ({"staleness": 3}, "must be one of bsp, .*, got None"),
        ({"name": ["ssp"]}, r"must be one of bsp, .*, got \['ssp'\]"),
        ("ssp", "needs its staleness, .* got None"),
        ({"name": "ssp", "staleness": -1}, "needs its staleness, .* got -1"),
        ({"name": "ssp", "staleness": True}, "needs its staleness, .* got True"),
        ({"name": "asp", "staleness": 3}, "'asp' takes the options .*, got 'staleness'"),
        ({"name": "asp", "correction": "rate"}, "correction must be one of none, staleness, got 'rate'"),
    ],
)
def test_a_bad_consistency_is_one_sentence(value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        _consistency(value)
    assert "\n" not in str(caught.value)


SSP = {"name": "ssp", "staleness": 2}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"local_steps": 4, "consistency": "asp"}, "set localSteps=1, or leave both"),
    ({"local_steps": 4, "sharding": "optimizer"}, "set sharding='none', or localSteps=1"),
    ({"local_steps": 4, "precision": "fp16"}, "set precision='bf16', or localSteps=1"),
    ({"local_steps": 4, "on_non_finite": "skip"}, "set onNonFinite='stop', or localSteps=1"),
    ({"local_steps": 4, "ema_decay": 0.9}, "leave emaDecay unset, or set localSteps=1"),
    *(
        (
            {"local_steps": {"steps": 4, "optimizerState": "average"}, "optimizer": name},
            f"'{name}' keeps codes",
        )
        for name in ("adam8bit", "adamw8bit")
    ),
    (
        {
            "local_steps": {"name": "diloco", "steps": 4, "send": "int8"},
            "num_workers": 128,
            "batch_size": 512,
        },
        "got numWorkers=128; set send='fp16'",
    ),
    ({"consistency": SSP, "sharding": "optimizer"}, "set sharding='none', or consistency='bsp'"),
    ({"consistency": SSP, "precision": "fp16"}, "set precision='bf16', or consistency='bsp'"),
    ({"consistency": SSP, "on_non_finite": "skip"}, "set onNonFinite='stop', or consistency='bsp'"),
    ({"consistency": SSP, "ema_decay": 0.9}, "leave emaDecay unset, or set consistency='bsp'"),
    ({"consistency": SSP, "optimizer": "lamb"}, "'lamb' looks at whole ones; set optimizer='adamw'"),
    ({"consistency": {"name": "ssp", "staleness": 0}, "max_grad_norm": 1.0}, "leave maxGradNorm unset"),
    ({"consistency": "hogwild", "use_gpu": True}, "set useGpu=False, or consistency='asp'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_does_not_go_together_is_one_sentence(changes: dict[str, Any], message: str) -> None:
    given = dict(changes)
    if "local_steps" in given:
        given["local_steps"] = _local(given["local_steps"])
    if "consistency" in given:
        given["consistency"] = _consistency(given["consistency"])
    with pytest.raises(ValueError, match=message) as caught:
        replace(CONFIG, **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "optimizer", "message"),
    [
        (
            {"consistency": "asp"},
            lambda p: Lamb(p, lr=0.1),
            "optimizer Lamb looks at whole ones; take one of",
        ),
        ({"consistency": "hogwild"}, torch.optim.SparseAdam, "consistency 'hogwild' makes them dense"),
        ({"local_steps": 4}, torch.optim.SparseAdam, "localSteps .* makes them dense; set localSteps=1"),
        # Its state of a part has no dimensions to be joined along, so a checkpoint would have one rank's.
        (
            {"parallelism": {"tensor": 2, "plan": {"0": "column"}}},
            Adam8bit,
            "leaves a worker parts of parameters, and optimizer Adam8bit looks at whole ones",
        ),
    ],
)
def test_an_optimizer_of_the_users_own_is_refused_on_the_driver(
    make_shards: MakeShards, tmp_path: Path, changes: dict[str, Any], optimizer: Any, message: str
) -> None:
    manifest = make_shards({"x": np.zeros((9, 2), np.float32), "y": np.zeros(9, np.float32)})
    forms: dict[str, Any] = {"local_steps": _local, "consistency": _consistency, "parallelism": dict}
    given = {key: forms[key](value) for key, value in changes.items()}
    config = config_of(manifest, tmp_path / "run", num_workers=2, collective="torch", **given)
    objects = UserObjects(module=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), optimizer=optimizer)
    with pytest.raises(ValueError, match=message):
        check_training(config, objects, manifest)
    check_training(replace(config, num_workers=1, parallelism={}), objects, manifest)


def test_an_optimizer_of_our_own_that_looks_at_single_elements_is_not_refused(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    manifest = make_shards({"x": np.zeros((9, 2), np.float32), "y": np.zeros(9, np.float32)})
    config = config_of(
        manifest,
        tmp_path / "run",
        num_workers=2,
        collective="torch",
        consistency=_consistency("asp"),
        optimizer="adam1bit",
        model=ModelSpec("linear", {"in_features": 2, "out_features": 1}).to_json(),
    )
    check_training(config, UserObjects(), manifest)


def test_noise_that_nobody_measures_is_told() -> None:
    assert NOISE_SCALE.without_effect is not None
    is_idle, _ = NOISE_SCALE.without_effect
    given: dict[str, Any] = {
        "numWorkers": 2,
        "sharding": "none",
        "gradientCompression": {"name": "none"},
        "localSteps": 1,
        "consistency": _consistency("bsp"),
        "gradientAccumulation": 1,
    }
    assert not is_idle(given)
    assert is_idle(given | {"localSteps": _local(4)})
    assert is_idle(given | {"consistency": _consistency(SSP)})
