"""Facts about a run's data, kept when the shards are deleted: the manifest without its list of files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ringspark.pipelines import ShardManifest
from ringspark.pipelines.column_stats import ColumnStats
from ringspark.pipelines.manifest import SPLITS
from ringspark.pipelines.typed_json import JsonText


@dataclass(frozen=True, kw_only=True)
class SplitFacts:
    rows: int
    files: int
    num_bytes: int
    row_groups: int
    group_rows: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    name: str
    kind: str
    source: str


@dataclass(frozen=True, kw_only=True)
class DataFacts(JsonText):
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
            stats={split: dict(columns) for split, columns in manifest.stats.items()},
            skipped_rows=manifest.skipped_rows,
            is_table=manifest.table is not None,
        )


def _sizes(view: ShardManifest) -> SplitFacts:
    groups: Sequence[int] = view.row_groups
    return SplitFacts(
        rows=view.num_rows,
        files=len(view.files),
        num_bytes=sum(file.num_bytes for file in view.files),
        row_groups=len(groups),
        group_rows=(min(groups), median(groups), max(groups)) if groups else (),
    )
