"""Versions, hosts and devices of the last launch of the training; one line for each earlier launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone

from ringspark.estimators.training.run_environment import GangStart
from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.extras.report.content import Block, Facts, Section, Table, show

MOST_HOSTS = 40


def _make(facts: Facts) -> Sequence[Block]:
    starts = facts.run.environment.starts
    if not starts:
        return []
    last = starts[-1]
    versions = [["began", _time(last)], ["system", last.system], *map(list, last.versions.items())]
    versions.append(["folder", facts.run.run_uri])
    blocks: list[Block] = [Table(["", "value on rank 0"], versions, words=frozenset({0, 1})), _hosts(last)]
    if len(starts) > 1:
        rows = []
        for start in starts:
            hosts = sorted({note.host for note in start.ranks})
            more = f" and {len(hosts) - 5:,} more" if len(hosts) > 5 else ""
            rows.append([_time(start), show(len(start.ranks)), ", ".join(hosts[:5]) + more])
        blocks.append(Table(["began", "ranks", "hosts"], rows, words=frozenset({0, 2}), title="All starts"))
    return blocks


def _hosts(start: GangStart) -> Table:
    ranks = Counter(note.host for note in start.ranks)
    first = {note.host: note for note in reversed(start.ranks)}
    rows = []
    for host, count in ranks.most_common(MOST_HOSTS):
        devices = Counter(note.device for note in start.ranks if note.host == host)
        names = ", ".join(f"{number} x {device}" for device, number in devices.items())
        rows.append([host, show(count), names, show(first[host].cores), show_bytes(first[host].host_memory)])
    more = len(ranks) - MOST_HOSTS
    note = f"{more:,} more hosts are not shown." if more > 0 else ""
    header = ["host", "ranks", "devices", "cores per rank", "memory"]
    return Table(header, rows, words=frozenset({0, 2}), note=note)


def _time(start: GangStart) -> str:
    return datetime.fromtimestamp(start.began, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


SECTION = Section(name="environment", title="Environment", make=_make)
