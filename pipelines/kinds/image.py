"""Column type "image": images of any size and format, stored as pixels of one size.

The writing tasks decode each image once and store uint8 of shape (channels, height, width). Uint8 takes a
quarter of the bytes of float32. The write finds broken files, and the epochs decode nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import pyarrow as pa

from ringspark.pipelines.kinds.base import BatchArray, Encoded, Kind, Shape, decode_fixed
from ringspark.pipelines.kinds.image_decoding import (
    MODES,
    SPARK_FIELDS,
    decode,
    describe_problem,
    image_bytes,
    pillow,
    refuse_bombs,
    spark_image,
)
from ringspark.pipelines.kinds.values import to_bytes, to_list
from ringspark.pipelines.rows import NumpyArray, Rows

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType
    from typing_extensions import Self

Resize = Literal["crop", "stretch"]

MAX_SIDE = 1 << 14
"""Largest height or width. Such an image with 4 channels has 1 GiB, and an Arrow value at most 2 GiB."""


@dataclass(frozen=True)
class Image(Kind):
    """Images; a batch holds (rows, channels, height, width) float32 from 0 to 1, as torch's layers take them.

    The column holds encoded images (PNG, JPEG and every other format that Pillow reads, as in `content` of
    `binaryFile`) or Spark's image struct. EXIF orientation is applied. Transparent images are put on white
    unless `channels` is 4. Only the first frame is used, and colour profiles are ignored.

    Attributes:
        height: Pixels from top to bottom in a batch.
        width: Pixels from left to right in a batch.
        channels: 1 for grey, 3 for red, green and blue, or 4 for these and transparency.
        resize: "crop" scales an image until it covers height and width, and cuts off the rest equally on both
            sides. "stretch" scales height and width separately. Both are bilinear and antialiased.
        mean: Number to subtract from the pixels: one for all channels, or one per channel.
        std: Divisor after the subtraction: one for all channels, or one per channel. For ImageNet, mean and
            std are (0.485, 0.456, 0.406) and (0.229, 0.224, 0.225).
    """

    tag: ClassVar[str] = "image"
    packages = ("pillow",)
    request = ("bytes", ())
    height: int
    width: int
    channels: int = 3
    resize: Resize = "crop"
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0

    def __post_init__(self) -> None:
        for name in ("height", "width"):
            size = getattr(self, name)
            if not isinstance(size, int) or not 1 <= size <= MAX_SIDE:
                raise ValueError(f"{name} of Image must be a whole number from 1 to {MAX_SIDE}, got {size!r}")
        if self.channels not in MODES:
            raise ValueError(f"channels of Image must be one of 1, 3, 4, got {self.channels!r}")
        if self.resize not in get_args(Resize):
            raise ValueError(f"resize of Image must be 'crop' or 'stretch', got {self.resize!r}")
        for name in ("mean", "std"):
            given = getattr(self, name)
            values = tuple(given) if isinstance(given, Sequence) else (given,)
            if len(values) not in (1, self.channels) or not all(
                isinstance(value, int | float) and isfinite(value) for value in values
            ):
                raise ValueError(
                    f"{name} of Image must be one number, or {self.channels} numbers, one per channel, "
                    f"got {given!r}"
                )
            object.__setattr__(self, name, values if len(values) > 1 else float(values[0]))
        if np.min(self.std) <= 0:
            raise ValueError(f"std of Image must be above 0, got {self.std}")

    def adopt(self, name: str, data_type: DataType) -> Self:
        if data_type.simpleString() != "binary" and not is_spark_image(data_type):
            raise ValueError(
                f"column {name!r} has type {data_type.simpleString()}: Image is for bytes of encoded images, "
                "as in 'content' of spark.read.format('binaryFile'), and for Spark's image struct"
            )
        pillow("column type Image")
        return self

    def select(self, source: SparkColumn, data_type: DataType) -> SparkColumn:
        if not is_spark_image(data_type):
            return source
        image: SparkColumn = spark_image(source)
        return image

    def read_values(self, values: Any, source: str = "", zone: str = "UTC") -> Any:
        if isinstance(values, pa.Array) and pa.types.is_binary(values.type):
            return values
        return pa.array([_bytes_of(value) for value in to_list(values)], pa.binary())

    def read(self, values: Any) -> tuple[Any, dict[int, str]]:
        pixels = np.zeros((len(values), *self.shape), np.uint8)
        is_valid = np.ones(len(values), bool)
        problems = {}
        with refuse_bombs():
            for row, value in enumerate(values):
                if (data := value.as_py()) is None:
                    is_valid[row] = False
                    continue
                try:
                    pixels[row] = decode(data, self.height, self.width, self.channels, self.resize)
                except Exception as error:  # Pillow raises exceptions of many classes
                    is_valid[row], problems[row] = False, describe_problem(data, error)
        valid = None if is_valid.all() else pa.py_buffer(np.packbits(is_valid, bitorder="little"))
        buffers = [valid, pa.py_buffer(pixels)]
        return pa.Array.from_buffers(self.stored("")[""], len(values), buffers), problems

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        return Encoded([values])

    def stored(self, name: str) -> dict[str, Any]:
        return {name: pa.binary(prod(self.shape))}

    def measure(self, arrays: Sequence[Any]) -> NumpyArray:
        return decode_fixed(arrays[0], "uint8", self.shape).reshape(-1)

    def decode(self, columns: Sequence[Any]) -> Rows:
        (column,) = columns
        return decode_fixed(column, "uint8", self.shape)

    def finish(self, name: str, rows: Any) -> dict[str, NumpyArray]:
        values: NumpyArray = rows.astype(np.float32)
        values /= 255
        if np.any(self.mean):
            values -= _per_channel(self.mean)
        if np.any(np.not_equal(self.std, 1)):
            values /= _per_channel(self.std)
        return {name: values}

    def arrays(self, name: str) -> dict[str, BatchArray]:
        return {name: BatchArray("float32", self.shape)}

    @property
    def shape(self) -> Shape:
        return self.channels, self.height, self.width

    @property
    def row_bytes(self) -> int:
        return 4 * prod(self.shape)

    @property
    def held_bytes(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return f"image[{', '.join(map(str, self.shape))}]"


def _per_channel(numbers: float | tuple[float, ...]) -> NumpyArray:
    return np.array(numbers, np.float32).reshape(-1, 1, 1)


def _bytes_of(value: Any) -> bytes | None:
    struct = value.asDict() if hasattr(value, "asDict") else value
    if isinstance(struct, dict):
        data = struct.get("data")
        return None if data is None else image_bytes(struct | {"data": to_bytes(data)})
    try:
        return None if value is None else to_bytes(value)
    except ValueError:
        if not isinstance(value, str):
            raise
        return value.encode()  # only the row that holds it cannot be read


def is_spark_image(data_type: DataType) -> bool:
    fields = {field.name: field.dataType.simpleString() for field in getattr(data_type, "fields", ())}
    return tuple(fields) == SPARK_FIELDS and fields["data"] == "binary"
