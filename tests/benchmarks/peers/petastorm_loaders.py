"""Petastorm's loaders in job "reading", over the files that Spark wrote; the variant is the loader's class.

A window of rows is mixed, filled from row groups in a new order: the loaders' way of shuffling.
"""

from __future__ import annotations

import contest
import petastorm.pytorch
from petastorm import make_batch_reader

WINDOW_ROWS = 100_000


def contestant(entry: contest.Entry) -> contest.Figures:
    """A reader for each epoch, as Petastorm's own examples open it."""

    def read(_: int) -> int:
        reader = make_batch_reader(f"file://{entry.numbers}")
        make_loader = getattr(petastorm.pytorch, entry.variant)
        with make_loader(
            reader, batch_size=contest.BATCH_SIZE, shuffling_queue_capacity=WINDOW_ROWS
        ) as loader:
            return sum(len(batch["label"]) for batch in loader)

    return contest.measure_reading(entry, read)


if __name__ == "__main__":
    contest.run(contestant)
