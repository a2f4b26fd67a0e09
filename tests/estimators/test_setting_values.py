"""A setting keeps the value that was meant, and refuses what only looks like it."""

from array import array
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.linalg import DenseVector

from ringspark.estimators import LoRA, Mesh, TorchClassifier, TorchEstimator


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        *(("epochs", given, 3) for given in (3, 3.0, np.int64(3), np.float64(3))),
        *(("learningRate", given, 0.5) for given in (0.5, np.float32(0.5))),
        ("learningRate", 1, 1.0),
        *(("thresholds", given, [1.0, 2.0]) for given in ((1, 2), np.array([1.0, 2.0]), range(1, 3))),
        *(("thresholds", given, [1.0, 2.0]) for given in (DenseVector([1, 2]), array("d", [1, 2]))),
        *(("inputCols", given, ["a"]) for given in ("a", ["a"], np.str_("a"), np.array(["a"]))),
        ("shuffle", np.True_, True),
    ],
)
def test_numbers_and_names_of_other_libraries_are_taken(name, given, value):
    found = getattr(TorchClassifier(**{name: given}), f"get{name[0].upper()}{name[1:]}")()
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *(
            ("epochs", given)
            for given in (True, "3", 2.5, np.datetime64("2020-01-01", "ns"), torch.tensor(3))
        ),
        *(("learningRate", given) for given in (True, np.True_, torch.tensor(True), Decimal("0.5"), "1e-3")),
        *(("learningRate", given) for given in (np.timedelta64(3, "ns"), float("nan"), float("inf"))),
        *(("lossWeights", given) for given in ([-np.float32(1), 2], np.zeros(2), [True, 1.0], ["1"])),
        *(("useGpu", given) for given in (1, 0, "true", np.int64(1))),
    ],
)
def test_what_only_looks_like_the_value_is_refused(name, given):
    with pytest.raises(ValueError, match=f"^{name} must "):
        TorchEstimator(**{name: given})


def test_none_clears_a_setting_by_every_way():
    stage = TorchEstimator(inputCols=["a"])
    stage.set(stage.inputCols, None)
    assert not stage.isSet(stage.inputCols)
    assert stage.inputColumns() == ["features"]
    assert not TorchEstimator(inputCols=None).setInputCols("a").setInputCols(None).isSet("inputCols")
    assert not TorchEstimator(inputCols="a").setParams(inputCols=None).isSet("inputCols")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("tracking", [{"name": "mlflow", "tags": {"a": ["b"]}}]),
        ("parameterGroups", [{"params": ["head.*"], "learningRate": 0.1}]),
        ("batchSizeSchedule", [[2, 64]]),
        ("innerCols", {"encoder": "vector"}),
    ],
)
def test_a_list_or_dict_of_the_caller_is_no_part_of_the_stage(name, given):
    stage = TorchEstimator(**{name: given})
    before = str(stage.getOrDefault(name))
    for held in (given, getattr(stage, f"get{name[0].upper()}{name[1:]}")()):
        _change(held)
    assert str(stage.getOrDefault(name)) == before


def _change(held: Any) -> None:
    for inner in held.values() if isinstance(held, dict) else held:
        if isinstance(inner, dict | list):
            _change(inner)
    held.clear()


def test_a_plan_of_any_mapping_is_a_dict_of_its_own():
    layers = {"head": ["row"]}
    mesh = Mesh(tensor=2, plan=MappingProxyType(layers))
    layers["head"].clear()
    assert mesh.plan == {"head": ["row"]}
    assert LoRA(rank=2, targets=np.str_("*.query")).targets == ("*.query",)
