"""`ModelSpec`: arguments that it accepts, and its error messages."""

import pickle
from collections.abc import Callable
from enum import Enum
from typing import Any

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


def _build(target: str, **kwargs: Any) -> nn.Module:
    return ModelSpec(target, kwargs).build()


# Further ones are in the table of bad inputs.
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: ModelSpec("mlp", {"hidden": [1, np.int64(2)]}), r"'hidden'\[1\] must be JSON .* got int64"),
    (lambda: ModelSpec("mlp", {"rate": float("nan")}), "argument 'rate' must be a finite number, got nan"),
    (lambda: ModelSpec("mlp", {"sizes": {1: 2}}), "argument 'sizes' must have strings as keys, got 1"),
    (lambda: ModelSpec("mlp", {"colour": _Colour.RED}), "argument 'colour' must be JSON .* got _Colour"),
    (
        lambda: ModelSpec("unet"),
        "one of embedding_mean, linear, mlp, .* or 'package.module:Class', got 'unet'",
    ),
    (lambda: ModelSpec("torch.nn:"), "must be 'package.module:Class'"),
    (lambda: _build("torch.nn:Lineer"), "torch.nn has no 'Lineer'"),
    (
        lambda: _build("mlp", in_features=2, hidden=[0], out_features=1),
        "model 'mlp' could not be built: hidden must hold widths of at least 1",
    ),
    (
        lambda: _build("mlp", in_features=2, hidden=[], out_features=1, norm="bach"),
        "model 'mlp' could not be built",
    ),
    *(
        (lambda text=text: ModelSpec.from_json(text), "ModelSpec")
        for text in ("{", '{"kwargs": {}}', '{"target": "mlp", "extra": 1}', '{"target": 3}')
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_is_no_network_of_a_worker_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
