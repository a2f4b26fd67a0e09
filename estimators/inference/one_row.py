"""Makes a network's input of the features of one row, on the driver and without a Spark job."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ringspark.estimators.columns.inputs import ModelInput
from ringspark.estimators.training.feed import Array, network_dtype
from ringspark.pipelines.kinds import Array as ArrayKind
from ringspark.pipelines.kinds import Scalar


def num_features(inputs: Sequence[ModelInput]) -> int:
    """Returns how many numbers the one vector of a model has; -1, as in Spark ML, if that is not known."""
    (first, *others) = inputs or (ModelInput(),)
    if others or first.part or first.column is None or not isinstance(first.column.kind, Scalar | ArrayKind):
        return -1
    return prod(first.column.row_shape)


def one_row(inputs: Sequence[ModelInput], names: Sequence[str], features: Any) -> Array:
    """Returns the features as the input of a forward pass, (1, ...) fp32 or int64.

    Args:
        inputs: The model's inputs.
        names: Their columns, for messages.
        features: A Spark vector, or numbers that NumPy takes; a flat one fills an array of any shape.

    Raises:
        ValueError: The model has other inputs than one of numbers, or the numbers do not fit it.
    """
    (item, *others) = inputs
    column = item.column
    if others or item.part or not (column is None or isinstance(column.kind, Scalar | ArrayKind)):
        raise ValueError(
            f"predict takes one vector, and this model was trained on {list(names)}, which is more or other "
            "than one column of numbers; call transform, or the network itself, module()"
        )
    values = np.asarray(features.toArray() if hasattr(features, "toArray") else features)
    if values.dtype.kind not in "fbiu" or np.isnan(values).any():
        raise ValueError(f"predict takes a vector of numbers without null and NaN, got {features!r}")
    if column is None:
        return values.astype(np.float32)[None]
    shape = column.row_shape
    if values.shape != shape and (values.ndim > 1 or values.size != prod(shape)):
        raise ValueError(
            f"predict needs the {prod(shape)} numbers of a row of {names[0]!r}, got shape {values.shape}"
        )
    given = values.reshape(1, *shape)
    row: Array = given.astype(network_dtype(column.dtype))
    if row.dtype.kind == "i" and not np.array_equal(row, given):
        raise ValueError(f"column {names[0]!r} held whole numbers in the training, got {features!r}")
    return row
