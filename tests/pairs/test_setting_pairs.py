"""Every pair of settings works in a Spark fit, is refused in one sentence, or has no meaning."""

import itertools
import os
import random
import re
from datetime import date
from typing import Any

import pytest

pytest.importorskip("ringspark.extras")

from setting_choices import Combination
from setting_pairs import (
    MEANINGLESS,
    NAMES,
    PAIRS,
    REFUSED,
    Rule,
    beside,
    fits,
    is_of_extras,
    rule_of,
    status,
)
from small_fits import Place, describe

MASTER = os.environ.get("RINGSPARK_TEST_MASTER", "local[4]")
SESSION = "Connect" if MASTER == "connect" else "Classic"
SAMPLE = 4

# The other session's combinations run in the process of tests/test_modes.py.
OURS = [combination for combination in fits()[0] if combination["session"] == SESSION]


def _case(combination: Combination, *marks: pytest.MarkDecorator) -> Any:
    own = [pytest.mark.extras] if is_of_extras(combination) else []
    changed = [name for group, name in combination.items() if name != NAMES[group][0]]
    return pytest.param(combination, id=", ".join(changed), marks=[*marks, *own])


def _sample() -> list[Any]:
    """Returns some combinations by date, of the core and of extras, without the slowest choices."""
    if SESSION == "Connect":
        return []
    quick = [one for one in OURS if (one["compile"], one["continuing"]) == ("none", "none")]
    draw = random.Random(date.today().toordinal())
    return [
        _case(one)
        for kind in (False, True)
        for one in draw.sample([one for one in quick if is_of_extras(one) == kind], SAMPLE)
    ]


# These pairs work, and `fit` advises against them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:sync=.* sends a part of each gradient in later steps:UserWarning"),
    pytest.mark.filterwarnings("ignore:model .* has sparse=True in the embedding of:UserWarning"),
]


@pytest.fixture(scope="module")
def place(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(spark, tmp_path_factory.mktemp("pairs"))


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.connect
@pytest.mark.parametrize("combination", [_case(one) for one in OURS])
def test_a_combination_keeps_its_promise(place: Place, combination: Combination) -> None:
    _check(place, combination)


@pytest.mark.spark
@pytest.mark.parametrize("combination", _sample())
def test_todays_combinations_keep_their_promise(place: Place, combination: Combination) -> None:
    _check(place, combination)


def _check(place: Place, combination: Combination) -> None:
    try:
        place.check(combination)
    except BaseException as error:
        error.add_note(describe(combination))
        raise


def _refusals() -> list[Any]:
    """Returns each rule with its pairs; pairs of extras apart."""
    found = []
    for number, rule in enumerate(REFUSED):
        for kind in (False, True):
            fitting = [pair for pair in PAIRS if rule_of(frozenset(pair)) is rule]
            pairs = [pair for pair in fitting if is_of_extras(dict(pair)) == kind]
            marks = [pytest.mark.extras] if kind else []
            if pairs:
                found.append(pytest.param(rule, pairs, id=f"{number}{' of extras' * kind}", marks=marks))
    return found


@pytest.mark.spark
@pytest.mark.parametrize(("rule", "pairs"), _refusals())
def test_a_pair_is_refused_in_one_sentence(place: Place, rule: Rule, pairs: list[Any]) -> None:
    for pair in pairs:
        combination = beside(pair)
        with pytest.raises(ValueError, match=rule.sentence) as caught:
            place.refuse(combination)
        assert "\n" not in str(caught.value), (pair, str(caught.value))
        remedy = r"[;,.] (set|leave|give|use|take|add|fit|raise) "
        assert re.search(remedy, str(caught.value)), str(caught.value)


def test_every_working_pair_is_in_a_fit() -> None:
    combinations, impossible = fits()
    assert not impossible
    covered = {frozenset(pair) for one in combinations for pair in itertools.combinations(one.items(), 2)}
    assert covered == {frozenset(pair) for pair in PAIRS if status(frozenset(pair)) == "works"}


def test_every_rule_has_a_pair() -> None:
    used = {id(rule_of(frozenset(pair))) for pair in PAIRS}
    pairs = [rule for rule in (*REFUSED, *MEANINGLESS) if len(rule.choices) == 2]
    assert [rule for rule in pairs if id(rule) not in used] == []
