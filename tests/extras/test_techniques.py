"""The contract of every technique, and of the functions that the core takes from `ringspark.extras`."""

import inspect

import pytest
from small_training import bare_config

from ringspark.estimators.lazy_imports import load_object
from ringspark.estimators.techniques import FUNCTIONS, TECHNIQUES, Technique, techniques_of
from ringspark.estimators.training.settings.table import SETTINGS

PLAIN = bare_config()
HOOKS = {name for name in vars(Technique) if not name.startswith("_")}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_overrides_hooks_and_adds_none(name: str) -> None:
    kind = load_object(TECHNIQUES[name].path)
    assert issubclass(kind, Technique)
    own = {each for each in vars(kind) if not each.startswith("_")}
    assert own
    assert own <= HOOKS
    for hook in own:
        ours, theirs = (inspect.signature(getattr(each, hook)) for each in (kind, Technique))
        assert list(ours.parameters) == list(theirs.parameters)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_setting_says_whether_a_technique_is_used(name: str) -> None:
    entry = TECHNIQUES[name]
    assert entry.field or entry.param
    assert not entry.field or hasattr(PLAIN, entry.field)
    assert not entry.param or entry.param in SETTINGS


def test_a_plain_training_uses_no_technique_but_the_checks_of_own_code() -> None:
    assert [type(each).__name__ for each in techniques_of(PLAIN)] == ["OwnCode"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_the_core_is_there(name: str) -> None:
    assert callable(FUNCTIONS[name])
