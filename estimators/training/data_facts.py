"""The facts of a run's data: its manifest without the list of files.

They outlive the shards, which a fit without `runUri` removes at its end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from ringspark.pipelines import ShardManifest
from ringspark.pipelines.column_stats import ColumnStats
from ringspark.pipelines.manifest import SPLITS
from ringspark.pipelines.typed_json import parse_object, record


@dataclass(frozen=True, kw_only=True)
class SplitFacts:
    """Sizes of one split.

    Attributes:
        row_groups: Number of row groups; for a table, of windows in its files' row groups.
        group_rows: Rows of the smallest, the median and the largest row group; empty without any.
    """

    rows: int
    files: int
    num_bytes: int
    row_groups: int
    group_rows: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    """Name, column type and Spark type of one column."""

    name: str
    kind: str
    source: str


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Facts of one set of shards.

    Attributes:
        splits: Splits with rows, by name.
        stats: Split -> column name -> statistics.
        is_table: Whether the files are a table that another program wrote.
    """

    uri: str
    columns: tuple[ColumnFacts, ...]
    splits: dict[str, SplitFacts]
    stats: dict[str, dict[str, ColumnStats]]
    skipped_rows: int
    is_table: bool = False

    @classmethod
    def of(cls, manifest: ShardManifest) -> DataFacts:
        found = {split: manifest.select(split) for split in SPLITS}
        return cls(
            uri=manifest.uri,
            columns=tuple(
                ColumnFacts(name=column.name, kind=str(column.kind), source=column.source)
                for column in manifest.columns
            ),
            splits={split: _sizes(view) for split, view in found.items() if view.files},
            stats={
                split: {name: stats.without_overflows() for name, stats in columns.items()}
                for split, columns in manifest.stats.items()
            },
            skipped_rows=manifest.skipped_rows,
            is_table=manifest.table is not None,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> DataFacts:
        """Parses the result of `to_json`; raises ValueError if it is damaged."""
        return record(cls, parse_object(text))


def _sizes(view: ShardManifest) -> SplitFacts:
    groups: Sequence[int] = view.row_groups
    return SplitFacts(
        rows=view.num_rows,
        files=len(view.files),
        num_bytes=sum(file.num_bytes for file in view.files),
        row_groups=len(groups),
        group_rows=(min(groups), median(groups), max(groups)) if groups else (),
    )
