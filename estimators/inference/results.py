"""Turns the network's outputs into the columns that the user gets.

Python returns only the few plain columns of doubles that determine the rest: pandas UDFs turn lists into
Arrow arrays one Python object at a time, which would cost more than most networks. The JVM makes vectors,
arrays and probabilities from them. NaN stays NaN; only a row without valid input gives null.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DoubleType

from ringspark.estimators.training.feed import Array

# With more values per row than this, arrays leave Python as lists: Spark compiles no code for wider structs.
FLAT_WIDTH = 64

Valid = Array | None
"""(rows,) booleans, true for rows that have a result; None if all rows have one."""


class Results(Protocol):
    """Conversion of raw outputs to columns: one half runs in Python workers, the other half is SQL."""

    @property
    def types(self) -> list[DataType]:
        """Types of the columns that the user gets."""

    @property
    def spark_type(self) -> str:
        """Spark type that the pandas UDF returns; for a struct it returns a DataFrame."""

    def to_pandas(self, outputs: Array, valid: Valid) -> pd.Series[Any] | pd.DataFrame:
        """Converts raw outputs, (rows, values of all outputs) float64, to the UDF's return value."""

    def columns(self, result: str, *, nullable: bool) -> list[Column]:
        """Returns the user's columns, made from the UDF's column `result`."""


@dataclass(frozen=True, kw_only=True)
class Values:
    """One column per output: a double, or an array of doubles if the output has several values per row."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def widths(self) -> list[int]:
        """Values per row of each output (product of its shape)."""
        return [prod(shape) for shape in self.shapes]

    @property
    def types(self) -> list[DataType]:
        """The column types."""
        return [DoubleType() if width == 1 else ArrayType(DoubleType()) for width in self.widths]

    @property
    def spark_type(self) -> str:
        if self.widths == [1]:
            return "double"
        if self._is_flat:
            return _struct([(f"v{i}", "double") for i in range(sum(self.widths))])
        return _struct([(f"v{i}", t.simpleString()) for i, t in enumerate(self.types)])

    def to_pandas(self, outputs: Array, valid: Valid) -> pd.Series[Any] | pd.DataFrame:
        if self.widths == [1]:
            return _doubles(outputs[:, 0], valid)
        if self._is_flat:
            return _frame([_doubles(outputs[:, i], valid) for i in range(outputs.shape[1])])
        ends = np.cumsum(self.widths)
        parts = np.split(outputs, ends[:-1], axis=1)
        return _frame(
            [_doubles(part[:, 0], valid) if part.shape[1] == 1 else _lists(part, valid) for part in parts]
        )

    def columns(self, result: str, *, nullable: bool) -> list[Column]:
        if self.widths == [1]:
            return [F.col(result)]
        if not self._is_flat:
            values = [F.col(f"{result}.v{i}") for i in range(len(self.widths))]
            return [
                value if width == 1 else _with_nan(value)
                for value, width in zip(values, self.widths, strict=True)
            ]
        columns, start = [], 0
        for width in self.widths:
            parts = [F.col(f"{result}.v{i}") for i in range(start, start + width)]
            columns.append(parts[0] if width == 1 else _if_there(parts[0], F.array(*parts), nullable))
            start += width
        return columns

    @property
    def _is_flat(self) -> bool:
        return sum(self.widths) <= FLAT_WIDTH


@dataclass(frozen=True, kw_only=True)
class Classes:
    """Raw predictions and probabilities as vectors, and the class as a double, all from one output of logits.

    A single logit z is the binary case, with the raw predictions (-z, z) of Spark's LogisticRegression.
    """

    width: int
    thresholds: tuple[float, ...] | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes that the network tells apart; one logit tells two apart."""
        return max(2, self.width)

    @property
    def types(self) -> list[DataType]:
        """The column types."""
        return [VectorUDT(), VectorUDT(), DoubleType()]

    @property
    def spark_type(self) -> str:
        if self.width == 1 and self._decides_in_sql:
            return "double"
        if self.width > FLAT_WIDTH:
            fields = [("raw", "array<double>"), ("total", "double")]
        else:
            fields = [(f"r{i}", "double") for i in range(self.width)]
            if self.width > 2:
                fields.append(("total", "double"))
        return _struct(fields if self._decides_in_sql else [*fields, ("prediction", "double")])

    def to_pandas(self, outputs: Array, valid: Valid) -> pd.Series[Any] | pd.DataFrame:
        if self.width == 1 and self._decides_in_sql:
            return _doubles(outputs[:, 0], valid)
        if self.width > FLAT_WIDTH:
            columns = [_lists(outputs, valid)]
        else:
            columns = [_doubles(outputs[:, i], valid) for i in range(self.width)]
        if self.width > 2:
            columns.append(_doubles(log_sum_exp(outputs), valid))
        if not self._decides_in_sql:
            columns.append(_doubles(self.decide(outputs), valid))
        return _frame(columns)

    def decide(self, outputs: Array) -> Array:
        """Returns the predicted class of each row, (rows,) float64."""
        if self.thresholds is None:
            logits = self._logits(outputs)
            # Of two classes the first is taken where one is NaN, as by the expression of `columns`.
            best: Array = logits[:, 1] > logits[:, 0] if logits.shape[1] == 2 else logits.argmax(axis=1)
            return best.astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = self.probabilities(outputs) / np.asarray(self.thresholds)
        # As in Spark, 0 / 0 never wins, anything else / 0 always wins, and the first of equals wins.
        best = np.where(np.isnan(scaled), -np.inf, scaled).argmax(axis=1)
        return best.astype(np.float64)

    def raw(self, outputs: Array) -> Array:
        """Returns the raw predictions, (rows, classes)."""
        return np.concatenate([-outputs, outputs], axis=1) if self.width == 1 else outputs

    def probabilities(self, outputs: Array) -> Array:
        """Returns the probabilities, (rows, classes)."""
        logits = self._logits(outputs)
        probabilities: Array = np.exp(logits - log_sum_exp(logits)[:, None])
        return probabilities

    def _logits(self, outputs: Array) -> Array:
        # The softmax of (0, z) is the sigmoid of z.
        return np.concatenate([np.zeros_like(outputs), outputs], axis=1) if self.width == 1 else outputs

    def columns(self, result: str, *, nullable: bool) -> list[Column]:
        if self.width > FLAT_WIDTH:
            first, total = F.col(f"{result}.raw"), F.col(f"{result}.total")
            raw_array = _with_nan(first)
            probability_array = F.transform(raw_array, lambda value: F.exp(value - total))
        else:
            logits = [F.col(f"{result}.r{i}") for i in range(self.width)]
            if self.width == 1:
                z = F.col(result) if self._decides_in_sql else logits[0]
                logits = [-z, z]
                margins = [z, -z]
            else:
                margins = [logits[1] - logits[0], logits[0] - logits[1]]
            if self.width <= 2:
                # This form of the softmax of two overflows on neither side.
                probabilities = [1 / (1 + F.exp(margin)) for margin in margins]
            else:
                probabilities = [F.exp(value - F.col(f"{result}.total")) for value in logits]
            first, raw_array, probability_array = logits[-1], F.array(*logits), F.array(*probabilities)
        raw = _if_there(first, array_to_vector(raw_array), nullable)
        probability = _if_there(first, array_to_vector(probability_array), nullable)
        if not self._decides_in_sql:
            return [raw, probability, F.col(f"{result}.prediction")]
        low, high = (F.lit(0.0), logits[1]) if self.width == 1 else (logits[0], logits[1])
        # Spark SQL sorts NaN above every number.
        return [raw, probability, ((high > low) & ~F.isnan(high)).cast("double")]

    @property
    def _decides_in_sql(self) -> bool:
        return self.width <= 2 and self.thresholds is None


