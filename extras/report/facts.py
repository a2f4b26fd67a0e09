"""The content of a report."""

from __future__ import annotations

from dataclasses import dataclass

from ringspark.estimators.run.facts import RunFacts
from ringspark.extras.report.held_out.findings import HeldOut


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run, and its model's predictions for held-out rows; None if no rows were given."""

    run: RunFacts
    held_out: HeldOut | None = None
