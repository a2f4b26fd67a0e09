"""Which rows were trained, in which step, how often: the ranks' diaries put together.

A step that was trained again after a restart counts as it was trained last. Where the gang had the same
size, the repeated step must have seen the same rows on every rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

# Ranks that are one copy of a network have the same `share` of the rows; without one, each has its own.
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What the diaries say about one training.

    Attributes:
        problems: Sentences; empty where every epoch saw every row once.
        steps: Different steps trained.
        repeated: Steps trained more than once, each time counted.
    """

    problems: list[str]
    steps: int
    repeated: int


class Diaries:
    """The lines of one training while it writes them; what was read is not read again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._lines: list[Line] = []

    def read(self) -> list[Line]:
        """All complete lines by time; a kill may have cut the last of a file."""
        for path in self._folder.glob("rank-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._offsets[path] = self._offsets.get(path, 0) + len(whole) + 1
                self._lines += map(json.loads, whole.split(b"\n"))
        self._lines.sort(key=lambda line: float(line["time"]))
        return list(self._lines)


def steps_of(lines: Iterable[Line], rank: int = 0) -> list[Line]:
    """The lines of one rank's steps."""
    return [line for line in lines if line["what"] == "step" and line["rank"] == rank]


def longest_pause(lines: Iterable[Line], fault: float, end: float = math.inf) -> float:
    """Seconds until training again: the longest time without a step of rank 0 between fault and end.

    It begins at the fault itself where no step ends between the fault and the pause.
    """
    times = [fault, *(line["time"] for line in steps_of(lines) if fault < line["time"] <= end)]
    return max((after - before for before, after in pairwise(times)), default=0.0)


def repeated(lines: Iterable[Line], fault: float, end: float = math.inf) -> int:
    """Steps of rank 0 between fault and end that had been trained before them or are trained twice there."""
    known = {line["step"] for line in steps_of(lines) if line["time"] <= fault}
    count = 0
    for line in steps_of(lines):
        if fault < line["time"] <= end:
            count += line["step"] in known
            known.add(line["step"])
    return count


def check(lines: list[Line], num_rows: int) -> Trained:
    """Whether each epoch that was trained saw rows 0..num_rows-1, each exactly once."""
    trained: dict[tuple[int, int], list[dict[int, Line]]] = {}
    began: dict[int, float] = {}  # of a rank, its last start
    before: dict[int, float] = {}  # of a rank, its last line before that start
    last: dict[int, float] = {}
    begun: dict[int, float] = {}  # of a line by its identity, the start before it
    for line in lines:
        rank = line["rank"]
        if line["what"] == "start":
            began[rank], before[rank] = line["time"], last.get(rank, -math.inf)
        last[rank] = line["time"]
        if line["what"] != "step":
            continue
        begun[id(line)] = began.get(rank, -math.inf)
        tries = trained.setdefault((line["epoch"], line["step"]), [{}])
        # Of an earlier gang: one that was ended in this step may have only some ranks' lines of it. A rank of
        # the same gang may be steps ahead where they run apart, but it started after this one's last line.
        of_others = any(
            other["size"] != line["size"]
            or (other["time"] < began.get(rank, 0.0) and begun[id(other)] < before.get(rank, -math.inf))
            for other in tries[-1].values()
        )
        if rank in tries[-1] or of_others:
            tries.append({})
        tries[-1][rank] = line
    problems = []
    epochs: dict[int, list[int]] = {}
    for (epoch, step), tries in sorted(trained.items()):
        last = tries[-1]
        if len(last) != next(iter(last.values()))["size"]:
            problems.append(f"step {step} was trained last by the ranks {sorted(last)} only")
        shares: dict[int, list[int]] = {}
        for rank, line in sorted(last.items()):
            if line["ids"] != shares.setdefault(line.get("share", rank), line["ids"]):
                problems.append(f"rank {rank} saw other rows in step {step} than others of its copy")
        ids = [row for own in shares.values() for row in own]
        epochs.setdefault(epoch, []).extend(ids)
        problems += _differences(step, tries)
    for epoch, ids in epochs.items():
        if sorted(ids) != list(range(num_rows)):
            repeated, missing = len(ids) - len(set(ids)), num_rows - len(set(ids))
            problems.append(f"epoch {epoch} saw {repeated} rows twice and {missing} not at all")
    numbers = [step for _, step in trained]
    if sorted(numbers) != list(range(1, len(numbers) + 1)):
        problems.append("the steps are not 1, 2, 3, ... or belong to two epochs")
    repeated = len(steps_of(lines)) - len({line["step"] for line in steps_of(lines)})
    return Trained(problems=problems, steps=len(numbers), repeated=repeated)


def _differences(step: int, tries: list[dict[int, Line]]) -> list[str]:
    """Ranks that saw other rows when a step was repeated by as many ranks."""
    last = tries[-1]
    return [
        f"rank {rank} saw other rows in the repetition of step {step}"
        for earlier in tries[:-1]
        for rank, line in earlier.items()
        if rank in last and last[rank]["size"] == line["size"] and last[rank]["ids"] != line["ids"]
    ]
