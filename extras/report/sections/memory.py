"""Memory of the ranks. The section is omitted if the memory is unknown."""

from __future__ import annotations

from collections.abc import Sequence

from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.extras.report.content import Block, Facts, Section, Table

MOST_RANKS = 40


def _make(facts: Facts) -> Sequence[Block]:
    starts = facts.run.environment.starts
    if not starts or not any(rank.peak_memory for rank in starts[-1].ranks):
        return []
    ranks = list(enumerate(starts[-1].ranks))
    shown = sorted(ranks, key=lambda entry: -entry[1].peak_memory)[:MOST_RANKS]
    rows = [
        [
            f"{number}",
            rank.host,
            show_bytes(rank.peak_memory),
            show_bytes(rank.peak_device_memory) if rank.peak_device_memory else "",
            show_bytes(rank.host_memory),
        ]
        for number, rank in shown
    ]
    note = (
        "A rank's process is a Python worker, including libraries, that Spark may have used before; ranks of "
        "one host may share pages."
    )
    if len(ranks) > len(shown):
        note += f" The {MOST_RANKS} largest of {len(ranks):,} ranks are shown."
    header = ["rank", "host", "peak of its process", "peak of its GPU", "memory of the host"]
    return [Table(header, rows, words=frozenset({1}), note=note)]


SECTION = Section(name="memory", title="Memory", make=_make)
