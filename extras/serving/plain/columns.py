"""Readers of the column types: from a pandas column to the arrays that the network takes.

`READERS` has one function per column type of ringspark. Each takes the type as JSON and returns a `Reading`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from .images import read_binary, read_image
from .table import read_table
from .values import (
    NumpyArray,
    Reading,
    array_of,
    at_path,
    is_missing,
    numbers_of,
    shorten,
    temporal_numbers,
    to_dtype,
)

TEMPORAL = ("date", "timestamp", "timestamp_ntz")


@dataclass(frozen=True)
class Source:
    """One column of the request.

    Attributes:
        kind: Column type as JSON.
        type: Spark type of the training column; "" if unknown.
        fills_nulls: Whether the model was trained on missing values.
        zone: Time zone of times without an offset.
        columns: Columns of the request by name; only the type "table_row" reads several.
    """

    kind: dict[str, Any]
    type: str
    fills_nulls: bool
    zone: str
    columns: Mapping[str, pd.Series[Any]]


def read_scalar(values: pd.Series[Any], source: Source) -> Reading:
    if source.type in TEMPORAL:
        found, missing = temporal_numbers(values.tolist(), source.type, source.zone)
    else:
        found, missing = numbers_of(values)
    made = to_dtype(found, _network_dtype(source.kind["dtype"]))
    return Reading.of({"": made}, missing, source.fills_nulls)


def read_array(values: pd.Series[Any], source: Source) -> Reading:
    return _read_rows(values.tolist(), source, source.kind["shape"])


def read_unknown(values: pd.Series[Any], source: Source) -> Reading:
    """Reads numbers, or arrays of numbers that all have the same shape."""
    if values.dtype != object:
        found, missing = numbers_of(values)
        return Reading.of({"": found}, missing, False)
    return _read_rows(values.tolist(), source, None)


def read_struct(values: pd.Series[Any], source: Source) -> Reading:
    given, kind = values.tolist(), source.kind
    columns, masked = [], np.zeros(len(given), bool)
    for path, type_name in zip(kind["fields"], kind["types"], strict=True):
        field = at_path(given, path)
        if type_name in TEMPORAL:
            found, missing = temporal_numbers(field, type_name, source.zone)
        else:
            found, missing = numbers_of(field)
        masked |= missing
        columns.append(to_dtype(found, _network_dtype(kind["dtype"])))
    made = np.stack(columns, axis=1)
    made[np.fromiter((is_missing(value) for value in given), bool, len(given))] = 0
    return Reading.of({"": made}, masked, source.fills_nulls)


def read_padded(values: pd.Series[Any], source: Source) -> Reading:
    rows, lengths, masked = _lists(values.tolist(), source.kind["dtype"])
    longest = int(source.kind["length"])
    if lengths.max(initial=0) > longest:
        raise ValueError(
            f"has an array of {lengths.max()} elements, but the model was trained on at most {longest}; "
            "shorten the array"
        )
    padded = np.full((len(lengths), longest), source.kind["value"], dtype=source.kind["dtype"])
    padded[np.arange(longest) < lengths[:, None]] = rows
    return Reading.of({"": padded, ".length": lengths}, masked, source.fills_nulls)


def read_ragged(values: pd.Series[Any], source: Source) -> Reading:
    rows, lengths, masked = _lists(values.tolist(), source.kind["dtype"])
    arrays = {".values": rows, ".offsets": _starts(lengths)}
    return Reading.of(arrays, masked, source.fills_nulls)


def read_sparse(values: pd.Series[Any], source: Source) -> Reading:
    given, size = values.tolist(), int(source.kind["size"])
    masked = np.fromiter((is_missing(value) for value in given), bool, len(given))
    indices, data = [], []
    for row, value in enumerate(given):
        place, given_numbers, found = ([], [], size) if masked[row] else _sparse_parts(value)
        if found != size:
            raise ValueError(f"has a vector of size {found}, but the model was trained on size {size}")
        numbers, missing = numbers_of(np.asarray(given_numbers))
        masked[row] |= missing.any()
        indices.append(np.asarray(place, np.int64))
        data.append(to_dtype(numbers, source.kind["dtype"]))
    lengths = np.array([len(place) for place in indices], np.int64)
    arrays = {
        ".indices": np.concatenate(indices or [np.zeros(0, np.int64)]),
        ".indptr": _starts(lengths),
        ".data": np.concatenate(data or [np.zeros(0, np.float32)]),
    }
    return Reading.of(arrays, masked, source.fills_nulls)


def read_vocabulary(values: pd.Series[Any], source: Source) -> Reading:
    texts, missing = texts_of(values)
    known = _ids(tuple(source.kind["words"]))
    ids = [len(known) if text is None else known.get(text, len(known)) for text in texts]
    return Reading.of({"": np.array(ids, np.int64)}, missing, source.fills_nulls)


def read_hash(values: pd.Series[Any], source: Source) -> Reading:
    """Computes `pmod(xxhash64(seed, column), num_buckets)` as Spark SQL does."""
    import xxhash

    texts, missing = texts_of(values)
    seed_bytes = int(source.kind["seed"]).to_bytes(8, "little", signed=True)
    # Spark hashes the first argument with the seed 42, and the next one with the hash so far.
    seed = xxhash.xxh64_intdigest(seed_bytes, 42)
    ids = np.zeros(len(texts), np.int64)
    for row, text in enumerate(texts):
        if text is not None:
            unsigned = xxhash.xxh64_intdigest(text.encode(), seed)
            signed = unsigned - (1 << 64) if unsigned >> 63 else unsigned
            ids[row] = signed % int(source.kind["num_buckets"])
    return Reading.of({"": ids}, missing, source.fills_nulls)


def read_tokens(values: pd.Series[Any], source: Source) -> Reading:
    texts, missing = texts_of(values)
    kind, longest = source.kind, int(source.kind["max_length"])
    tokenizer = _tokenizer(kind["tokenizer"], longest if kind["too_long"] == "cut" else None)
    rows = [[] if text is None else tokenizer.encode(text).ids for text in texts]
    lengths = np.array([len(row) for row in rows], np.int64)
    if lengths.max(initial=0) > longest:
        raise ValueError(
            f"holds a text of {lengths.max()} tokens, but max_length={longest} is set; shorten the text"
        )
    width = max(1, int(lengths.max(initial=0))) if kind["padding"] == "longest" else longest
    mask = np.arange(width) < lengths[:, None]
    ids = np.full((len(rows), width), kind["pad_id"], np.int64)
    ids[mask] = [number for row in rows for number in row]
    return Reading.of({".ids": ids, ".mask": mask}, missing, source.fills_nulls)


def _binary(values: pd.Series[Any], source: Source) -> Reading:
    return read_binary(values.tolist(), source.kind, source.fills_nulls)


def _image(values: pd.Series[Any], source: Source) -> Reading:
    return read_image(values.tolist(), source.kind, source.fills_nulls)


def _table(values: pd.Series[Any] | None, source: Source) -> Reading:
    return read_table(source.columns, source.kind)


READERS: dict[str, Callable[[Any, Source], Reading]] = {
    "scalar": read_scalar,
    "array": read_array,
    "vector": read_array,
    "struct": read_struct,
    "padded": read_padded,
    "ragged": read_ragged,
    "sparse": read_sparse,
    "vocabulary": read_vocabulary,
    "hash": read_hash,
    "tokens": read_tokens,
    "binary": _binary,
    "image": _image,
    "table_row": _table,
    "": read_unknown,
}
"""Column type -> reader. The type "" is for inputs of the network without a column type."""


def texts_of(values: Any) -> tuple[list[str | None], NumpyArray]:
    """Returns the strings (None if missing), and a mask of the missing rows."""
    given = values.tolist()
    missing = np.fromiter((is_missing(value) for value in given), bool, len(given))
    for value, is_gone in zip(given, missing, strict=True):
        if not is_gone and not isinstance(value, str):
            raise ValueError(f"holds {shorten(value)}, but the model was trained on strings")
    return [None if is_gone else value for value, is_gone in zip(given, missing, strict=True)], missing


def _read_rows(given: Sequence[Any], source: Source, shape: Sequence[int] | None) -> Reading:
    masked = np.zeros(len(given), bool)
    rows: list[NumpyArray | None] = []
    for row, value in enumerate(given):
        if is_missing(value):
            masked[row] = True
            rows.append(None)
            continue
        array = array_of(value)
        if shape is None:
            shape = array.shape
        if array.shape != tuple(shape):
            raise ValueError(
                f"has an array of shape {array.shape}, but the model was trained on shape {tuple(shape)}"
            )
        found, missing = numbers_of(array.reshape(-1))
        masked[row] = missing.any()
        rows.append(to_dtype(found, _network_dtype(source.kind.get("dtype", ""))).reshape(array.shape))
    zeros = np.zeros(tuple(shape or ()), _network_dtype(source.kind.get("dtype", "")))
    made = np.stack([zeros if array is None else array for array in rows]) if rows else zeros[None][:0]
    return Reading.of({"": made}, masked, source.fills_nulls)


def _lists(given: Sequence[Any], dtype: str) -> tuple[NumpyArray, NumpyArray, NumpyArray]:
    """Returns the concatenated rows, the length of each row, and a mask of rows with a missing value."""
    masked = np.zeros(len(given), bool)
    rows = []
    for row, value in enumerate(given):
        array = np.zeros(0) if is_missing(value) else array_of(value)
        if array.ndim != 1:
            raise ValueError(f"holds {shorten(value)}, but every row must be a list of numbers")
        found, missing = numbers_of(array)
        masked[row] = missing.any() or is_missing(value)
        rows.append(to_dtype(found, dtype))
    lengths = np.array([len(row) for row in rows], np.int64)
    return np.concatenate(rows or [np.zeros(0, dtype)]), lengths, masked


def _sparse_parts(value: Any) -> tuple[Sequence[int], Sequence[float], int]:
    if isinstance(value, dict) and value.get("indices") is not None:
        return value["indices"], value["values"], int(value["size"])
    if hasattr(value, "indices") and hasattr(value, "size"):
        return value.indices, value.values, int(value.size)
    dense = array_of(value)
    return range(len(dense)), dense.tolist(), len(dense)


def _starts(lengths: NumpyArray) -> NumpyArray:
    """Returns the index of the first element of each row, (rows,) int64."""
    return np.cumsum(lengths) - lengths


def _network_dtype(dtype: str) -> str:
    return "int64" if np.dtype(dtype or "float32").kind in "iu" else "float32"


@lru_cache(maxsize=64)
def _ids(words: tuple[str, ...]) -> dict[str, int]:
    return {word: number for number, word in enumerate(words)}


@lru_cache(maxsize=4)
def _tokenizer(text: str, max_length: int | None) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    side = (tokenizer.truncation or {}).get("direction", "right")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if max_length is not None:
        tokenizer.enable_truncation(max_length, direction=side)
    return tokenizer
