"""Computes a model's metrics over a DataFrame in one Spark job; its rows stay where they are.

Each task adds up its rows as a rank does in training and sends its sums to the driver, which merges them by
each metric's own method. Metrics of curves send every score.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import DataFrame
from safetensors.torch import load, save

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.training.objective.metric_set import MetricSet
from ringspark.pipelines.kinds.base import is_list, list_offsets

_SCHEMA = "state binary, problem string"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics of one output.

    Attributes:
        names: Names in `METRICS`.
        width: Values per row of the output; a classification's logits.
        label: Name of the label's column, for messages.
        num_classes: Number of classes; None for a regression.
        ignored: Rows with this label are not counted; see `Head.ignored`.
    """

    names: tuple[str, ...]
    width: int
    label: str
    num_classes: int | None = None
    ignored: int | None = None

    def over(self, scored: DataFrame) -> dict[str, float]:
        """Returns the metrics by name.

        Args:
            scored: Two columns of doubles or arrays of doubles: outputs and labels. Rows without output do
                not count.

        Raises:
            ValueError: A label is null, NaN, no class number, or of another shape than the output.
        """
        rows = scored.mapInArrow(self._in_task, _SCHEMA).collect()
        for row in rows:
            if row["problem"] is not None:
                raise ValueError(row["problem"])
        metrics = self._metrics()
        metrics.load_states([load(bytes(row["state"])) for row in rows], carried=True)
        return metrics.compute(LocalCollective())

    def _metrics(self) -> MetricSet:
        return MetricSet(self.names, self.width, torch.device("cpu"), self.ignored)

    def _in_task(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Adds up the rows of one partition. Runs in a Spark task."""
        metrics, problem = self._metrics(), None
        for batch in batches:
            outputs, labels = batch.filter(batch.column(0).is_valid()).columns
            if len(labels) and (problem := self._add(metrics, outputs, labels)) is not None:
                break
        (state,) = metrics.states()
        yield pa.RecordBatch.from_pylist([{"state": save(state), "problem": problem}])

    def _add(self, metrics: MetricSet, outputs: Any, labels: Any) -> str | None:
        """Adds rows; returns a sentence if that cannot be done."""
        given, counts = _numbers(labels)
        if np.isnan(given).any():
            return f"labelCol {self.label!r} has a null or NaN; fill or drop such rows before evaluate"
        expected = self.width if self.num_classes is None else 1
        if (counts != expected).any():
            # Row by row: together, rows of 2 and 4 numbers would pass for two rows of 3.
            return (
                f"labelCol {self.label!r} needs {expected} numbers a row, got "
                f"{counts[counts != expected][0]}; give the label that the model was trained on"
            )
        if self.num_classes is not None:
            counted = given if self.ignored is None else given[given != self.ignored]
            wrong = counted[(counted % 1 != 0) | (counted < 0) | (counted >= self.num_classes)]
            if len(wrong):
                return (
                    f"labelCol {self.label!r} must hold whole class numbers in 0..{self.num_classes - 1}, "
                    f"got {wrong[0]}"
                )
        output, label = (v.reshape(len(labels), -1) for v in (_numbers(outputs)[0], given))
        metrics.update(torch.from_numpy(output), torch.from_numpy(label))
        return None


def _numbers(column: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns the numbers of a column of doubles or (nested) lists of them, and how many each row has.

    A null becomes NaN.
    """
    offsets = np.arange(len(column) + 1)
    while is_list(column.type):
        if column.null_count:
            return np.array([np.nan]), offsets
        offsets, column = list_offsets(column)[offsets], column.flatten()
    return np.array(column.to_numpy(zero_copy_only=False), dtype=np.float64), np.diff(offsets)
