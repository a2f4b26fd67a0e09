"""Faults of a run: restarts, failed checkpoints, and steps with losses or gradients that were not finite."""

from __future__ import annotations

from collections.abc import Sequence

from ringspark.extras.report.content import Block, Table, Text, first_and_last, shorten, show
from ringspark.extras.report.facts import RunFacts, failure_of

MOST = 30


def make(run: RunFacts) -> Sequence[Block]:
    blocks: list[Block] = []
    none = "Restarts and their reasons are recorded when a run finishes."
    if (outcome := run.outcome) is not None:
        none = "None: no restart, no failed checkpoint, no step with a loss or gradient that was not finite."
        lists = [
            ("Restarts of the workers, and why", outcome.restart_reasons),
            ("Workers that the cluster took away", outcome.preemption_reasons),
            ("Resumed from", [f"step {step:,}" for step in outcome.resumed_steps]),
            ("Checkpoints that could not be written", outcome.checkpoint_errors),
            ("Steps whose loss or gradient was not finite", outcome.non_finite),
        ]
        blocks.extend(_listed(title, entries) for title, entries in lists if entries)
    if skipped := sum(record.skipped_steps for record in run.history):
        sentence = f"{skipped:,} steps changed no weights, because their loss or gradients were not finite."
        blocks.append(Text(sentence))
    if run.heartbeats and outcome is None:
        rows = [
            [show(beat.rank), beat.host, beat.phase, shorten(failure_of(beat), 400)]
            for beat in run.heartbeats
        ]
        header, title = ["rank", "host", "last phase", "failure"], "Last heartbeats of the ranks"
        blocks.append(Table(header, rows, words=frozenset({1, 2, 3}), title=title))
    return blocks or [Text(none)]


def _listed(title: str, entries: Sequence[str]) -> Table:
    places = first_and_last(len(entries), MOST)
    left_out = len(entries) - len(places)
    note = f"{left_out:,} of {len(entries):,} entries, from the middle, are not shown." if left_out else ""
    rows = [[show(place + 1), shorten(entries[place], 600)] for place in places]
    return Table(["", title], rows, words=frozenset({0, 1}), note=note)
