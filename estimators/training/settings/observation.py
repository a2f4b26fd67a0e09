"""Settings of progress, tracking, timelines and profiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from ringspark.estimators.names import check_name
from ringspark.estimators.options.checked import AtLeast1, NotNegative
from ringspark.estimators.training.settings.choices import TrackerName
from ringspark.estimators.training.settings.setting import Section, setting
from ringspark.pipelines import storage
from ringspark.pipelines.entry_points import list_entry_points

TRACKER_GROUP = "ringspark.trackers"
# Option of MLflow's tracker -> remedy by MLflow's own environment variables.
_REMEDIES = {
    "tracking_uri": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or the whole URI in "
    "MLFLOW_TRACKING_URI, in the environment of the driver",
    "registry_uri": "leave it out and set MLFLOW_REGISTRY_URI in the environment of the driver",
}
# A profile holds every operation of its steps, in memory until the last one has ended.
MOST_PROFILED = 100


def _tracker(value: Any) -> Any:
    """Checks an entry of `tracking`; replaces a tracker by a dict if `Tracker.as_setting` returns a dict."""
    if isinstance(value, str):
        return _named(value)
    if isinstance(value, Mapping):
        given = dict(value)
        if not isinstance(given.get("name"), str):
            raise ValueError(
                f"tracking needs a 'name' in each dict, got {given!r}; add a name, as in {{'name': 'mlflow'}}"
            )
        _named(given["name"])
        return _without_secrets(given)
    if hasattr(value, "start") and not isinstance(value, type):
        plain = getattr(value, "as_setting", lambda: None)()
        return value if plain is None else _without_secrets(plain)
    if callable(value) and not isinstance(value, type):
        return value
    given_type = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    raise TypeError(
        "tracking must be a name, a dict with a name and options, a Tracker or a function that takes an "
        f"event, or a list of them, got {given_type}"
    )


def _without_secrets(given: dict[str, Any]) -> dict[str, Any]:
    """Refuses options with credentials, because the stage saves them and every tracker shows them."""
    for option, value in given.items():
        texts = list(value.values()) if isinstance(value, Mapping) else [value]
        for text in [text for text in texts if isinstance(text, str)]:
            if storage.redact_text(text) != text:
                remedy = _REMEDIES.get(option, "set it in the environment of the driver")
                raise ValueError(
                    f"tracking: {option} of {given['name']!r} must not hold a password or token, got "
                    f"{storage.redact_text(text)!r}; {remedy}"
                )
    return given


def _named(name: str) -> str:
    known = get_args(TrackerName)
    if name not in known and name not in list_entry_points(TRACKER_GROUP):
        check_name("tracking", name, known)
    return name


def _steps(value: Any) -> tuple[int, int]:
    """Returns (10, 13) for "10:13" or [10, 13]."""
    given = value.split(":") if isinstance(value, str) else value
    try:
        first, last = given
        is_whole = not any(isinstance(step, bool | float) for step in (first, last))
        steps = int(first), int(last)
    except (TypeError, ValueError):
        is_whole, steps = False, (0, 0)
    if not is_whole or not 1 <= steps[0] <= steps[1] < steps[0] + MOST_PROFILED:
        raise ValueError(
            f"profileSteps must be two step numbers, from 1, that span at most {MOST_PROFILED} steps, got "
            f"{value!r}; give them as '10:13'"
        )
    return steps


@dataclass(frozen=True, kw_only=True)
class Observation(Section):
    GROUP = "observation"
    MAY_DIFFER_ON_RESUME = True

    log_every_steps: NotNegative = setting(
        50, "steps between two records of the mean loss over all workers; 0: only per epoch"
    )
    timeline_every_steps: AtLeast1 | None = setting(
        None,
        "record a timeline every N optimizer steps, see `summary.timeline`; unset: none",
        remedy="leave it unset for no timeline",
    )
    profile_steps: tuple[int, int] | None = setting(
        None,
        "first and last optimizer step for torch.profiler on worker 0, such as '10:13'; unset: no profile",
        convert=_steps,
        rule_words=f"must be two step numbers, from 1, that span at most {MOST_PROFILED} steps",
    )


@dataclass(frozen=True, kw_only=True)
class Progress(Section):
    GROUP = "observation"
    ON_DRIVER = True

    show_progress: bool = setting(
        True, "whether the driver shows progress; the same as 'console' in tracking"
    )
    tracking: tuple[Any, ...] = setting(
        (),
        "trackers of the run: 'console', 'jsonl', 'mlflow', 'tensorboard', a dict of name and options, a "
        "Tracker or a function",
        convert=lambda value: tuple(map(_tracker, value if isinstance(value, list | tuple) else [value])),
    )
