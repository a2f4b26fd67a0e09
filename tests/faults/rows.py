"""The trained rows by step, from the diaries of all ranks; the last training of a repeated step counts."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

# Ranks of one replica have the same `share` of the rows; without the key, each rank has its own share.
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Summary of the diaries of one training.

    Attributes:
        problems: Messages; empty if every epoch saw every row once.
        steps: Distinct trained steps.
        repeated: Repetitions of steps.
    """

    problems: list[str]
    steps: int
    repeated: int


class Diaries:
    """The lines of a running training; each line is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._lines: list[Line] = []

    def read(self) -> list[Line]:
        """Returns all complete lines by time. A kill may have cut the last line of a file."""
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
    return [line for line in lines if line["what"] == "step" and line["rank"] == rank]


def longest_pause(lines: Iterable[Line], fault: float, end: float = math.inf) -> float:
    """Returns the longest time without a step of rank 0 between fault and end, in seconds.

    The pause begins at the fault if no step ends between the fault and the pause.
    """
    times = [fault, *(line["time"] for line in steps_of(lines) if fault < line["time"] <= end)]
    return max((after - before for before, after in pairwise(times)), default=0.0)


def repeated(lines: Iterable[Line], fault: float, end: float = math.inf) -> int:
    """Returns steps of rank 0 between fault and end that were trained before, or twice there."""
    known = {line["step"] for line in steps_of(lines) if line["time"] <= fault}
    count = 0
    for line in steps_of(lines):
        if fault < line["time"] <= end:
            count += line["step"] in known
            known.add(line["step"])
    return count


def check(lines: list[Line], num_rows: int) -> Trained:
    """Checks that each trained epoch saw rows 0..num_rows-1, each exactly once."""
    trained: dict[tuple[int, int], list[dict[int, Line]]] = {}
    began: dict[int, float] = {}  # rank -> its last start
    before: dict[int, float] = {}  # rank -> its last line before that start
    last: dict[int, float] = {}
    begun: dict[int, float] = {}  # id of a line -> the start before it
    for line in lines:
        rank = line["rank"]
        if line["what"] == "start":
            began[rank], before[rank] = line["time"], last.get(rank, -math.inf)
        last[rank] = line["time"]
        if line["what"] != "step":
            continue
        begun[id(line)] = began.get(rank, -math.inf)
        tries = trained.setdefault((line["epoch"], line["step"]), [{}])
        # An earlier gang that ended in this step may have only some ranks' lines of it. With local SGD, a
        # rank of the same gang may be steps ahead, but it started after this rank's last line.
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
    """Returns ranks that saw other rows when the same number of ranks repeated a step."""
    last = tries[-1]
    return [
        f"rank {rank} saw other rows in the repetition of step {step}"
        for earlier in tries[:-1]
        for rank, line in earlier.items()
        if rank in last and last[rank]["size"] == line["size"] and last[rank]["ids"] != line["ids"]
    ]
