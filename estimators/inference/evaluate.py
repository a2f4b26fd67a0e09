"""Computes a model's metrics over a DataFrame in one Spark job, without moving the rows."""

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
from ringspark.pipelines.job_names import name_jobs
from ringspark.pipelines.kinds.base import is_list, list_offsets
from ringspark.pipelines.spark_errors import explain_worker_errors

_SCHEMA = "state binary, problem string"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics of one output with `width` values per row.

    Attributes:
        num_classes: Number of classes; None for a regression.
        ignored: Rows with this label do not count; see `Head.ignored`.
        whole_labels: Whether the user's metrics get int64 labels, as in the training.
        quantiles: Probabilities of the quantiles that the output holds; empty if it holds none.
        own: Pickled dict of the user's metrics: name -> (metric, whether it is a function of single rows).
    """

    names: tuple[str, ...]
    width: int
    label: str
    num_classes: int | None = None
    ignored: int | None = None
    output_shape: tuple[int, ...] = ()
    whole_labels: bool = False
    quantiles: tuple[float, ...] = ()
    own: bytes = b""

    def with_own(self, metrics: Mapping[str, Any]) -> Evaluation:
        """Tries each of the user's metrics on a few rows (`try_metric`), then returns a copy with them."""
        if not metrics:
            return self
        classes = max(2, self.num_classes or 0)
        # A length that no dimension of the output has, so that a metric cannot mistake one for rows.
        rows = next(n for n in count(classes + 1) if n not in (self.width, *self.output_shape))
        numbers = torch.arange(rows) % classes
        labels = numbers[:, None].expand(rows, self._label_width)
        output, label = self._own_arguments(torch.zeros(rows, self.width), labels)
        found = {name: (m, try_metric(name, m, [output], [label]).per_row) for name, m in metrics.items()}
        return replace(self, own=user_code.dumps(found))

    def over(self, scored: DataFrame) -> dict[str, float]:
        """Returns the metrics by name, from a column of outputs and a column of labels (`check_labels`)."""
        with explain_worker_errors(), name_jobs(scored.sparkSession, "evaluate"):
            rows = scored.mapInArrow(self._in_task, _SCHEMA).collect()
        for row in rows:
            if row["problem"] is not None:
                raise ValueError(row["problem"])
        metrics = self._metrics()
        metrics.load_states([load(bytes(row["state"])) for row in rows], carried=True)
        return metrics.compute(LocalCollective())

    def _metrics(self) -> MetricSet:
        own = user_code.loads(self.own) if self.own else {}
        return MetricSet(self.names, self.width, torch.device("cpu"), self.ignored, own, self.quantiles)

    @property
    def _label_width(self) -> int:
        return self.width if self.num_classes is None and not self.quantiles else 1

    def _in_task(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        metrics, problem = self._metrics(), None
        for batch in batches:
            outputs, labels = batch.filter(batch.column(0).is_valid()).columns
            if len(labels) and (problem := self._add(metrics, outputs, labels)) is not None:
                break
        (state,) = metrics.states()
        yield pa.RecordBatch.from_pylist([{"state": save(state), "problem": problem}])

    def _add(self, metrics: MetricSet, outputs: Any, labels: Any) -> str | None:
        given, problem = self.check_labels(labels)
        if problem is not None:
            return problem
        output, label = (v.reshape(len(labels), -1) for v in (_numbers(outputs)[0], given))
        pair = torch.from_numpy(output), torch.from_numpy(label)
        metrics.update(*(self._own_arguments(*pair) if self.own else pair))
        return None

    def check_labels(self, labels: Any) -> tuple[np.ndarray[Any, Any], str | None]:
        """Returns the numbers of an Arrow column of labels, and an error message or None.

        Labels with class names are structs of number and name.
        """
        texts: Any = None
        if pa.types.is_struct(labels.type):
            labels, texts = labels.flatten()
        given, counts = _numbers(labels)
        if np.isnan(given).any():
            return given, f"labelCol {self.label!r} has a null or NaN; fill or drop such rows before evaluate"
        expected = self._label_width
        if (counts != expected).any():
            # Checked per row: rows of 2 and 4 numbers have as many numbers as two rows of 3.
            return given, (
                f"labelCol {self.label!r} needs {expected} numbers per row, got "
                f"{counts[counts != expected][0]}; give the label that the model was trained on"
            )
        if self.num_classes is not None:
            is_wrong = (given % 1 != 0) | (given < 0) | (given >= self.num_classes)
            wrong = np.flatnonzero(is_wrong if self.ignored is None else is_wrong & (given != self.ignored))
            if len(wrong) and texts is not None:
                return given, (
                    f"labelCol {self.label!r} has the class {texts[wrong[0]].as_py()!r:.80}, which the model "
                    "was not trained on; drop such rows, or fit on rows with this class"
                )
            if len(wrong):
                return given, (
                    f"labelCol {self.label!r} must hold whole class numbers in 0..{self.num_classes - 1}, "
                    f"got {given[wrong[0]]}"
                )
        return given, None

    def _own_arguments(self, output: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(output)
        shape = () if self.num_classes is not None or label.numel() == rows else self.output_shape
        dtype = torch.int64 if self.whole_labels else torch.float32
        return output.float().reshape(rows, *self.output_shape), label.to(dtype).reshape(rows, *shape)


def _numbers(column: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns the numbers of a column of (nested) doubles and their count per row; null becomes NaN."""
    offsets = np.arange(len(column) + 1)
    while is_list(column.type):
        if column.null_count:
            return np.array([np.nan]), offsets
        offsets, column = list_offsets(column)[offsets], column.flatten()
    return np.array(column.to_numpy(zero_copy_only=False), dtype=np.float64), np.diff(offsets)
