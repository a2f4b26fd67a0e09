"""`ModelSpec`: arguments that it accepts, and its error messages."""

import pickle
import re
from enum import Enum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ringspark.models import MLP, ModelSpec
from ringspark.models.spec import JSON

json_values: st.SearchStrategy[JSON] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values))
def test_json_round_trip_is_exact(kwargs: dict[str, JSON]) -> None:
    spec = ModelSpec("mlp", kwargs)
    again = ModelSpec.from_json(spec.to_json())
    assert again == spec
    assert hash(again) == hash(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_tuples_become_lists_so_that_the_round_trip_holds() -> None:
    assert ModelSpec("mlp", {"hidden": (3, 4)}).kwargs == {"hidden": [3, 4]}


def test_later_changes_to_the_callers_arguments_do_not_reach_the_spec() -> None:
    hidden = [3]
    spec = ModelSpec("mlp", {"in_features": 2, "hidden": hidden, "out_features": 1})
    hidden.append(4)
    net = spec.build()
    assert isinstance(net, MLP)
    assert len(net.trunk) == 1


def test_an_import_path_builds_any_module_class() -> None:
    net = ModelSpec("torch.nn:Linear", {"in_features": 2, "out_features": 3}).build()
    assert isinstance(net, nn.Linear)


def test_repr_reads_as_the_call() -> None:
    assert repr(ModelSpec("mlp", {"in_features": 2})) == "ModelSpec('mlp', {'in_features': 2})"


class _Colour(str, Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"net": object()}, "argument 'net' must be JSON"),
        ({"hidden": [1, np.int64(2)]}, "argument 'hidden'[1] must be JSON .* got int64"),
        ({"rate": float("nan")}, "argument 'rate' must be a finite number, got nan"),
        ({"sizes": {1: 2}}, "argument 'sizes' must have strings as keys, got 1"),
        ({"colour": _Colour.RED}, "argument 'colour' must be JSON .* got _Colour"),
    ],
)
def test_arguments_that_json_would_alter_are_refused_by_name(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message).replace(r"\.\*", ".*").replace(r"\ .*", ".*")):
        ModelSpec("mlp", kwargs)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tabula", "or 'package.module:Class', got 'tabula'; did you mean 'tabular'"),
        ("unet", "must be one of embedding_mean, linear, mlp, recurrent, resnet, tabm"),
        ("torch.nn:", "must be 'package.module:Class'"),
        ("__main__:Net", "workers cannot import"),
    ],
)
def test_a_target_no_worker_could_resolve_is_refused_at_once(target: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelSpec(target)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec("no.such.module:Net"), "could not be imported: ModuleNotFoundError"),
        (ModelSpec("torch.nn:Lineer"), "torch.nn has no 'Lineer'"),
        (ModelSpec("os:system", {"command": "true"}), "must be a subclass of torch.nn.Module"),
        (ModelSpec("mlp", {"in_feature": 2}), "does not take these arguments"),
        (
            ModelSpec("mlp", {"in_features": 2, "hidden": [0], "out_features": 1}),
            "model 'mlp' could not be built: hidden must hold widths of at least 1",
        ),
        (
            ModelSpec("mlp", {"in_features": 2, "hidden": [], "out_features": 1, "norm": "bach"}),
            "model 'mlp' could not be built",
        ),
    ],
)
def test_build_fails_in_one_sentence(spec: ModelSpec, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        spec.build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", '{"kwargs": {}}', '{"target": "mlp", "extra": 1}', '{"target": 3}'])
def test_text_that_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ModelSpec"):
        ModelSpec.from_json(text)
