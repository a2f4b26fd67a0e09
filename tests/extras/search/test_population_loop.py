"""A population's loop resumes from the records of an earlier driver."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from ringspark.extras.search import Uniform
from ringspark.extras.search.population import Population
from ringspark.extras.search.population_loop import PopulationLoop, Trained

ABOUT = {"seed": "0"}
MEMBER = asdict(Trained(value=0.5, steps=3, epochs=1, seconds=0.1))


def _loop(folder: Path) -> PopulationLoop:
    population = Population(
        ranges={"learningRate": Uniform(0.1, 1.0)},
        size=2,
        quantile=0.5,
        perturbation=1.2,
        seed=0,
        is_larger_better=True,
    )
    unused = cast(Any, None)
    return PopulationLoop(
        population=population,
        space=unused,
        objective=unused,
        data=unused,
        dataset=unused,
        run_uri=str(folder),
        about=ABOUT,
        epochs=2,
        epochs_per_round=1,
    )


def test_a_setting_that_only_the_earlier_search_had_is_refused(tmp_path: Path) -> None:
    state = {"about": ABOUT | {"own metrics": "{'accuracy': 1}"}, "rounds": []}
    (tmp_path / "population.json").write_text(json.dumps(state))
    with pytest.raises(
        ValueError, match=r"its settings differ: own metrics: \{'accuracy': 1\} -> None; restore"
    ):
        _loop(tmp_path)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({}, "'about' is missing"),
        ({"about": ["seed"], "rounds": []}, "'about' must be dict"),
        ({"about": ABOUT, "rounds": [[MEMBER, {"value": 0.5}]]}, "'steps' is missing"),
        ({"about": ABOUT, "rounds": [[MEMBER]]}, "round 0 has 1 members instead of 2"),
    ],
)
def test_a_damaged_state_is_refused_in_one_sentence(
    tmp_path: Path, state: dict[str, Any], problem: str
) -> None:
    (tmp_path / "population.json").write_text(json.dumps(state))
    sentence = rf"cannot resume .* population.json is damaged \({re.escape(problem)}.*\); set another runUri"
    with pytest.raises(ValueError, match=sentence):
        _loop(tmp_path)


def test_a_whole_state_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "population.json").write_text(json.dumps({"about": ABOUT, "rounds": [[MEMBER, MEMBER]]}))
    assert _loop(tmp_path)._values(0) == [0.5, 0.5]
