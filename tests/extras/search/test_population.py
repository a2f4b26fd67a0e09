"""The decisions of population based training, and its resume from an earlier driver's records."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ringspark.extras.search import Choice, IntRange, Uniform
from ringspark.extras.search.population import Member, Population
from ringspark.extras.search.population_loop import PopulationLoop, Trained

RANGES = {"rate": Uniform(1e-4, 1.0, log=True), "width": IntRange(2, 9, step=2), "kind": Choice(["a", "b"])}


def population(**given: Any) -> Population:
    rules = {"ranges": RANGES, "size": 8, "quantile": 0.25, "perturbation": 1.2, "seed": 3}
    return Population(**rules | {"is_larger_better": True} | given)


def test_the_worst_take_over_from_the_best_and_the_others_go_on_as_they_are() -> None:
    rules = population()
    members = rules.first()
    values = [0.5, 0.1, 0.9, 0.6, 0.2, 0.8, 0.4, 0.3]
    after = rules.after(0, members, values)
    assert {m.number for m in after if m.copied_from != m.number} == {1, 4}
    for member in after:
        if member.number in (1, 4):
            assert member.copied_from in (2, 5)
        else:
            assert member.settings == members[member.number].settings
    # For a loss the order is reversed.
    after = population(is_larger_better=False).after(0, members, values)
    assert {m.number for m in after if m.copied_from != m.number} == {2, 5}
    assert {after[2].copied_from, after[5].copied_from} <= {1, 4}


def test_a_member_that_failed_goes_on_from_one_that_did_not() -> None:
    rules = population(size=4)
    members = rules.first()
    after = rules.after(0, members, [None, None, 0.1, None])
    assert [m.copied_from for m in after] == [2, 2, 2, 2]
    # The best members stay, even if they are also among the worst. So no member is both.
    assert [m.copied_from for m in population(size=2).after(0, members[:2], [0.3, 0.3])] == [0, 0]
    with pytest.raises(ValueError, match="all members of the population have failed"):
        rules.after(0, members, [None] * 4)


def test_decisions_follow_from_the_seed_and_the_values_alone() -> None:
    values = [float(number) for number in range(8)]
    once, again, other = population(), population(), population(seed=4)
    assert once.first() == again.first() != other.first()
    assert once.after(0, once.first(), values) == again.after(0, again.first(), values)
    assert once.after(0, once.first(), values) != once.after(1, once.first(), values)


def test_what_is_drawn_or_changed_stays_in_its_range_and_on_its_grid() -> None:
    ranges = {
        **RANGES,
        "share": Uniform(0.0, 1.0, step=0.25),
        "small": IntRange(1, 3),
        "size": IntRange(8, 100, log=True),
    }
    seen: set[tuple[str, Any]] = set()
    for seed in range(40):
        rules = population(seed=seed, ranges=ranges, perturbation=2.0)
        members = rules.first()
        for number in range(5):
            for member in members:
                s = member.settings
                assert 1e-4 <= s["rate"] <= 1.0
                assert s["width"] in (2, 4, 6, 8)
                assert s["share"] in (0.0, 0.25, 0.5, 0.75, 1.0)
                assert s["small"] in (1, 2, 3)
                assert 8 <= s["size"] <= 100
                assert all(isinstance(s[name], int) for name in ("width", "small", "size"))
                seen |= {(name, s[name]) for name in ("kind", "width", "share", "small")}
            members = rules.after(number, members, [float(m.number) for m in members])
    assert len(seen) == 2 + 4 + 5 + 3, "every value can be reached"


def test_numbers_are_multiplied_or_divided_and_some_are_drawn_anew() -> None:
    ranges = {"rate": Uniform(1e-9, 1e9, log=True)}
    seen = {"up": 0, "down": 0, "new": 0}
    for seed in range(400):
        rules = population(seed=seed, ranges=ranges, size=2, perturbation=1.5)
        best, worst = Member(number=0, settings={"rate": 1.0}), Member(number=1, settings={"rate": 7.0})
        rate = rules.after(0, [best, worst], [1.0, 0.0])[1].settings["rate"]
        seen["up" if math.isclose(rate, 1.5) else "down" if math.isclose(rate, 1 / 1.5) else "new"] += 1
    # Binomial: 100 of 400 with a deviation of 9, then half of the rest.
    assert 60 < seen["new"] < 140
    assert 100 < seen["up"] < 200
    assert 100 < seen["down"] < 200


ABOUT = {"seed": "0"}
MEMBER = asdict(Trained(value=0.5, steps=3, epochs=1, seconds=0.1))


def resumed(folder: Path, state: dict[str, Any]) -> PopulationLoop:
    (folder / "population.json").write_text(json.dumps(state))
    trainings: Any = Mock(run_uri=str(folder))
    return PopulationLoop(trainings, population(size=2), about=ABOUT, epochs=2, epochs_per_round=1)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({}, "'about' is missing"),
        ({"about": ["seed"], "rounds": []}, "'about' must be dict"),
        ({"about": ABOUT, "rounds": [[MEMBER, {"value": 0.5}]]}, "'steps' is missing"),
        ({"about": ABOUT, "rounds": [[MEMBER]]}, "round 0 has 1 members instead of 2"),
    ],
)
def test_a_damaged_state_is_refused_in_one_sentence(tmp_path: Path, state: Any, problem: str) -> None:
    sentence = rf"cannot resume .* population.json is damaged \({re.escape(problem)}.*\); set another runUri"
    with pytest.raises(ValueError, match=sentence):
        resumed(tmp_path, state)
