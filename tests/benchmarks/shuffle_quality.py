"""Shuffle quality: distance of an epoch's order from a full permutation, for several shapes of row groups.

The rows are sorted in the files, which is the hardest case, because any remaining order is visible.

- rank correlation: Spearman's, between the position in the files and the position in the epoch;
- neighbours: share of rows adjacent in the files that are adjacent in the epoch, in either order;
- same batch: share of rows adjacent in the files that are in one batch;
- spread: standard deviation of the batches' mean value, which is the position in the files, divided
  by the standard deviation for independent samples. A batch takes rows from one row group per stream. So with
  many row groups and sorted data, the spread is sqrt(batch / 48) times the spread of a full permutation. It
  is equal if the row groups are alike.

`--repeats` is the number of epochs per mean.
"""

from __future__ import annotations

import harness
import numpy as np
import numpy.typing as npt

from ringspark.pipelines import EpochPlan, plan_epoch
from ringspark.pipelines.shuffle import permutation

Order = npt.NDArray[np.int64]

BATCH_SIZE = 1024
# Name -> sizes of the row groups.
SHAPES = {
    "8 groups of 24,000": [24_000] * 8,
    "48 groups of 4,000": [4_000] * 48,
    "960 groups of 200": [200] * 960,
    "19,200 groups of 10": [10] * 19_200,
    "uneven, 1 to 16,000": [16_000, 1, 3_000, 40, 0, 5_000, 700, 8_000, 90, 2_500] * 6,
}


def order_of(plan: EpochPlan) -> Order:
    """Returns each row's position in the files, in the order of the epoch."""
    order = np.full(plan.num_rows, -1, dtype=np.int64)
    first_rows = np.cumsum(plan.row_groups) - plan.row_groups
    for shard in range(plan.num_shards):
        part = plan.shard(shard)
        for read in part.reads():
            for span, rows in zip(read.slices, part.rows(read), strict=True):
                stream = part.deal.streams[span.stream]
                positions = stream.position + part.deal.rows(span.stream, span.start, span.stop) * stream.step
                order[positions] = first_rows[read.row_group] + rows
    return order


def group_order_only(plan: EpochPlan) -> Order:
    """Returns row groups in the epoch's order, with rows in the files' order: no streams."""
    stops = np.cumsum(plan.row_groups)
    groups = plan.group_order.tolist()
    return np.concatenate([np.arange(stops[g] - plan.row_groups[g], stops[g]) for g in groups])


def rank_correlation(order: Order) -> float:
    """Returns Spearman's rank correlation of the positions before and after, which are ranks already."""
    return float(np.corrcoef(order, np.arange(len(order)))[0, 1])


def neighbours(order: Order) -> float:
    """Returns the share of adjacent pairs that stay adjacent. The mean of a full permutation is 2 / rows."""
    return float(np.mean(np.abs(np.diff(order)) == 1))


def same_batch(order: Order, batch_size: int) -> float:
    """Returns the share of adjacent pairs that are in one batch afterwards."""
    batch = np.empty(len(order), dtype=np.int64)
    batch[order] = np.arange(len(order)) // batch_size
    return float(np.mean(batch[1:] == batch[:-1]))


def spread(order: Order, batch_size: int) -> float:
    """Returns the deviation of the full batches' means, divided by the deviation for independent samples."""
    means = order[: len(order) // batch_size * batch_size].reshape(-1, batch_size).mean(axis=1)
    return float(means.std() / (order.std() / np.sqrt(batch_size)))


def orders(row_groups: list[int], epoch: int) -> dict[str, Order]:
    """Returns the compared orders of one epoch."""
    plan = plan_epoch(row_groups, num_shards=1, batch_size=BATCH_SIZE, epoch=epoch, seed=0)
    return {
        "no shuffle": np.arange(plan.num_rows),
        "row-group order only": group_order_only(plan),
        "ringspark": order_of(plan),
        "full permutation": permutation(plan.num_rows, 1, epoch),
    }


def main() -> None:
    """Prints a table for every shape."""
    options = harness.parse(__doc__, shapes=(len(SHAPES), 2))
    for shape, row_groups in list(SHAPES.items())[: options.shapes]:
        figures: dict[str, list[list[float]]] = {}
        for epoch in range(options.repeats):
            for name, order in orders(row_groups, epoch).items():
                figures.setdefault(name, []).append(
                    [
                        abs(rank_correlation(order)),
                        neighbours(order),
                        same_batch(order, BATCH_SIZE),
                        spread(order, BATCH_SIZE),
                    ]
                )
        harness.print_table(
            f"shuffle_quality: {shape} rows, batches of {BATCH_SIZE}, mean of {options.repeats} epochs",
            ["", "|rank correlation|", "neighbours", "same batch", "spread"],
            [
                [name, *(f"{value:.{digits}f}" for value, digits in zip(means, (4, 6, 5, 2), strict=True))]
                for name, values in figures.items()
                for means in [np.mean(values, axis=0).tolist()]
            ],
        )


if __name__ == "__main__":
    main()
