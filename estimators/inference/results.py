"""Turns the network's outputs into the user's columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod

import numpy as np
import pyarrow as pa
import torch
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import ArrayType, DataType, DoubleType, StructField, StructType
from torch import nn

from ringspark.estimators.training.feed import Array
from ringspark.models import class_scores
from ringspark.models.outputs import as_outputs
from ringspark.pipelines.kinds.base import list_type, make_lists

# Exactly `VectorUDT.sqlType()`: Arrow cannot cast to fields without nulls if a row is null.
_VECTOR_PARTS = [
    pa.field("type", pa.int8(), nullable=False),
    pa.field("size", pa.int32()),
    pa.field("indices", list_type("int32")),
    pa.field("values", list_type("float64")),
]

Forward = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class Results(ABC):
    """Converts raw outputs to columns. Every method can run in Python workers."""

    @property
    @abstractmethod
    def types(self) -> list[DataType]:
        """Types of the user's columns."""

    @property
    @abstractmethod
    def widths(self) -> list[int]:
        """Values per row of each column."""

    @abstractmethod
    def arrays(self, outputs: Array) -> list[Array]:
        """Returns an array per result column, (rows,) or (rows, width), from the outputs of the network.

        Args:
            outputs: (rows, outputs) float64.
        """

    inner_widths: tuple[int, ...] = ()
    """Values per row of the results after the network's outputs, such as outputs of inner modules."""

    has_classes = False
    """Whether the last column is the predicted class."""

    def forward(self, module: nn.Module) -> AbstractContextManager[Forward]:
        """Yields a function that maps inputs to outputs, each (rows, ...), with `inner_widths` last."""
        return nullcontext(lambda inputs: [*as_outputs(module(*inputs))])

    def comparable(self, outputs: Array) -> Array:
        """Returns the numbers that show how much two precisions differ, (rows, values)."""
        return outputs

    @property
    def spark_type(self) -> DataType:
        """Type of the Python result: the type of the only column, or a struct of the columns."""
        if len(self.types) == 1:
            return self.types[0]
        return StructType([StructField(name, t) for name, t in zip(self._names, self.types, strict=True)])

    def to_arrow(self, outputs: Array, *, with_vectors: bool = True) -> pa.Array:
        """Converts raw outputs to the Python result; vectors become arrays if not `with_vectors`."""
        columns = [
            _lists(values, is_vector=with_vectors and _is_vector(data_type))
            if isinstance(data_type, ArrayType) or _is_vector(data_type)
            else pa.array(values)
            for values, data_type in zip(self.arrays(outputs), self.types, strict=True)
        ]
        return columns[0] if len(columns) == 1 else pa.StructArray.from_arrays(columns, self._names)

    @property
    def _names(self) -> list[str]:
        return [f"c{i}" for i in range(len(self.types))]


@dataclass(frozen=True, kw_only=True)
class Values(Results):
    """One column per output: a double, or an array of doubles."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def widths(self) -> list[int]:
        return [prod(shape) for shape in self.shapes]

    @property
    def types(self) -> list[DataType]:
        return [DoubleType() if width == 1 else ArrayType(DoubleType()) for width in self.widths]

    def arrays(self, outputs: Array) -> list[Array]:
        parts = np.split(outputs, np.cumsum(self.widths)[:-1], axis=1)
        return [part[:, 0] if part.shape[1] == 1 else part for part in parts]


@dataclass(frozen=True, kw_only=True)
class Classes(Results):
    """Raw predictions and probabilities as vectors, and the class as a double, from one output of logits.

    A single logit z is the binary case, with the raw predictions (-z, z) of Spark's LogisticRegression.
    """

    width: int
    thresholds: tuple[float, ...] | None = None
    has_classes = True

    @property
    def num_classes(self) -> int:
        return max(2, self.width)  # one logit means two classes

    @property
    def types(self) -> list[DataType]:
        return [VectorUDT(), VectorUDT(), DoubleType()]

    @property
    def widths(self) -> list[int]:
        return [self.num_classes, self.num_classes, 1]

    def arrays(self, outputs: Array) -> list[Array]:
        return [self.raw(outputs), self.probabilities(outputs), self.decide(outputs)]

    def comparable(self, outputs: Array) -> Array:
        return self.probabilities(outputs)

    def decide(self, outputs: Array) -> Array:
        return class_scores.decide(outputs, self.thresholds)

    def raw(self, outputs: Array) -> Array:
        return class_scores.raw_scores(outputs)

    def probabilities(self, outputs: Array) -> Array:
        return class_scores.probabilities(outputs)


def _is_vector(data_type: DataType) -> bool:
    return isinstance(data_type, VectorUDT)


def _lists(values: Array, *, is_vector: bool) -> pa.Array:
    num_rows, width = values.shape
    lists = make_lists(np.arange(num_rows + 1) * width, values.reshape(-1), "float64")
    if not is_vector:
        return lists
    # A struct, as in Spark, so that the JVM copies nothing. A dense vector has neither size nor indices.
    parts = [pa.array(np.ones(num_rows, np.int8)), pa.nulls(num_rows, pa.int32())]
    parts += [pa.nulls(num_rows, list_type("int32")), lists]
    return pa.StructArray.from_arrays(parts, fields=_VECTOR_PARTS)
