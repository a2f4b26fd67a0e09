"""MLflow's signature and input example of a fitted stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql.types import DoubleType

from ringspark.estimators.inference.local_inputs import local_inputs
from ringspark.extras.serving.served_model import class_name, session_zone
from ringspark.pipelines.kinds import TableColumn, TableRow
from ringspark.pipelines.kinds.scalar import TEMPORAL
from ringspark.pipelines.local_rows import LocalInput

_EXAMPLE_ROWS = 2
_FLOATS = ("float", "double")


def signature_of(model: Any) -> Any:
    """Returns the names and types of the model's columns, or None if they are not known.

    MLflow converts JSON to these types, and refuses rows of other types. Times, structs, and whole numbers
    with missing values come in several forms, so their type is Any here, and the model checks the values.
    """
    from mlflow.models import ModelSignature
    from mlflow.types.schema import Array as Repeated
    from mlflow.types.schema import ColSpec, DataType, Schema

    columns = _columns(model)
    if columns is None:
        return None
    names, results = model._all_outputs()
    outputs = [
        ColSpec(DataType.double if isinstance(of, DoubleType) else Repeated(DataType.double), name)
        for name, of in zip(names, results.types, strict=True)
        if name
    ]
    if name := class_name(model):
        outputs.append(ColSpec(DataType.string, name, required=False))
    inputs = [ColSpec(data_type, name) for name, data_type, _ in columns]
    return ModelSignature(inputs=Schema(inputs), outputs=Schema(outputs))


def example_of(model: Any) -> pd.DataFrame | None:
    """Returns two example rows, or None if a column has no value that is known to be valid."""
    columns = _columns(model)
    if columns is None or any(value is NotImplemented for *_, value in columns):
        return None
    return pd.DataFrame({name: [value] * _EXAMPLE_ROWS for name, _, value in columns})


def _columns(model: Any) -> list[tuple[str, Any, Any]] | None:
    """Returns name, MLflow's type and a valid value, or NotImplemented, of each source column.

    Returns None if the column of an input is not known.
    """
    inputs = local_inputs(model._inputs, model.inputColumns(), session_zone())
    if any(item.kind is None for item in inputs):
        return None
    takes_nulls = model.getHandleInvalid() != "error"
    found = []
    for item in {item.name: item for item in inputs}.values():
        if isinstance(item.kind, TableRow):
            for source in item.kind.sources:
                columns = [column for column in item.kind.columns if column.name == source]
                found.append((source, *_table_column(columns)))
        else:
            found.append((item.name, *_column(item, takes_nulls or item.fills_nulls)))
    return found


def _column(item: LocalInput, takes_nulls: bool) -> tuple[Any, Any]:
    from mlflow.types.schema import AnyType, DataType
    from mlflow.types.schema import Array as Repeated

    assert item.kind is not None
    request = item.kind.request
    if request is None or item.source in TEMPORAL:
        return AnyType(), NotImplemented
    dtype, shape = request
    if dtype == "str":
        return DataType.string, "text"
    value: Any = NotImplemented
    if dtype != "bytes":
        value = np.zeros(shape, {"f": "float64", "b": "bool"}.get(dtype[:1], "int64")).tolist()
    if takes_nulls and (shape or not dtype.startswith("float")):
        return AnyType(), value
    # pandas and JSON have 64-bit numbers, and MLflow would refuse them for a smaller type.
    known = {"f": DataType.double, "boo": DataType.boolean, "byt": DataType.binary}
    found: Any = next((known[key] for key in known if dtype.startswith(key)), DataType.long)
    for _ in shape:
        found = Repeated(found)
    return found, value


def _table_column(columns: list[TableColumn]) -> tuple[Any, Any]:
    from mlflow.types.schema import AnyType, DataType

    first, data_type, value = columns[0], AnyType(), NotImplemented
    is_plain = not any(column.path or column.item is not None for column in columns)
    if is_plain and first.type in _FLOATS:
        data_type = DataType.double
    elif is_plain and first.form == "words" and first.type != "boolean":
        data_type = DataType.string
    if not first.path and first.item is None:
        value = _table_value(columns)
    return data_type, value


def _table_value(columns: list[TableColumn]) -> Any:
    first = columns[0]
    if first.form == "words":
        return True if first.type == "boolean" else next(iter(first.words), "")
    if first.form == "calendar":
        return str(np.datetime64(int(first.center), "s"))
    return float(next((column.center for column in columns if column.form == "number"), 0.0))
