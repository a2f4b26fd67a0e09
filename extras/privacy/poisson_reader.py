"""Samples rows as the accountants assume: each row is in each step with probability q, independently.

Each rank reads its share of the rows once and keeps it. In every step it samples from its own rows, so the
ranks need no common random numbers. The number of rows differs between steps and may be 0.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.privacy.secret_noise import secret_generator
from ringspark.pipelines.manifest import ShardManifest
from ringspark.pipelines.readers import Batch, ShardReader

# Share of the free memory that the rows of all ranks of a host may take with cache="auto".
_MEMORY_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class PoissonPlan:
    """The steps of one epoch. A step has `batch_size` rows over all shards on average."""

    num_rows: int
    batch_size: int

    @property
    def num_steps(self) -> int:
        return -(-self.num_rows // self.batch_size)

    @property
    def sample_rate(self) -> float:
        """Probability with which a step contains a row."""
        return self.batch_size / self.num_rows

    def global_rows(self, step: int) -> int:
        """Returns the expected number of rows; the real number must stay secret."""
        return self.batch_size


def plan_poisson(num_rows: int, batch_size: int) -> PoissonPlan:
    """Plans an epoch; raises ValueError if a step would sample rows with a probability above 1."""
    if batch_size > num_rows:
        raise ValueError(
            f"privacy samples each row with probability batchSize / rows, so batchSize ({batch_size}) must "
            f"not exceed the {num_rows} training rows; lower batchSize"
        )
    return PoissonPlan(num_rows=num_rows, batch_size=batch_size)


class PoissonReader:
    """Reads the rows of one shard once, and then yields random batches of them."""

    def __init__(self, reader: ShardReader, config: TrainConfig) -> None:
        self.manifest: ShardManifest = reader.manifest
        self._plan = plan_poisson(reader.manifest.num_rows, config.batch_size)
        self._rows, self._columns = _read(reader, config.cache)
        reader.close()

    @property
    def num_steps(self) -> int:
        return self._plan.num_steps

    def plan(self, epoch: int) -> PoissonPlan:
        return self._plan

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Yields one sample of the shard's rows per step; every call gives other samples."""
        for _ in range(start_step, self.num_steps):
            generator = secret_generator()
            count = generator.binomial(self._rows, self._plan.sample_rate)
            # All subsets of this size are equally likely, so each row is chosen independently.
            chosen = np.sort(generator.choice(self._rows, count, replace=False, shuffle=False))
            yield {name: values[chosen] for name, values in self._columns.items()}

    def close(self) -> None:
        self._columns = {}


def _read(reader: ShardReader, cache: str) -> tuple[int, dict[str, npt.NDArray[Any]]]:
    columns: dict[str, npt.NDArray[Any]] = {}
    plan, done = reader.plan(0), 0
    rows = sum(plan.shard_rows(step, reader.shard) for step in range(plan.num_steps))
    with closing(reader.batches(0)) as batches:  # type: ignore[type-var]
        for batch in batches:
            if not columns:
                columns = _allocate(batch, rows, reader.num_shards, cache)
            count = len(next(iter(batch.values())))
            for name, values in batch.items():
                columns[name][done : done + count] = values
            done += count
    assert done == rows
    return rows, columns


def _allocate(batch: Batch, rows: int, ranks: int, cache: str) -> dict[str, npt.NDArray[Any]]:
    """Returns empty arrays for `rows` rows, in memory or in a temporary file without a name."""
    num_bytes = rows * sum(math.prod(v.shape[1:], start=v.dtype.itemsize) for v in batch.values())
    free = psutil.virtual_memory().available
    if cache == "memory" and num_bytes > free:
        raise ValueError(
            f"privacy keeps the rows of a worker to sample from them, and {rows} rows take "
            f"{show_bytes(num_bytes)} of {show_bytes(free)} free memory; set cache='disk' or raise numWorkers"
        )
    if cache == "memory" or (cache == "auto" and num_bytes * ranks <= _MEMORY_SHARE * free):
        return {name: np.empty((rows, *values.shape[1:]), values.dtype) for name, values in batch.items()}
    found: dict[str, npt.NDArray[Any]] = {}
    for name, values in batch.items():
        shape = (rows, *values.shape[1:])
        with tempfile.TemporaryFile(prefix="ringspark-rows-") as file:
            # An empty file cannot be mapped.
            is_mapped = 0 not in shape
            found[name] = np.memmap(file, values.dtype, "w+", 0, shape) if is_mapped else np.empty(shape)
    return found