def log_sum_exp(values: Array) -> Array:
    """Returns the log of the sum of the exponentials of each row, (rows,), without overflow."""
    largest = values.max(axis=1, initial=-np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        total: Array = largest + np.log(np.exp(values - largest[:, None]).sum(axis=1))
    return total


def _doubles(values: Array, valid: Valid) -> pd.Series[Any]:
    """Makes a pandas column that is an Arrow array already: it needs no copy, and NaN stays NaN."""
    array = pa.array(values, pa.float64(), mask=None if valid is None else ~valid)
    return pd.Series(pd.arrays.ArrowExtensionArray(array))


def _lists(values: Array, valid: Valid) -> pd.Series[Any]:
    """Makes a pandas column of NumPy arrays. PySpark turns their NaN into null; `_with_nan` undoes that."""
    rows = list(values)
    if valid is not None:
        rows = [row if there else None for row, there in zip(rows, valid.tolist(), strict=True)]
    return pd.Series(rows, dtype=object)


def _with_nan(lists: Column) -> Column:
    """Returns the lists from `_lists` with NaN in place of the nulls that PySpark made."""
    nan = F.lit(float("nan"))
    return F.transform(lists, lambda value: F.when(value.isNull(), nan).otherwise(value))


def _frame(columns: Sequence[pd.Series[Any]]) -> pd.DataFrame:
    return pd.DataFrame(dict(enumerate(columns)))


def _struct(fields: Sequence[tuple[str, str]]) -> str:
    return f"struct<{', '.join(f'{name}: {kind}' for name, kind in fields)}>"


def _if_there(part: Column, value: Column, nullable: bool) -> Column:
    """Returns `value`, or null for a row without result; adds the costly condition only if needed."""
    return F.when(part.isNotNull(), value) if nullable else value
