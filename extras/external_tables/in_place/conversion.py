"""Converts the columns of an external Parquet file to the rows that `write_shards` would have stored.

A file's Arrow array is converted to the array that Spark would pass to the writer, and then goes through the
same `Kind.encode`. The numbers are therefore bitwise the same.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringspark.pipelines.kinds import Binary, HashBuckets, Image, Kind, Scalar, Sparse, Struct, Vector
from ringspark.pipelines.kinds.base import is_list, number_type
from ringspark.pipelines.kinds.image_decoding import image_bytes
from ringspark.pipelines.nulls import fill_nulls
from ringspark.pipelines.rows import Rows


def decode_column(values: Any, kind: Kind) -> Rows:
    """Returns the rows of a file's column, given as one Arrow array without nulls, or raises ValueError."""
    return kind.decode(encode_column(values, kind))


def encode_column(values: Any, kind: Kind) -> list[Any]:
    """Returns the arrays that `write_shards` would store for a file's column, or raises ValueError."""
    values = convert_like_spark(values, kind)
    if isinstance(kind, Binary):
        # The bytes were checked one by one when the rows were measured.
        return [values.cast(pa.binary())]
    values, problems = kind.read(values)
    if problems:
        raise ValueError(next(iter(problems.values())))
    return kind.encode(values).arrays


def convert_like_spark(values: Any, kind: Kind) -> Any:
    """Converts a file's Arrow array, which may hold nulls, to the array that Spark passes to `Kind.encode`.

    Raises ValueError if the values do not fit the column type.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_fixed_size_list(values.type):
        values = values.cast(pa.list_(values.type.value_type))
    if isinstance(kind, Vector | Sparse):
        return _vectors(values, kind.dtype)
    if isinstance(kind, Struct):
        return _struct_numbers(values, kind)
    if isinstance(kind, Image) and pa.types.is_struct(values.type):
        return pa.array(map(image_bytes, values.to_pylist()), pa.binary())
    if isinstance(kind, HashBuckets):
        present = hash_buckets(values.drop_null(), kind.num_buckets, kind.seed)
        ids = np.zeros(len(values), dtype=np.int64)
        ids[values.is_valid().to_numpy(zero_copy_only=False)] = present
        return pa.array(ids, mask=values.is_null().to_numpy(zero_copy_only=False))
    if pa.types.is_decimal(values.type):
        return _doubles(values)
    dtype = getattr(kind, "dtype", "")
    if _is_any_list(values.type) or pa.types.is_unsigned_integer(values.type):
        return values.cast(_with_leaf(values.type, dtype)) if dtype else values
    is_number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    if isinstance(kind, Scalar) and dtype and is_number and values.type != number_type(dtype):
        return values.cast(number_type(dtype), safe=False)  # Spark reads the file by a wider type
    return values


def hash_buckets(strings: Any, num_buckets: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns Spark SQL's `pmod(xxhash64(seed, string), num_buckets)` for an Arrow array without nulls."""
    # Imported here, because a cluster may lack the package until a table has such a column.
    from xxhash import xxh64_intdigest

    encoded = strings.dictionary_encode()
    words = encoded.dictionary.cast(pa.large_binary())
    _, offsets, data = words.buffers()
    ends = np.frombuffer(offsets, np.int64)[words.offset :][: len(words) + 1].tolist() if len(words) else []
    view = memoryview(data or b"")
    # Spark hashes one column after the other: each hash is the seed of the next, and the first seed is 42.
    start = xxh64_intdigest(seed.to_bytes(8, "little", signed=True), 42)
    digests = [xxh64_intdigest(view[begin:end], start) for begin, end in pairwise(ends)]
    hashes = np.array(digests, dtype=np.uint64).view(np.int64)
    ids: npt.NDArray[np.int64] = (hashes % num_buckets)[encoded.indices.to_numpy()]
    return ids


def _is_any_list(data_type: Any) -> bool:
    return is_list(data_type) or pa.types.is_fixed_size_list(data_type)


def _with_leaf(data_type: Any, dtype: str) -> Any:
    if _is_any_list(data_type):
        return pa.list_(_with_leaf(data_type.value_type, dtype))
    return number_type(dtype)


def _doubles(decimals: Any) -> Any:
    """Converts decimals of up to 15 digits to the nearest float64, which Arrow's own cast may miss."""
    if not pa.types.is_decimal128(decimals.type):
        decimals = decimals.cast(pa.decimal128(decimals.type.precision, decimals.type.scale))
    words = np.frombuffer(decimals.buffers()[1], "<i8").reshape(-1, 2)
    # 15 digits fit into the lower word, and both numbers are exact, so the quotient is rounded only once.
    unscaled = words[decimals.offset : decimals.offset + len(decimals), 0]
    numbers = unscaled.astype(np.float64) / 10.0**decimals.type.scale
    return pa.array(numbers, mask=decimals.is_null().to_numpy(zero_copy_only=False))


def _struct_numbers(values: Any, kind: Struct) -> Any:
    """Returns the lists of numbers that `Struct.select` computes."""
    columns = []
    for path in kind.fields:
        (number,) = Scalar().encode(convert_like_spark(pc.struct_field(values, list(path)), Scalar())).arrays
        # A safe cast, so whole numbers that float64 does not hold raise an error, as in Spark.
        columns.append(number.cast(number_type(kind.dtype)))
    nulls = np.stack([column.is_null().to_numpy(zero_copy_only=False) for column in columns], axis=1)
    filled = [fill_nulls(column).to_numpy(zero_copy_only=False) for column in columns]
    leaf = pa.array(np.stack(filled, axis=1).reshape(-1), number_type(kind.dtype), mask=nulls.reshape(-1))
    offsets = pa.array(np.arange(len(values) + 1, dtype=np.int32) * len(columns))
    mask = values.is_null() if values.null_count else None
    return pa.ListArray.from_arrays(offsets, leaf, mask=mask)


def _vectors(values: Any, dtype: str) -> Any:
    """Converts vectors from Spark's storage format to structs of size, indices and values."""
    names = [field.name for field in values.type] if pa.types.is_struct(values.type) else []
    if not {"size", "indices", "values"} <= set(names):
        raise ValueError(f"should hold vectors, but the data is {values.type}")
    parts = dict(zip(names, values.flatten(), strict=True))
    data = parts["values"]
    if dtype != "float64":
        # Arrow raises no error here, and rounds like Spark: a double beyond the range becomes infinite.
        data = data.cast(pa.list_(number_type(dtype)), safe=False)
    size = pc.coalesce(parts["size"], pc.list_value_length(data)).cast(pa.int32())
    return pa.StructArray.from_arrays(
        [pc.fill_null(size, 0), fill_nulls(parts["indices"]), fill_nulls(data)],
        names=["size", "indices", "values"],
        mask=values.is_null(),
    )
