"""The columns and the interface by which a write stores references to rows of files instead of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa

from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import Kind, Scalar
from ringspark.pipelines.kinds.base import Encoded
from ringspark.pipelines.rows import NumpyArray
from ringspark.pipelines.table_files import FILE, ROW, FileColumn, describe_file
from ringspark.pipelines.writing.shard_file import ShardFileWriter


class RowReferences(Protocol):
    """Implemented by `external.file_scan.FileScan`; a task gets it with the plan of the write."""

    @property
    def columns(self) -> Mapping[str, FileColumn]:
        """The columns that stay in the files."""

    def new_writer(self, uri: str, path: str, columns: Sequence[Column], **settings: Any) -> ShardFileWriter:
        """Returns a writer of rows; the last of its `columns` are `REFERENCES`."""


@dataclass(frozen=True)
class _FileKind(Kind):
    """Column type of `FILE` while references are written; no batch has such a column."""

    tag: ClassVar[str] = "file"

    def adopt(self, name: str, data_type: Any) -> _FileKind:
        return self

    def read_values(self, values: Any, source: str = "", zone: str = "UTC") -> Any:
        return values

    def stored(self, name: str) -> dict[str, Any]:
        return {name: pa.string()}

    def read(self, values: Any) -> tuple[Any, dict[int, str]]:
        encoded = values.dictionary_encode()
        files = [describe_file(uri) for uri in encoded.dictionary.to_pylist()]
        return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(files, pa.string())).cast(
            pa.string()
        ), {}

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        return Encoded([values])

    def measure(self, arrays: Sequence[Any]) -> NumpyArray:
        return np.zeros(0)

    def decode(self, columns: Sequence[Any]) -> Any:
        raise AssertionError("references are resolved before columns are decoded")

    def arrays(self, name: str) -> dict[str, Any]:
        return {}

    @property
    def row_bytes(self) -> int:
        return 1


REFERENCE_SQL = ("_metadata.file_path", "_metadata.row_index")
"""SQL of `REFERENCES`: the URI of a row's file, and the row's number in it."""

REFERENCES = (
    Column(name=FILE, kind=_FileKind(), source="string"),
    Column(name=ROW, kind=Scalar("int64"), source="bigint"),
)
