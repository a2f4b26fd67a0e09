"""MLflow's signature and input example of a fitted stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql.types import DoubleType

from ringspark.estimators.columns.inputs import ModelInput, source_names
from ringspark.estimators.served_model import class_name
from ringspark.pipelines.kinds import Kind, TableColumn, TableRow
from ringspark.pipelines.kinds.scalar import TEMPORAL

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

    sources = _sources(model)
    if sources is None:
        return None
    names, results = model._outputs()
    outputs = [
        ColSpec(DataType.double if isinstance(of, DoubleType) else Repeated(DataType.double), name)
        for name, of in zip(names, results.types, strict=True)
        if name
    ]
    if name := class_name(model):
        outputs.append(ColSpec(DataType.string, name, required=False))
    takes_nulls = model.getHandleInvalid() != "error"
    inputs = [column for name, item in sources.items() for column in _columns(name, item, takes_nulls)]
    return ModelSignature(inputs=Schema(inputs), outputs=Schema(outputs))


def example_of(model: Any) -> pd.DataFrame | None:
    """Returns two example rows, or None if a column has no value that is known to be valid."""
    sources = _sources(model)
    if sources is None:
        return None
    values: dict[str, Any] = {}
    for name, item in sources.items():
        assert item.column is not None
        if isinstance(item.column.kind, TableRow):
            for source in item.column.kind.sources:
                values[source] = _table_value([c for c in item.column.kind.columns if c.name == source])
        else:
            values[name] = _value(item.column.kind, item.column.source)
    if any(value is NotImplemented for value in values.values()):
        return None
    return pd.DataFrame({name: [value] * _EXAMPLE_ROWS for name, value in values.items()})


def _sources(model: Any) -> dict[str, ModelInput] | None:
    """Returns one input per source column, preferably an input that fills nulls.

    Returns None if the column of an input is not known.
    """
    found: dict[str, ModelInput] = {}
    for item, name in zip(model._inputs, source_names(model._inputs, model.inputColumns()), strict=True):
        if item.column is None:
            return None
        if name not in found or item.fills_nulls:
            found[name] = item
    return found


def _columns(name: str, item: ModelInput, takes_nulls: bool) -> list[Any]:
    from mlflow.types.schema import AnyType, ColSpec, DataType

    assert item.column is not None
    kind = item.column.kind
    if not isinstance(kind, TableRow):
        return [ColSpec(_type(kind, item.column.source, takes_nulls or item.fills_nulls), name)]
    found = []
    for source in kind.sources:
        (first, *_) = columns = [column for column in kind.columns if column.name == source]
        is_plain = not any(column.path or column.item is not None for column in columns)
        data_type: Any = AnyType()
        if is_plain and first.type in _FLOATS:
            data_type = DataType.double
        elif is_plain and first.form == "words" and first.type != "boolean":
            data_type = DataType.string
        found.append(ColSpec(data_type, source))
    return found


def _type(kind: Kind, source: str, takes_nulls: bool) -> Any:
    from mlflow.types.schema import AnyType, DataType
    from mlflow.types.schema import Array as Repeated

    if kind.request is None or source in TEMPORAL:
        return AnyType()
    dtype, shape = kind.request
    if dtype == "str":
        return DataType.string
    if takes_nulls and (shape or not dtype.startswith("float")):
        return AnyType()
    # pandas and JSON have 64-bit numbers, and MLflow would refuse them for a smaller type.
    known = {"f": DataType.double, "boo": DataType.boolean, "byt": DataType.binary}
    found: Any = next((known[key] for key in known if dtype.startswith(key)), DataType.long)
    for _ in shape:
        found = Repeated(found)
    return found


def _value(kind: Kind, source: str) -> Any:
    if kind.request is None or source in TEMPORAL or kind.request[0] == "bytes":
        return NotImplemented
    dtype, shape = kind.request
    if dtype == "str":
        return "text"
    return np.zeros(shape, {"f": "float64", "b": "bool"}.get(dtype[:1], "int64")).tolist()


def _table_value(columns: list[TableColumn]) -> Any:
    first = columns[0]
    if first.path or first.item is not None:
        return NotImplemented
    if first.form == "words":
        return True if first.type == "boolean" else next(iter(first.words), "")
    if first.form == "calendar":
        return str(np.datetime64(int(first.center), "s"))
    return float(next((column.center for column in columns if column.form == "number"), 0.0))
