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
        "The peak of the process includes its libraries, and earlier tasks if Spark reused the Python "
        "worker. Ranks on one host may share memory pages."
    )
    if len(ranks) > len(shown):
        note += f" The {MOST_RANKS} largest of {len(ranks):,} ranks are shown."
    header = ["rank", "host", "peak of the process", "peak of the GPU", "memory of the host"]
    return [Table(header, rows, words=frozenset({1}), note=note)]


SECTION = Section(name="memory", title="Memory", make=_make)
