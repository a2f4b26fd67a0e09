"""Converts the columns of an external Parquet file to the rows that `write_shards` would have stored.

A file's Arrow array is converted to the array that Spark would pass to the writer, and then goes through the
same `Kind.encode`. The numbers are therefore bitwise the same.
"""

from __future__ import annotations

from typing import Any

from ringspark.pipelines.kinds import Binary, Kind
from ringspark.pipelines.rows import Rows


def decode_column(values: Any, kind: Kind) -> Rows:
    """Returns the rows of a file's column, given as one Arrow array without nulls, or raises ValueError."""
    return kind.decode(encode_column(values, kind))


def encode_column(values: Any, kind: Kind) -> list[Any]:
    """Returns the arrays that `write_shards` would store for a file's column, or raises ValueError."""
    values = kind.read_values(values)
    if isinstance(kind, Binary):
        # The bytes were checked one by one when the rows were measured.
        return [values]
    values, problems = kind.read(values)
    if problems:
        raise ValueError(next(iter(problems.values())))
    return kind.encode(values).arrays
