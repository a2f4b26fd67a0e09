"""Column type "binary": bytes, such as images, that are stored as they are and decoded in the reader.

Files and the shuffle hold the compressed bytes. They are decoded to arrays when a batch is built.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringspark.pipelines.kinds.base import BatchArray, Encoded, Kind, Shape
from ringspark.pipelines.kinds.image_decoding import EIGHT_BITS, convert, is_turned, pillow, read_file
from ringspark.pipelines.kinds.values import to_bytes, to_list
from ringspark.pipelines.rows import NumpyArray, RaggedRows, Rows

if TYPE_CHECKING:
    from pyspark.sql.types import DataType
    from typing_extensions import Self


_SUBJECT = "decoder 'image'"


class Decoder(ABC):
    """Converts the bytes of a row to an array with a given shape and dtype."""

    @abstractmethod
    def decode(self, data: bytes, shape: Shape, dtype: str) -> NumpyArray:
        """Returns the decoded array; `shape` and `dtype` are the expected ones."""

    def describe(self, data: bytes, shape: Shape, dtype: str) -> tuple[Shape, str]:
        """Returns shape and dtype of the array in `data`."""
        array = self.decode(data, shape, dtype)
        return array.shape, array.dtype.name


class RawDecoder(Decoder):
    """Decodes numbers without a header: little-endian, in row-major order."""

    def describe(self, data: bytes, shape: Shape, dtype: str) -> tuple[Shape, str]:
        size = np.dtype(dtype).itemsize * prod(shape)
        return (shape, dtype) if len(data) == size else ((len(data),), "uint8")

    def decode(self, data: bytes, shape: Shape, dtype: str) -> NumpyArray:
        return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)


class NpyDecoder(Decoder):
    """Decodes the format of `numpy.save`; refuses pickles."""

    def decode(self, data: bytes, shape: Shape, dtype: str) -> NumpyArray:
        read: Any = np.lib.format.read_array  # NumPy has no types for it
        array: NumpyArray = read(io.BytesIO(data), allow_pickle=False)
        return array.astype(array.dtype.newbyteorder("="), copy=False)


class ImageDecoder(Decoder):
    """Decodes any format that Pillow reads, to (height, width, channels), or (height, width) for grey images.

    Applies the EXIF orientation and puts transparent images on white, as `Image` does.
    """

    def describe(self, data: bytes, shape: Shape, dtype: str) -> tuple[Shape, str]:
        with pillow(_SUBJECT).open(io.BytesIO(data)) as image:
            if image.mode not in EIGHT_BITS:
                raise ValueError(f"its mode {image.mode!r} has more than 8 bits per channel; store it as npy")
            size = (image.width, image.height) if is_turned(image) else (image.height, image.width)
            return (*size, *shape[2:]), "uint8"

    def decode(self, data: bytes, shape: Shape, dtype: str) -> NumpyArray:
        image = convert(read_file(data), shape[2] if len(shape) == 3 else 1)
        return np.asarray(image).reshape(image.height, image.width, *shape[2:])


DECODERS: dict[str, type[Decoder]] = {"raw": RawDecoder, "npy": NpyDecoder, "image": ImageDecoder}


@dataclass(frozen=True)
class Binary(Kind):
    """Bytes that a decoder converts to an array; a batch holds `(rows, *shape)`.

    Attributes:
        decoder: A key of `DECODERS`.
        shape: Shape of every decoded row; for "image" it is (height, width) or (height, width, channels).
        dtype: NumPy dtype name of the decoded rows.
        nullable: Whether null rows are kept. They are stored as empty bytes and read as zeros.
    """

    tag: ClassVar[str] = "binary"
    request = ("bytes", ())
    decoder: str
    shape: Shape
    dtype: str = "uint8"
    nullable: bool = False

    def __post_init__(self) -> None:
        shape = (self.shape,) if isinstance(self.shape, int) else self.shape
        object.__setattr__(self, "shape", tuple(int(size) for size in shape))
        try:
            np.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"dtype of Binary must be a NumPy dtype, got {self.dtype!r}") from None
        if self.decoder not in DECODERS:
            raise ValueError(
                f"decoder of Binary must be one of {', '.join(DECODERS)}, got {self.decoder!r}; "
                "convert bytes of another format first"
            )
        if self.decoder == "image":
            channels = self.shape[2] if len(self.shape) == 3 else 1
            if len(self.shape) not in (2, 3) or channels not in (1, 3, 4) or self.dtype != "uint8":
                raise ValueError(
                    "Binary('image') needs shape (height, width) or (height, width, channels), with 1, 3 "
                    f"or 4 channels, and dtype uint8, got {self.shape} of {self.dtype}"
                )

    def adopt(self, name: str, data_type: DataType) -> Self:
        if data_type.simpleString() != "binary":
            raise ValueError(f"column {name!r} has type {data_type.simpleString()}, not binary; cast it")
        if self.decoder == "image":
            pillow(_SUBJECT)
        return self

    def read_values(self, values: Any, source: str = "", zone: str = "UTC") -> Any:
        if isinstance(values, pa.Array) and pa.types.is_binary(values.type):
            return values
        return pa.array([value and to_bytes(value) for value in to_list(values)], pa.binary())

    @property
    def packages(self) -> tuple[str, ...]:
        return ("pillow",) if self.decoder == "image" else ()

    def stored(self, name: str) -> dict[str, Any]:
        return {name: pa.binary()}

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        decoder = DECODERS[self.decoder]()
        for row, value in enumerate(values):
            if valid is not None and not valid[row]:
                continue
            data = value.as_py()
            try:
                shape, dtype = decoder.describe(data, self.shape, self.dtype)
            except Exception as error:  # a decoder may raise anything
                raise ValueError(self._unreadable(data, error)) from None
            if (shape, dtype) != (self.shape, self.dtype):
                size = f"; Image{(*self.shape, 1)[:3]} takes images of any size"
                raise ValueError(
                    f"holds {dtype} of shape {shape}, but Binary has {self.dtype} of shape {self.shape}"
                    f"{size if self.decoder == 'image' else ''}"
                )
        return Encoded([values.cast(pa.binary())])

    def measure(self, arrays: Sequence[Any]) -> NumpyArray:
        # Statistics of the sizes are more useful than statistics of the bytes.
        lengths: NumpyArray = pc.binary_length(arrays[0]).to_numpy()
        return lengths

    def settle(self, name: str, shapes: tuple[Shape, Shape] | None, nullable: bool) -> Self:
        return replace(self, nullable=nullable)

    def decode(self, columns: Sequence[Any]) -> Rows:
        (column,) = columns
        if column.null_count or column.type != pa.binary():
            raise ValueError(f"should hold bytes without nulls, but the data is {column.type}")
        _, bounds, data = column.buffers()
        offsets = np.frombuffer(bounds or bytes(4), np.int32)[column.offset :][: len(column) + 1]
        return RaggedRows(offsets.astype(np.int64), (np.frombuffer(data or b"", np.uint8),))

    def finish(self, name: str, rows: RaggedRows) -> dict[str, NumpyArray]:
        decoder, (data,) = DECODERS[self.decoder](), rows.parts
        offsets = rows.offsets.tolist()
        decoded = np.zeros((len(offsets) - 1, *self.shape), dtype=self.dtype)
        for row, (start, stop) in enumerate(pairwise(offsets)):
            if start == stop and self.nullable:
                continue
            value = data[start:stop].tobytes()
            try:
                array = decoder.decode(value, self.shape, self.dtype)
            except Exception as error:
                problem = self._unreadable(value, error)
                raise RuntimeError(f"column {name!r} {problem}; repair or drop such rows") from error
            if array.shape != self.shape or array.dtype != decoded.dtype:
                raise ValueError(
                    f"column {name!r} holds {array.dtype} of shape {array.shape}, but the manifest says "
                    f"{self.dtype} of shape {self.shape}; write the shards again"
                )
            decoded[row] = array
        return {name: decoded}

    def _unreadable(self, data: bytes, error: Exception) -> str:
        return f"holds {len(data)} bytes that decoder {self.decoder!r} cannot read ({error})"

    def arrays(self, name: str) -> dict[str, BatchArray]:
        return {name: BatchArray(self.dtype, self.shape)}

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}] from {self.decoder}"
