"""Settings of what a training records about its own time."""

from __future__ import annotations

from typing import Any

from ringspark.estimators.training.settings.declaration import Range, Setting, at_least

# A profile holds every operation of its steps, in memory until the last one has ended.
MOST_PROFILED = 100


def _steps(value: Any) -> list[int]:
    """Returns the first and the last step of "10:13" or [10, 13].

    Raises:
        TypeError: The value has another form.
    """
    given = value.split(":") if isinstance(value, str) else value
    try:
        first, last = given
        if any(isinstance(step, bool | float) for step in (first, last)):
            raise TypeError
        return [int(first), int(last)]
    except (TypeError, ValueError):
        raise TypeError(
            f"profileSteps must be two steps, as '10:13' or [10, 13], got {value!r}; both are profiled, and "
            "those between them"
        ) from None


TIMELINE_EVERY_STEPS = Setting[int | None](
    name="timelineEverySteps",
    field="timeline_every_steps",
    words="every how many optimizer steps each worker records where the time of the step went, see "
    "`summary.timeline`; unset: no timeline",
    kind="int",
    accepts=at_least(1, remedy="leave it unset for no timeline"),
    may_differ_on_resume=True,
)
PROFILE_STEPS = Setting[Any](
    name="profileSteps",
    field="profile_steps",
    words="first and last optimizer step, '10:13' or [10, 13], over which torch.profiler watches worker 0; "
    "unset: no profile",
    convert=_steps,
    accepts=Range(
        lambda steps: 1 <= steps[0] <= steps[1] < steps[0] + MOST_PROFILED,
        lambda: f"must be first and last of at most {MOST_PROFILED} steps, counted from 1",
        "; give a few steps, as in '10:13'",
    ),
    may_differ_on_resume=True,
)
