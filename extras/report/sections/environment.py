"""The last launch of the training: versions, hosts, devices and memory; one line for each earlier launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone

from ringspark.estimators.training.run_environment import GangStart
from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.extras.report.content import Block, Table, show
from ringspark.extras.report.facts import RunFacts


def make(run: RunFacts) -> Sequence[Block]:
    starts = run.environment.starts
    if not starts:
        return []
    last = starts[-1]
    versions = [["began", _time(last)], ["system", last.system], *map(list, last.versions.items())]
    versions.append(["folder", run.run_uri])
    blocks: list[Block] = [Table(["", "value on rank 0"], versions, words=frozenset({0, 1})), _hosts(last)]
    if len(starts) > 1:
        rows = []
        for start in reversed(starts):
            hosts = sorted({note.host for note in start.ranks})
            more = f" and {len(hosts) - 5:,} more" if len(hosts) > 5 else ""
            rows.append([_time(start), show(len(start.ranks)), ", ".join(hosts[:5]) + more])
        title = "All starts, the newest first"
        blocks.append(Table(["began", "ranks", "hosts"], rows, words=frozenset({0, 2}), title=title))
    return blocks


def _hosts(start: GangStart) -> Table:
    ranks = Counter(note.host for note in start.ranks)
    first = {note.host: note for note in reversed(start.ranks)}
    rows = []
    for host, count in ranks.most_common():
        devices = Counter(note.device for note in start.ranks if note.host == host)
        names = ", ".join(f"{number} x {device}" for device, number in devices.items())
        rows.append([host, show(count), names, show(first[host].cores), show_bytes(first[host].host_memory)])
    header = ["host", "ranks", "devices", "cores per rank", "memory"]
    return Table(header, rows, words=frozenset({0, 2}))


def _time(start: GangStart) -> str:
    return datetime.fromtimestamp(start.began, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def make_memory(run: RunFacts) -> Sequence[Block]:
    starts = run.environment.starts
    if not starts or not any(rank.peak_memory for rank in starts[-1].ranks):
        return []
    ranks = sorted(enumerate(starts[-1].ranks), key=lambda entry: -entry[1].peak_memory)
    rows = [
        [
            f"{number}",
            rank.host,
            show_bytes(rank.peak_memory),
            show_bytes(rank.peak_device_memory) if rank.peak_device_memory else "",
            show_bytes(rank.host_memory),
        ]
        for number, rank in ranks
    ]
    note = (
        "The peak of the process includes its libraries, and earlier tasks if Spark reused the Python "
        "worker. Ranks on one host may share memory pages."
    )
    header = ["rank", "host", "peak of the process", "peak of the GPU", "memory of the host"]
    return [Table(header, rows, words=frozenset({1}), note=note)]
