"""Writes shards without Spark, and trains on them on one rank in this process."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from check.part import Setup
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.callbacks import Callback
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.models import ModelSpec
from ringspark.pipelines import Array, Column, Scalar, ShardFile, ShardManifest
from ringspark.pipelines.kinds.base import make_lists
from ringspark.pipelines.writing.shard_writer import WritePlan, write_partition

Columns = Mapping[str, npt.NDArray[Any]]
_FOLDER, _BATCH_ROWS = "_shards-check", 10_000


def write_shards(columns: Columns, folder: Path) -> ShardManifest:
    """Writes arrays, (rows,) or (rows, width), to a new folder, as the tasks of Spark do."""
    (folder / _FOLDER).mkdir(parents=True)
    stored = tuple(
        Column(
            name=name,
            kind=Scalar(values.dtype.name)
            if values.ndim == 1
            else Array(values.dtype.name, tuple(values.shape[1:])),
        )
        for name, values in columns.items()
    )
    plan = WritePlan(
        uri=str(folder), folder=_FOLDER, columns=stored, handle_invalid=tuple("error" for _ in stored)
    )
    (report,) = write_partition(plan, _batches(columns))
    files = [ShardFile.from_json(file) for file in json.loads(report.column(0)[0].as_py())["files"]]
    manifest = ShardManifest(uri=str(folder), columns=stored, files=tuple(files))
    manifest.save()
    return manifest


def _batches(columns: Columns) -> Iterator[pa.RecordBatch]:
    rows = len(next(iter(columns.values())))
    for start in range(0, rows, _BATCH_ROWS):
        parts = {name: values[start : start + _BATCH_ROWS] for name, values in columns.items()}
        yield pa.RecordBatch.from_pydict({name: _arrow(values) for name, values in parts.items()})


def _arrow(values: npt.NDArray[Any]) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values)
    offsets = np.arange(0, values.size + 1, values.shape[1])
    return make_lists(offsets, values.ravel(), values.dtype.name)


def train(
    manifest: ShardManifest, spec: ModelSpec, setup: Setup, *callbacks: Callback, **settings: Any
) -> TrainResult:
    """Trains `spec` on all columns of the shards; the last column is the label."""
    *inputs, label = (column.name for column in manifest.columns)
    config = TrainConfig(
        shards_uri=manifest.uri,
        run_uri=str(setup.folder / f"run-{uuid.uuid4().hex}"),
        model=spec.to_json(),
        input_columns=tuple(inputs),
        label_columns=(label,),
        use_gpu=setup.on_gpu,
        reader="arrow",
    )
    return train_here(
        replace(config, **settings), UserObjects(callbacks=tuple(callbacks)), device=setup.device
    )
