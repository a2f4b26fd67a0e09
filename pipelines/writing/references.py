"""The columns by which a write stores references to rows of files instead of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import Scalar
from ringspark.pipelines.rows import NumpyArray
from ringspark.pipelines.table_files import FILE, ROW, describe_file


class _FileKind(Scalar):
    """Column type of `FILE` while references are written; no batch has such a column."""

    row_bytes = 1

    def stored(self, name: str) -> dict[str, Any]:
        return {name: pa.string()}

    def read(self, values: Any) -> tuple[Any, dict[int, str]]:
        encoded = values.dictionary_encode()
        files = [describe_file(uri) for uri in encoded.dictionary.to_pylist()]
        return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(files, pa.string())).cast(
            pa.string()
        ), {}

    def measure(self, arrays: Sequence[Any]) -> NumpyArray:
        return np.zeros(0)


REFERENCE_SQL = ("_metadata.file_path", "_metadata.row_index")
"""SQL of `REFERENCES`: the URI of a row's file, and the row's number in it."""

REFERENCES = (
    Column(name=FILE, kind=_FileKind(), source="string"),
    Column(name=ROW, kind=Scalar("int64"), source="bigint"),
)
