"""The setting of local training: how many steps ranks take on their own, and how they meet."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from ringspark.estimators.names import nearest
from ringspark.estimators.training.settings.declaration import Setting

# Keys of each way to meet and their defaults. None for `steps`: it must be given.
_KEYS: dict[str, dict[str, Any]] = {
    "average": {"steps": None, "after": 0, "optimizerState": "keep"},
    "diloco": {
        "steps": None,
        "after": 0,
        "outerRate": 0.7,
        "outerMomentum": 0.9,
        "send": "fp32",
        "fragments": 1,
        "delay": 0,
        "alpha": 0.0,
    },
    "elastic": {"steps": None, "after": 0, "alpha": None},
}
_WORDS: dict[str, tuple[str, ...]] = {
    "optimizerState": ("keep", "average", "reset"),
    "send": ("fp32", "fp16", "int8"),
}
_PERIODS = {"average": ("epoch", "training"), "diloco": ("epoch",), "elastic": ("epoch",)}


def _local_steps(value: Any) -> int | dict[str, Any]:
    """Returns 1 for synchronous training, else a dict with `name` and all keys that it takes."""
    given = dict(value) if isinstance(value, Mapping) else {"steps": value}
    name = given.pop("name", "average")
    if not isinstance(name, str) or name not in _KEYS:
        raise ValueError(
            f"localSteps' name must be one of {', '.join(map(repr, _KEYS))}, got {name!r}"
            + nearest(str(name), _KEYS)
        )
    defaults = _KEYS[name]
    for key in given:
        if key not in defaults:
            raise ValueError(
                f"localSteps of name {name!r} takes the keys {list(defaults)}, got {key!r}"
                + nearest(str(key), defaults)
            )
    found = {"name": name, **defaults, **given}
    _check_steps(name, found["steps"])
    _check_numbers(found)
    for key, words in _WORDS.items():
        if key in found and found[key] not in words:
            raise ValueError(
                f"localSteps' {key} must be one of {', '.join(map(repr, words))}, got {found[key]!r}"
            )
    if name == "diloco":
        _check_fragments(found)
    return 1 if name == "average" and found["steps"] == 1 else found


def _check_steps(name: str, steps: Any) -> None:
    if not _is_whole(steps, 1) and steps not in _PERIODS[name]:
        raise ValueError(
            "localSteps must be a whole number of at least 1, "
            f"{' or '.join(map(repr, _PERIODS[name]))}, got {steps!r}; in a dict it is the key 'steps'"
        )


def _check_numbers(found: Mapping[str, Any]) -> None:
    ranges: dict[str, tuple[str, bool]] = {
        "after": ("a whole number of at least 0", _is_whole(found["after"], 0)),
        "outerRate": ("above 0", _lies(found.get("outerRate"), lambda v: v > 0)),
        "outerMomentum": ("from 0 to below 1", _lies(found.get("outerMomentum"), lambda v: 0 <= v < 1)),
        "fragments": ("a whole number of at least 1", _is_whole(found.get("fragments"), 1)),
        "delay": ("a whole number of at least 0", _is_whole(found.get("delay"), 0)),
        "alpha": (
            ("from 0 to 1", _lies(found.get("alpha"), lambda v: 0 <= v <= 1))
            if found["name"] == "diloco"
            else (
                "above 0 and at most 1",
                found.get("alpha") is None or _lies(found["alpha"], lambda v: 0 < v <= 1),
            )
        ),
    }
    for key, (rule, holds) in ranges.items():
        if key in found and not holds:
            raise ValueError(f"localSteps' {key} must be {rule}, got {found[key]!r}")


def _check_fragments(found: Mapping[str, Any]) -> None:
    steps, fragments, delay = found["steps"], found["fragments"], found["delay"]
    if not isinstance(steps, int):
        if fragments > 1 or delay:
            raise ValueError(
                f"localSteps' fragments ({fragments}) and delay ({delay}) need a period in steps, got "
                f"steps={steps!r}; give a number of steps"
            )
        return
    if steps % fragments:
        raise ValueError(
            f"localSteps' fragments must divide its steps, got {fragments} for {steps} steps; one fragment "
            "meets every steps / fragments"
        )
    if delay >= steps // fragments:
        raise ValueError(
            f"localSteps' delay must be below the {steps // fragments} steps between two meetings, got "
            f"{delay}; lower it"
        )


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _lies(value: Any, holds: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return is_number and bool(holds(value))


LOCAL_STEPS = Setting[int | dict[str, Any]](
    name="localSteps",
    field="local_steps",
    words="steps that each worker takes alone before all meet; 1: they exchange gradients in every step. A "
    "number, or a dict with 'steps' (a number, 'epoch', or 'training' to average once), 'after' (synchronous "
    "steps before) and 'name': 'average' (local SGD; 'optimizerState'), 'diloco' (an outer optimizer; "
    "'outerRate', 'outerMomentum', 'send', 'fragments', 'delay', 'alpha') or 'elastic' (a centre; 'alpha')",
    default=1,
    convert=_local_steps,
)
