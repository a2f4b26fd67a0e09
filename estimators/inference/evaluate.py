"""Computes a model's metrics over a DataFrame in one Spark job; its rows stay where they are.

Each task adds up its rows as a rank does in training and sends its sums to the driver, which merges them by
each metric's own method. Metrics of curves send every score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import DataFrame
from safetensors.torch import load, save

from ringspark.estimators import user_code
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.training.objective.metric_set import MetricSet
from ringspark.estimators.training.objective.own_metrics import try_metric
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
        output_shape: Shape of one row of the output, as the user's own metrics get it.
        whole_labels: Whether they get int64 labels, as in a training on this column.
        own: The user's metrics by name, each with whether it is a function of single rows, as
            `user_code.dumps` gives them.
    """

    names: tuple[str, ...]
    width: int
    label: str
    num_classes: int | None = None
    ignored: int | None = None
    output_shape: tuple[int, ...] = ()
    whole_labels: bool = False
    own: bytes = b""

    def with_own(self, metrics: Mapping[str, Any]) -> Evaluation:
        """Returns the same with the user's metrics, after a trial.

        Raises:
            ValueError: See `try_metric`.
        """
        if not metrics:
            return self
        classes = max(2, self.num_classes or 0)
        # Of another length than the output, whose classes or values could have one number each.
        rows = next(n for n in count(classes + 1) if n not in (self.width, *self.output_shape))
        numbers = torch.arange(rows) % classes
        labels = numbers if self.num_classes is not None else numbers[:, None].expand(rows, self.width)
        output, label = self._own_arguments(torch.zeros(rows, self.width), labels)
        found = {name: (m, try_metric(name, m, [output], [label]).per_row) for name, m in metrics.items()}
        return replace(self, own=user_code.dumps(found))

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
        own = user_code.loads(self.own) if self.own else {}
        return MetricSet(self.names, self.width, torch.device("cpu"), self.ignored, own)

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
        given, problem = self.judge(labels)
        if problem is not None:
            return problem
        output, label = (v.reshape(len(labels), -1) for v in (_numbers(outputs)[0], given))
        pair = torch.from_numpy(output), torch.from_numpy(label)
        metrics.update(*(self._own_arguments(*pair) if self.own else pair))
        return None

    def judge(self, labels: Any) -> tuple[np.ndarray[Any, Any], str | None]:
        """Returns the numbers of an Arrow column of labels, and a sentence if they cannot be used."""
        given, counts = _numbers(labels)
        if np.isnan(given).any():
            return given, f"labelCol {self.label!r} has a null or NaN; fill or drop such rows before evaluate"
        expected = self.width if self.num_classes is None else 1
        if (counts != expected).any():
            # Row by row: together, rows of 2 and 4 numbers would pass for two rows of 3.
            return given, (
                f"labelCol {self.label!r} needs {expected} numbers a row, got "
                f"{counts[counts != expected][0]}; give the label that the model was trained on"
            )
        if self.num_classes is not None:
            counted = given if self.ignored is None else given[given != self.ignored]
            wrong = counted[(counted % 1 != 0) | (counted < 0) | (counted >= self.num_classes)]
            if len(wrong):
                return given, (
                    f"labelCol {self.label!r} must hold whole class numbers in 0..{self.num_classes - 1}, "
                    f"got {wrong[0]}"
                )
        return given, None

    def _own_arguments(self, output: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns outputs and labels in the shapes and dtypes of a training."""
        rows = len(output)
        shape = () if self.num_classes is not None or label.numel() == rows else self.output_shape
        dtype = torch.int64 if self.whole_labels else torch.float32
        return output.float().reshape(rows, *self.output_shape), label.to(dtype).reshape(rows, *shape)


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
