"""The shards: sizes of the splits, types and statistics of the columns."""

from __future__ import annotations

from collections.abc import Sequence

from ringspark.estimators.training.run_environment import DataFacts
from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.extras.report.content import Block, Table, Text, shorten, show
from ringspark.extras.report.facts import RunFacts
from ringspark.pipelines.column_use import ColumnUse

MOST_ROWS = 120


def make(run: RunFacts) -> Sequence[Block]:
    data = run.data
    if data is None:
        return []
    title = "External table" if data.is_table else "Shards"
    skipped = f"{data.skipped_rows:,} rows were left out: they held a null or NaN, or could not be read."
    notes = [Text(skipped)] if data.skipped_rows else []
    uses = run.outcome.column_uses if run.outcome is not None else ()
    return [
        Text(f"{title}: {data.uri}"),
        _splits(data),
        *notes,
        _columns(data),
        *([_uses(uses)] if uses else []),
    ]


def _splits(data: DataFacts) -> Table:
    rows = [
        [
            split,
            show(sizes.rows),
            show(sizes.files),
            show_bytes(sizes.num_bytes),
            show(sizes.row_groups),
            " / ".join(f"{rows:,.0f}" for rows in sizes.group_rows),
        ]
        for split, sizes in data.splits.items()
    ]
    header = ["split", "rows", "files", "size", "row groups", "rows per group: min / median / max"]
    return Table(header, rows)


def _columns(data: DataFacts) -> Table:
    """Returns the table of columns; columns with missing or non-finite values come first."""

    def bad(name: str) -> int:
        found = [stats[name] for stats in data.stats.values() if name in stats]
        return sum(s.nulls + s.nans + s.infs for s in found)

    rows = []
    for column in sorted(data.columns, key=lambda column: -bad(column.name)):
        first, name = [shorten(text) for text in (column.name, column.kind, column.source)], column.name
        found = [(split, stats[name]) for split, stats in data.stats.items() if name in stats]
        if not found:
            rows.append([*first, *[""] * 7])
        for split, s in found:
            numbers = (s.nulls, s.nans + s.infs, s.minimum, s.maximum, s.mean, s.std)
            rows.append([*first, split, *map(show, numbers)])
            first = ["", "", ""]
    note = (
        "Statistics of the finite values; an array or vector column counts all its values together. Columns "
        "with missing or infinite values come first."
    )
    header = ["column", "in a batch", "Spark type", "split", "nulls", "NaN or infinite", "min", "max", "mean"]
    return Table([*header, "std"], rows, words=frozenset({0, 1, 2, 3}), note=note, most=MOST_ROWS)


def _uses(uses: Sequence[ColumnUse]) -> Table:
    """Returns a table of how an automatically chosen network uses each column of the DataFrame."""
    rows = [
        [shorten(use.column), use.type, show(use.distinct), f"{use.missing:.1%}", use.use, use.reason]
        for use in uses
    ]
    note = "How the network uses each column of the table."
    header = ["column of the table", "type", "values", "missing", "use", "why"]
    return Table(header, rows, words=frozenset({0, 1, 4, 5}), note=note, most=MOST_ROWS)
