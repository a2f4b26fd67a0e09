"""Shapes and dtypes of a batch, from a user's example or from the shards' manifest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ringspark.estimators.training.feed import network_dtype, zeros
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.pipelines import ShardManifest

_ARRAYS = (torch.Tensor, np.ndarray)


@dataclass(frozen=True, kw_only=True)
class BatchColumn:
    """One input or label of the network on a rank.

    Attributes:
        shape: (rows, ...).
        dtype: The `network_dtype` of the values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device | str) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def shard_columns(
    config: TrainConfig, manifest: ShardManifest, rows: int
) -> tuple[list[BatchColumn], list[BatchColumn]]:
    """Returns the inputs and the labels of `rows` rows; rows of varying length get the mean length."""

    def column(name: str) -> BatchColumn:
        array, count = manifest.described(name), rows
        described = zeros(array, 0)
        if array.offsets not in ("", name):
            stats = manifest.select("train").stats["train"][manifest.column_of(name).name]
            count = math.ceil(rows * stats.values / max(1, stats.rows))
        return BatchColumn(shape=(count, *described.shape[1:]), dtype=described.dtype)

    return [column(name) for name in config.input_columns], [column(name) for name in config.label_columns]


def columns_of(batch: Any, rows: int | None = None) -> tuple[list[BatchColumn], list[BatchColumn]]:
    """Returns the inputs and the labels of a batch; raises ValueError if `plan_memory` cannot take it."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError(
            "batch must be (inputs, labels), each a tensor, an array, (shape, dtype) or a list of these, "
            f"got {_describe(batch)}"
        )
    if rows is not None and rows < 1:
        raise ValueError(f"rows must be at least 1 per worker, got {rows}")
    inputs, labels = ([_column(entry, rows) for entry in _as_list(side)] for side in batch)
    counts = sorted({column.shape[0] for column in (*inputs, *labels)})
    if not inputs or not labels or len(counts) != 1 or counts[0] < 1:
        raise ValueError(
            f"inputs and labels of a batch must have the same number of rows, at least 1, got {counts}; "
            "the rows are their first dimension"
        )
    return inputs, labels


def _as_list(side: Any) -> list[Any]:
    is_one = isinstance(side, _ARRAYS) or _is_spec(side)
    return [side] if is_one or not isinstance(side, list | tuple) else list(side)


def _is_spec(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], tuple | list | torch.Size)
        and all(isinstance(n, int) for n in value[0])
        and not isinstance(value[1], (*_ARRAYS, tuple, list))
    )


def _column(entry: Any, rows: int | None) -> BatchColumn:
    if isinstance(entry, _ARRAYS):
        shape, dtype = tuple(entry.shape), entry.dtype
    elif _is_spec(entry):
        shape, dtype = tuple(entry[0]), entry[1]
    else:
        raise ValueError(
            f"a column of a batch must be a tensor, a NumPy array or (shape, dtype), got {_describe(entry)}"
        )
    if not shape:
        raise ValueError("a column of a batch must have its rows as first dimension, got a single number")
    if isinstance(dtype, torch.dtype):
        # NumPy has no bfloat16; bool, int or float suffices to find the network's dtype.
        dtype = type(torch.zeros((), dtype=dtype).item())
    known = torch.from_numpy(np.zeros(0, network_dtype(dtype)))
    return BatchColumn(shape=(rows or shape[0], *shape[1:]), dtype=known.dtype)


def _describe(value: Any) -> str:
    return type(value).__name__ + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
