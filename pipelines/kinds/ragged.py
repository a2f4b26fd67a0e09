"""Column types "ragged" and "padded": arrays of varying length, stored without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringspark.pipelines.kinds.array import element_dtype, flatten
from ringspark.pipelines.kinds.base import (
    BatchArray,
    Encoded,
    Kind,
    Shape,
    decode_lists,
    list_type,
    match_dtype,
    range_of,
)
from ringspark.pipelines.kinds.values import to_numbers
from ringspark.pipelines.rows import NumpyArray, RaggedRows, Rows

if TYPE_CHECKING:
    from pyspark.sql.types import DataType
    from typing_extensions import Self


@dataclass(frozen=True)
class Ragged(Kind):
    """Arrays of any length, without padding; a batch holds `name.values` and `name.offsets`.

    Row i is `values[offsets[i]:offsets[i + 1]]`; offsets are int64, (rows + 1,), and start at 0.

    Attributes:
        dtype: NumPy dtype name of the elements; if empty, the Spark type decides.
    """

    tag: ClassVar[str] = "ragged"
    suffixes: ClassVar[tuple[str, ...]] = (".values", ".offsets")
    dtype: str = ""

    def adopt(self, name: str, data_type: DataType) -> Self:
        return replace(self, dtype=match_dtype(name, self.dtype, element_dtype(name, data_type, depth=1)))

    def read_values(self, values: Any, source: str = "", zone: str = "UTC") -> Any:
        return to_numbers(values, self.dtype, depth=1)

    @property
    def request(self) -> tuple[str, Shape]:
        return self.dtype, (getattr(self, "length", None) or 1,)

    def stored(self, name: str) -> dict[str, Any]:
        return {name: list_type(self.dtype)}

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        lists, (lengths,) = flatten(values, self.dtype)
        return Encoded([lists], range_of(lengths))

    def decode(self, columns: Sequence[Any]) -> Rows:
        (column,) = columns
        return decode_lists(column, self.dtype)

    def finish(self, name: str, rows: RaggedRows) -> dict[str, NumpyArray]:
        compact = rows.compact()
        return {f"{name}.values": compact.parts[0], f"{name}.offsets": compact.offsets}

    def arguments(self, name: str) -> tuple[str, ...]:
        return self.batch_names(name)

    def arrays(self, name: str) -> dict[str, BatchArray]:
        offsets = f"{name}.offsets"
        return {
            f"{name}.values": BatchArray(self.dtype, offsets=offsets),
            offsets: BatchArray("int64", offsets=offsets),
        }

    @property
    def row_bytes(self) -> int:
        # A guess of 32 elements, used if there are no statistics.
        return 32 * self.value_bytes

    @property
    def value_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[ragged]"


@dataclass(frozen=True)
class Padded(Ragged):
    """Arrays of any length; a batch holds `name` (rows, length) and `name.length` (rows,) int64.

    Attributes:
        dtype: NumPy dtype name of the elements; if empty, the Spark type decides.
        length: Elements per row in the batch; None takes the length of the longest row. A longer row raises
            an error.
        value: Value of the padding at the end of shorter rows.
    """

    tag: ClassVar[str] = "padded"
    suffixes: ClassVar[tuple[str, ...]] = ("", ".length")
    value_bytes = 0
    length: int | None = None
    value: float = 0

    def adopt(self, name: str, data_type: DataType) -> Self:
        if self.length is not None and (not isinstance(self.length, int) or self.length < 1):
            raise ValueError(
                f"length of Padded for column {name!r} must be a whole number above 0, got {self.length!r}"
            )
        dtype = super().adopt(name, data_type).dtype
        is_number = isinstance(self.value, (int, float))
        # A float column takes any number, rounded; an integer or boolean column must hold it exactly.
        if is_number and np.dtype(dtype).kind != "f":
            is_number = self.value % 1 == 0 and bool(np.asarray(self.value).astype(dtype) == self.value)
        if not is_number:
            raise ValueError(f"value of Padded for column {name!r} must be a {dtype}, got {self.value!r}")
        return replace(self, dtype=dtype)

    def settle(self, name: str, shapes: tuple[Shape, Shape] | None, nullable: bool) -> Self:
        longest = 0 if shapes is None else shapes[1][0]
        if self.length is not None and longest > self.length:
            raise ValueError(
                f"column {name!r} has arrays of up to {longest} elements, but length={self.length} is set; "
                "cut them first with F.slice, or raise length"
            )
        if self.length is None and longest == 0:
            raise ValueError(f"column {name!r} holds only empty arrays; drop it with df.drop")
        return replace(self, length=self.length or longest)

    def check_shapes(self, shapes: tuple[Shape, Shape] | None) -> None:
        longest = shapes[1][0] if shapes else 0
        if longest > (self.length or 0):
            raise ValueError(
                f"has an array of {longest} elements, but the model was trained on at most {self.length}; "
                "shorten the array"
            )

    def finish(self, name: str, rows: RaggedRows) -> dict[str, NumpyArray]:
        assert self.length is not None
        compact = rows.compact()
        lengths = np.diff(compact.offsets)
        padded = np.full((len(lengths), self.length), self.value, dtype=self.dtype)
        padded[np.arange(self.length) < lengths[:, None]] = compact.parts[0]
        return {name: padded, f"{name}.length": lengths}

    def arguments(self, name: str) -> tuple[str, ...]:
        return (name,)

    def arrays(self, name: str) -> dict[str, BatchArray]:
        assert self.length is not None
        return {name: BatchArray(self.dtype, (self.length,)), f"{name}.length": BatchArray("int64")}

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * (self.length or 1)

    def __str__(self) -> str:
        return f"{self.dtype}[{self.length} padded]"
