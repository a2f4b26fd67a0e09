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
    inputs = [column for item in sources for column in _columns(item, takes_nulls)]
    return ModelSignature(inputs=Schema(inputs), outputs=Schema(outputs))


def example_of(model: Any) -> pd.DataFrame | None:
    """Returns two example rows, or None if a column has no value that is known to be valid."""
    sources = _sources(model)
    if sources is None:
        return None
    values: dict[str, Any] = {}
    for item in sources:
        if isinstance(item.kind, TableRow):
            for source in item.kind.sources:
                values[source] = _table_value([c for c in item.kind.columns if c.name == source])
        else:
            values[item.name] = _value(item)
    if any(value is NotImplemented for value in values.values()):
        return None
    return pd.DataFrame({name: [value] * _EXAMPLE_ROWS for name, value in values.items()})


def _sources(model: Any) -> list[LocalInput] | None:
    """Returns one input per source column; None if the column of an input is not known."""
    inputs = local_inputs(model._inputs, model.inputColumns(), session_zone())
    return None if any(item.kind is None for item in inputs) else list({i.name: i for i in inputs}.values())


def _columns(item: LocalInput, takes_nulls: bool) -> list[Any]:
    from mlflow.types.schema import AnyType, ColSpec, DataType

    if not isinstance(item.kind, TableRow):
        return [ColSpec(_type(item, takes_nulls or item.fills_nulls), item.name)]
    found = []
    for source in item.kind.sources:
        (first, *_) = columns = [column for column in item.kind.columns if column.name == source]
        is_plain = not any(column.path or column.item is not None for column in columns)
        data_type: Any = AnyType()
        if is_plain and first.type in _FLOATS:
            data_type = DataType.double
        elif is_plain and first.form == "words" and first.type != "boolean":
            data_type = DataType.string
        found.append(ColSpec(data_type, source))
    return found


def _type(item: LocalInput, takes_nulls: bool) -> Any:
    from mlflow.types.schema import AnyType, DataType
    from mlflow.types.schema import Array as Repeated

    request = _request(item)
    if request is None:
        return AnyType()
    dtype, shape = request
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


def _request(item: LocalInput) -> tuple[str, tuple[int, ...]] | None:
    assert item.kind is not None
    found: tuple[str, tuple[int, ...]] | None = item.kind.request
    return None if item.source in TEMPORAL else found


def _value(item: LocalInput) -> Any:
    request = _request(item)
    if request is None or request[0] == "bytes":
        return NotImplemented
    dtype, shape = request
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
