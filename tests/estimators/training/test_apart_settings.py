"""`sync` of workers that step on their own: valid options, and settings that exclude them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_training import Runs
from torch import nn

from ringspark.estimators.options.sync import DiLoCo, Hogwild, LocalSGD, ParameterServer, Sync
from ringspark.estimators.training.optimizers.registry import make_optimizer
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec

SETTINGS = {"num_workers": 2, "collective": "torch"}
CONFIG = TrainConfig(
    shards_uri="s", run_uri="r", input_columns=("x",), label_columns=("y",), num_workers=2, collective="torch"
)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("LocalSGD", {"steps": 0}, "LocalSGD's steps must be at least 2, got 0"),
        ("LocalSGD", {"steps": True}, "steps must be a whole number, 'epoch' or 'training', got True"),
        ("LocalSGD", {"steps": 2.5}, "steps must be a whole number, .* got 2.5"),
        ("LocalSGD", {"steps": ["epoch"]}, "steps must be a whole number"),
        (["LocalSGD"], {"steps": 2}, "sync must be one of .*, got"),
        ("DilCo", {"steps": 2}, "did you mean 'diloco'"),
        ("LocalSGD", {"steps": 2, "aftr": 3}, "LocalSGD has no option 'aftr'; did you mean 'after'"),
        ("LocalSGD", {"steps": 2, "after": -1}, "LocalSGD's after must not be negative, got -1"),
        (
            "LocalSGD",
            {"steps": 2, "optimizerState": "drop"},
            "optimizer_state must be 'keep', .*, got 'drop'",
        ),
        ("DiLoCo", {"steps": "training"}, "steps must be .*, got 'training'"),
        ("DiLoCo", {"steps": 2, "outerMomentum": 1}, "outer_momentum must be from 0 to below 1, got 1"),
        ("DiLoCo", {"steps": 2, "send": "int4"}, "send must be 'fp32', .*, got 'int4'"),
        ("DiLoCo", {"steps": 4, "fragments": 3}, "fragments must divide its steps, got 3 for 4"),
        ("DiLoCo", {"steps": 4, "fragments": 2, "delay": 2}, "delay must be below the 2 steps"),
        ("DiLoCo", {"steps": "epoch", "delay": 1}, "need a number of steps"),
        ("ElasticAveraging", {"steps": 2, "alpha": 0}, "alpha must be above 0 and at most 1, got 0"),
        ("ParameterServer", {"staleness": -1}, "staleness must not be negative, got -1"),
        ("ParameterServer", {"staleness": True}, "staleness must be a whole number, got True"),
        ("ParameterServer", {"correction": "rate"}, "correction must be 'none' or 'staleness', got 'rate'"),
    ],
)
def test_a_bad_option_of_workers_apart_is_one_sentence(name: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Sync.of({"name": name, **options}, "sync")
    assert "\n" not in str(caught.value)


AVERAGED = LocalSGD(steps=4, optimizer_state="average")
# Further ones are in tests/pairs.
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"sync": AVERAGED, "optimizer": n}, f"'{n}' keeps codes") for n in ("adam8bit", "adamw8bit")),
    (
        {"sync": DiLoCo(steps=4, send="int8"), "num_workers": 128, "batch_size": 512},
        "numWorkers=128 leaves less than one; set send='fp16'",
    ),
    ({"sync": Hogwild(), "use_gpu": True}, r"set useGpu=False, or sync=ParameterServer\(\)"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_does_not_go_together_is_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        replace(CONFIG, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.extras
@pytest.mark.parametrize(
    ("changes", "optimizer", "message"),
    [
        (
            {"sync": ParameterServer()},
            lambda p: make_optimizer("lamb", p, 0.1, 0.0),
            "optimizer Lamb needs whole parameters; take one of",
        ),
        ({"sync": Hogwild()}, torch.optim.SparseAdam, r"sync=Hogwild\(\) makes them dense"),
        ({"sync": LocalSGD(steps=4)}, torch.optim.SparseAdam, r"makes them dense; set sync=AllReduce\(\)"),
        # The state of a shard has no dimensions to join, so a checkpoint would have the state of one rank.
        (
            {"parallelism": {"tensor": 2, "plan": {"0": "column"}}},
            lambda p: make_optimizer("adam8bit", p, 0.1, 0.0),
            "gives a worker only shards of parameters, but optimizer Adam8bit needs whole parameters",
        ),
    ],
)
def test_an_optimizer_of_the_users_own_is_refused_on_the_driver(
    runs: Runs, changes: dict[str, Any], optimizer: Any, message: str
) -> None:
    objects = UserObjects(module=nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)), optimizer=optimizer)
    with pytest.raises(ValueError, match=message):
        runs.check(9, objects, **changes)
    runs.check(9, objects, **{**changes, "num_workers": 1, "parallelism": {}})


@pytest.mark.extras
def test_an_optimizer_of_our_own_that_looks_at_single_elements_is_not_refused(runs: Runs) -> None:
    model = ModelSpec("linear", {"in_features": 4, "out_features": 1})
    runs.check(9, sync=ParameterServer(), optimizer="adam1bit", model=model)
