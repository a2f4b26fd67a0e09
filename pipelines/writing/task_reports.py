"""Merges the reports of a write's tasks into one manifest, and logs the tasks' warnings."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ringspark.pipelines.column_stats import ColumnStats
from ringspark.pipelines.columns import MASK
from ringspark.pipelines.kinds import Kind, Vector
from ringspark.pipelines.kinds.base import Shape
from ringspark.pipelines.manifest import SPLITS, ShardFile, ShardManifest
from ringspark.pipelines.writing.shard_writer import WritePlan, merge_shapes

# Beyond 2^24, float32 does not hold every whole number.
_FLOAT32_WHOLE = 1 << 24

_logger = logging.getLogger(__name__)

Report = dict[str, Any]
"""Report of a task about its rows, made by `write_partition`."""


def join_reports(plan: WritePlan, reports: Sequence[Report], files: Sequence[ShardFile]) -> ShardManifest:
    names = [column.name for column in plan.stored_columns]
    nulls = {
        column.name: sum(report["nulls"][index] for report in reports)
        for index, column in enumerate(plan.columns)
        if plan.handle_invalid[index] == "keep"
    }
    stats: dict[str, dict[str, ColumnStats]] = {}
    for split in SPLITS:
        merged = {name: ColumnStats() for name in names}
        for report in reports:
            for name, part in zip(names, report["stats"][split], strict=True):
                if part["rows"]:
                    merged[name] = merged[name].merge(ColumnStats(**part))
        for name in nulls:
            mask = merged[name + MASK]
            merged[name] = replace(merged[name], nulls=round((mask.mean or 0) * mask.rows))
        if split == "train" or merged[names[0]].rows:
            stats[split] = merged
    if not stats["train"][names[0]].rows:
        seen = sum(report["rows"] for report in reports)
        skipped = sum(report["skipped"] for report in reports)
        counts = f" (of {seen} rows, {seen - skipped} are for validation, {skipped} are skipped)"
        raise ValueError(
            f"the DataFrame has no training rows{counts if seen else ''}; nothing was written; check the "
            "filters"
        )
    settled: dict[str, Kind] = {}
    for index, column in enumerate(plan.columns):
        shapes: tuple[Shape, Shape] | None = None
        for report in reports:
            if report["shapes"][index] is not None:
                low, high = report["shapes"][index]
                shapes = merge_shapes(shapes, (tuple(low), tuple(high)))
        settled[column.name] = column.kind.settle(column.name, shapes, nullable=bool(nulls.get(column.name)))
    _warn_of_rounding(plan, stats)
    _warn_of_unread(plan, reports)
    return ShardManifest(
        uri=plan.uri,
        columns=tuple(replace(c, kind=settled.get(c.name, c.kind)) for c in plan.stored_columns),
        files=tuple(files),
        stats=stats,
        skipped_rows=sum(report["skipped"] for report in reports),
    )


def _warn_of_unread(plan: WritePlan, reports: Sequence[Report]) -> None:
    for index, column in enumerate(plan.columns):
        found = [report["unread"][index] for report in reports if report["unread"][index][0]]
        if found:
            _logger.warning(
                "%d rows were left out because their column %r cannot be read; the first of them %s",
                sum(count for count, _ in found),
                column.name,
                found[0][1],
            )


def _warn_of_rounding(plan: WritePlan, stats: Mapping[str, Mapping[str, ColumnStats]]) -> None:
    for column in plan.columns:
        if not isinstance(column.kind, Vector) or column.kind.dtype != "float32":
            continue
        bounds = [
            abs(value)
            for part in stats.values()
            for value in (part[column.name].minimum, part[column.name].maximum)
            if value is not None
        ]
        remedy = f"pass columns={{{column.name!r}: Vector('float64')}} to write_shards, or scale them first"
        if infs := sum(part[column.name].infs for part in stats.values()):
            _logger.warning(
                "column %r holds %d infinite values as float32, whose largest number is 3.4e38; %s",
                column.name, infs, remedy,
            )  # fmt: skip
        # Ids do not belong into a float32 vector.
        if bounds and max(bounds) >= _FLOAT32_WHOLE:
            _logger.warning(
                "column %r holds values up to %g as float32, exact for whole numbers only up to %d; %s",
                column.name, max(bounds), _FLOAT32_WHOLE, remedy,
            )  # fmt: skip
