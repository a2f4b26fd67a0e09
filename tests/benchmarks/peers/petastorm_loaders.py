"""Petastorm's loaders in job "reading", on the files written by Spark. The variant is the loader's class.

The loaders shuffle within a window of rows, which they fill from row groups in random order.
"""

from __future__ import annotations

import contest
import petastorm.pytorch
from petastorm import make_batch_reader

WINDOW_ROWS = 100_000


def contestant(entry: contest.Entry) -> contest.Figures:
    """Opens a reader for each epoch, as in Petastorm's examples."""

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
