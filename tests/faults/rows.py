"""Which rows were trained, in which step, how often: the ranks' diaries put together.

A step that was trained again after a restart counts as it was trained last. Where the gang had the same
size, the repeated step must have seen the same rows on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

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


def read_lines(folder: Path) -> list[Line]:
    """All complete lines by time; a kill may have cut the last of a file."""
    lines = []
    for path in folder.glob("rank-*.jsonl"):
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                lines.append(json.loads(text))
    return sorted(lines, key=lambda line: float(line["time"]))


def steps_of(lines: Iterable[Line], rank: int = 0) -> list[Line]:
    """The lines of one rank's steps."""
    return [line for line in lines if line["what"] == "step" and line["rank"] == rank]


def longest_pause(lines: Iterable[Line], fault: float) -> float:
    """Seconds until training again: the longest time without a step of rank 0 since the fault.

    It begins at the fault itself where no step ends between the fault and the pause.
    """
    times = [fault, *(line["time"] for line in steps_of(lines) if line["time"] > fault)]
    return max((after - before for before, after in pairwise(times)), default=0.0)


def check(lines: list[Line], num_rows: int) -> Trained:
    """Whether each epoch that was trained saw rows 0..num_rows-1, each exactly once."""
    trained: dict[tuple[int, int], list[dict[int, Line]]] = {}
    began: dict[int, float] = {}
    for line in lines:
        if line["what"] == "start":
            began[line["rank"]] = line["time"]
        if line["what"] != "step":
            continue
        tries = trained.setdefault((line["epoch"], line["step"]), [{}])
        # Of an earlier gang: one that was ended in this step may have only some ranks' lines of it.
        of_others = any(
            other["size"] != line["size"] or other["time"] < began.get(line["rank"], 0.0)
            for other in tries[-1].values()
        )
        if line["rank"] in tries[-1] or of_others:
            tries.append({})
        tries[-1][line["rank"]] = line
    problems = []
    epochs: dict[int, list[int]] = {}
    for (epoch, step), tries in sorted(trained.items()):
        last = tries[-1]
        if len(last) != next(iter(last.values()))["size"]:
            problems.append(f"step {step} was trained last by the ranks {sorted(last)} only")
        ids = [row for line in last.values() for row in line["ids"]]
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
