"""Column type "table_row": the mixed columns of a table as one row of numbers and one row of category ids.

The source is a struct of the table's columns. Python computes every number from it, in the write and in
`transform` alike: standardized numbers, the cyclic parts of dates, and ids. A missing number is NaN. Id 0 of
a category is for all values without an id, such as new or rare strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ringspark.pipelines.kinds.base import BatchArray, Encoded, Kind, decode_fixed, numbers
from ringspark.pipelines.kinds.scalar import number_of, quote
from ringspark.pipelines.kinds.strings import value_set
from ringspark.pipelines.kinds.table_values import doubles_of, is_text, items_of, seconds_of, words_of
from ringspark.pipelines.kinds.values import at_path
from ringspark.pipelines.rows import NumpyArray, Rows
from ringspark.pipelines.spark_errors import MARK

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType
    from typing_extensions import Self

Form = Literal["number", "levels", "words", "calendar"]

_DAY = 86_400.0
_PANDAS_SECONDS = 9.2e9
_OFFSET = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d\d)(?::?(\d\d))?)?")
# Zone names of Java that the time zone database lacks; it has EST, MST, HST and UTC.
_SHORT_ZONES = {
    "Z": "UTC", "UT": "UTC", "ACT": "Australia/Darwin", "AET": "Australia/Sydney", "ART": "Africa/Cairo",
    "AGT": "America/Argentina/Buenos_Aires", "AST": "America/Anchorage", "BET": "America/Sao_Paulo",
    "BST": "Asia/Dhaka", "CAT": "Africa/Harare", "CNT": "America/St_Johns", "CST": "America/Chicago",
    "ECT": "Europe/Paris", "IST": "Asia/Kolkata",  # codespell:ignore ect,ist
    "CTT": "Asia/Shanghai", "EAT": "Africa/Addis_Ababa",
    "IET": "America/Indiana/Indianapolis", "JST": "Asia/Tokyo", "MIT": "Pacific/Apia", "NET": "Asia/Yerevan",
    "NST": "Pacific/Auckland", "PLT": "Asia/Karachi", "PNT": "America/Phoenix", "VST": "Asia/Ho_Chi_Minh",
    "PRT": "America/Puerto_Rico", "PST": "America/Los_Angeles", "SST": "Pacific/Guadalcanal",
}  # fmt: skip
_NUMERIC = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal")

NULL_WORD = "\0null"
"""Entry of `TableColumn.words` that means a missing string."""

CALENDAR: dict[str, float] = {"hour": 1.0, "weekday": 7.0, "monthday": 31.0, "yearday": 365.2425}
"""Parts of a date, and the period of each part in days."""


def title_of(name: str, path: Sequence[str], item: int | None) -> str:
    """Returns a name such as `column.field[3]`."""
    return ".".join((name, *path)) + ("" if item is None else f"[{item}]")


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """How one column of a table becomes numbers or a category id.

    Attributes:
        name: Name of the field in the struct.
        path: Fields inside a nested struct, from the outermost inwards.
        item: Index in an array or vector; None for other types.
        form: "number": one standardized number. "levels": an id for each number that occurs repeatedly.
            "words": an id for each string. "calendar": `parts` of the date, and the standardized date.
        center, scale: Standardization of the number: (value - center) / scale.
        low, high: Range of the standardized number; values outside are clipped.
        length: Number of items of each array or vector.
        origin: Number that Spark subtracts before it rounds to a double: about the median, if the
            column has numbers with more digits than a double; else 0.
        type: Spark type that the column must have. If it is numeric, every numeric type is accepted. Strings
            of the forms "number", "levels" and "calendar" are read as numbers or times.
        zone: Time zone of a timestamp or of a text with times; else empty.
        day_first: Whether texts such as "4/12/2020" begin with the day, not with the month.
        levels: Known numbers of the form "levels", ascending; number i has the id i + 1.
        words: Known strings of the form "words"; string i has the id i + 1.
        parts: Keys of `CALENDAR`: the cyclic parts of the date that become numbers.
        has_trend: Whether the form "calendar" includes the standardized date.
        edges: Ascending inner edges of bins over the standardized number or date; empty for forms with ids.
        counts: Number of training rows per bin, or per id from 0 on, and last the rows without a value; empty
            if the rows were not counted.
        means: Mean standardized number of the training rows in each bin.
    """

    name: str
    path: tuple[str, ...] = ()
    item: int | None = None
    length: int | None = None
    origin: int = 0
    type: str = "double"
    zone: str = ""
    day_first: bool = False
    form: Form = "number"
    center: float = 0.0
    scale: float = 1.0
    low: float = -8.0
    high: float = 8.0
    levels: tuple[float, ...] = ()
    words: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    has_trend: bool = True
    edges: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    means: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ValueError(f"form of TableColumn must be one of {get_args(Form)}, got {self.form!r}")
        if not (self.scale > 0 and self.low <= self.high):
            raise ValueError(f"column {self.name!r} needs a scale above 0 and low <= high")
        if unknown := set(self.parts) - CALENDAR.keys():
            raise ValueError(f"parts of TableColumn must be in {list(CALENDAR)}, got {min(unknown)!r}")
        if len(self.counts) not in (0, self.num_counts):
            raise ValueError(f"column {self.name!r} needs {self.num_counts} counts, got {len(self.counts)}")

    @property
    def title(self) -> str:
        """Name of the column for people, such as `column.field[3]`."""
        return title_of(self.name, self.path, self.item)

    @cached_property
    def source(self) -> str:
        """Name of the value in the struct that Spark sends to Python."""
        return json.dumps([self.name, *self.path, self.item, self.form == "words", self.origin])

    @property
    def num_ids(self) -> int:
        """Number of ids; 0 for numbers and dates."""
        return len(self.levels or self.words) + 1 if self.form in ("levels", "words") else 0

    @property
    def num_counts(self) -> int:
        """Number of `counts`: one per bin or id, and one for missing values."""
        return (self.num_ids or len(self.edges) + 1) + 1

    @property
    def num_numbers(self) -> int:
        if self.form == "calendar":
            return int(self.has_trend) + 3 * len(self.parts)
        return int(self.form == "number")

    def read_values(self, values: Any) -> Any:
        """Returns the value in the struct that Spark sends to Python, as an Arrow array."""
        try:
            values = at_path(values, self.path)
            if self.item is not None:
                values = items_of(values, self.item, self.length)
            if self.form == "words":
                return words_of(values, self.type)
            if self.form == "calendar":
                return seconds_of(values, self.type, self.zone, self.day_first)
            return doubles_of(values, self.type, self.origin)
        except ValueError as error:
            raise ValueError(f"{self.title!r} {error}") from None

    def found_type(self, data_type: DataType) -> str:
        """Returns the Spark type that the column has in a struct, or "missing"."""
        for part in (self.name, *self.path):
            field = _find_field(data_type, part)
            if field is None:
                return "missing"
            data_type = field.dataType
        return data_type.simpleString()

    def clean(self, values: NumpyArray) -> NumpyArray:
        """Replaces non-finite float64 values by NaN, and moves times to the clock of the training."""
        values = np.where(np.isfinite(values), values, np.nan)
        return _on_clock(values, self.zone) if self.zone else values

    def standardize(self, cleaned: NumpyArray, low: float, high: float) -> NumpyArray:
        """Returns the result of `clean` as standardized numbers between `low` and `high`."""
        with np.errstate(invalid="ignore", over="ignore"):
            return np.clip((cleaned - self.center) / self.scale, low, high)

    def numbers_of(self, values: NumpyArray) -> NumpyArray:
        """Converts float64 values of the table to the network's numbers: (rows, num_numbers) float32."""
        values = self.clean(values)
        found = [self.standardize(values, self.low, self.high)] if self.has_trend else []
        if self.form == "calendar":
            for name in self.parts:
                turn = _calendar(name, values) / CALENDAR[name]
                found += [turn * 4 - 2, np.sin(2 * np.pi * turn), np.cos(2 * np.pi * turn)]
        return np.stack(found, axis=1).astype(np.float32)

    def ids_of(self, values: Any) -> NumpyArray:
        """Returns the ids of an Arrow array of strings or doubles: (rows,) int32."""
        if self.form == "words":
            values = pc.fill_null(values, NULL_WORD)
            found = pc.fill_null(pc.index_in(values, value_set=value_set(self.words)), -1)
            ids: NumpyArray = found.to_numpy(zero_copy_only=False) + 1
            return ids.astype(np.int32)
        levels, given = np.array(self.levels), to_doubles(values)
        place = np.minimum(np.searchsorted(levels, given), len(levels) - 1)
        return np.where(levels[place] == given, place + 1, 0).astype(np.int32)


@dataclass(frozen=True)
class TableRow(Kind):
    """The numbers and ids of a table's columns; a batch holds `name.numbers` and `name.ids`.

    The numbers are float32 (rows, M), with NaN for missing numbers. The ids are int64 (rows, K).

    Attributes:
        columns: The columns in the order of their numbers and ids.
    """

    tag: ClassVar[str] = "table_row"
    suffixes: ClassVar[tuple[str, ...]] = (".numbers", ".ids")
    columns: tuple[TableColumn, ...] = ()

    @property
    def num_numbers(self) -> int:
        return sum(column.num_numbers for column in self.columns)

    @property
    def cardinalities(self) -> list[int]:
        """Number of ids of each category, in order."""
        return [column.num_ids for column in self.columns if column.num_ids]

    @property
    def sources(self) -> list[str]:
        """Names of the table's columns in order, without repetition."""
        return list(dict.fromkeys(column.name for column in self.columns))

    def titles(self, part: str) -> list[str]:
        """Returns the column title of each number if `part` is ".numbers", or of each id if it is ".ids"."""
        counts = [
            (c.title, c.num_numbers if part == self.suffixes[0] else bool(c.num_ids)) for c in self.columns
        ]
        return [title for title, count in counts for _ in range(count)]

    def adopt(self, name: str, data_type: DataType) -> Self:
        known = dict.fromkeys(field.name for field in getattr(data_type, "fields", ()))
        if self.is_selected(data_type):
            return self
        if missing := [source for source in self.sources if source not in known]:
            raise ValueError(f"column {name!r} has no field {missing[0]!r}; it has {list(known)}")
        for column in self.columns:
            found = column.found_type(data_type)
            is_same = found in (column.type, "void") or (is_number(found) and is_number(column.type))
            if found == "missing":
                raise ValueError(
                    f"column {column.name!r} lacks the field {'.'.join(column.path)!r}, which the "
                    "model was trained on; add it, or rename a field to it"
                )
            if not is_same:
                raise ValueError(
                    f"column {'.'.join((column.name, *column.path))!r} was trained as {column.type} and is "
                    f"now {found}; cast it to {column.type}"
                )
        return self

    def without_counts(self) -> TableRow:
        """Returns the type without statistics of the training rows."""
        return TableRow(tuple(replace(column, counts=(), means=()) for column in self.columns))

    @cached_property
    def selected(self) -> Any:
        """Strings for words, else doubles; see `select`."""
        types = {c.source: pa.string() if c.form == "words" else pa.float64() for c in self.columns}
        return pa.struct(list(types.items()))

    def is_selected(self, data_type: DataType) -> bool:
        """Returns whether `select` has already made a column of this type."""
        return bool(self.columns) and {f.name for f in getattr(data_type, "fields", ())} == {
            column.source for column in self.columns
        }

    def select(self, source: SparkColumn | None, data_type: DataType) -> SparkColumn:
        """Returns a struct with the values of `columns`.

        Without a `source`, they come from columns of the DataFrame, not from fields of a struct: Spark takes
        minutes to resolve thousands of fields of a computed struct.
        """
        from pyspark.sql import functions as F

        if source is not None and self.is_selected(data_type):
            return source
        types = {field.name: field.dataType for field in data_type.fields}  # type: ignore[attr-defined]
        texts: dict[str, str] = {}
        others: dict[str, SparkColumn] = {}
        for column in self.columns:
            name, value_type = column.source, types[column.name]
            is_plain = column.form == "words" or (is_number(column.type) and not column.origin)
            if source is None and not column.path and column.item is None and is_plain:
                text = "STRING" if column.form == "words" else "DOUBLE"
                texts[name] = f"CAST({quote(column.name)} AS {text}) AS {quote(name)}"
            elif name not in others:
                value = F.col(quote(column.name)) if source is None else source.getField(column.name)
                others[name] = _select_value(value, value_type, column).alias(name)
        if not others:
            return F.expr(f"struct({', '.join(texts.values())})")
        return F.struct(*map(F.expr, texts.values()), *others.values())

    def read_values(self, values: Any, source: str = "", zone: str = "UTC") -> Any:
        """Like `Kind.read_values`; `values` may also be the table's columns by name."""
        columns = values if isinstance(values, Mapping) else {n: at_path(values, [n]) for n in self.sources}
        by_source = {column.source: column for column in self.columns}
        made = [column.read_values(columns[column.name]) for column in by_source.values()]
        return pa.StructArray.from_arrays(made, fields=list(self.selected))

    def stored(self, name: str) -> dict[str, Any]:
        return {name: pa.binary(self._dtype.itemsize)}

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        fields = {field.name: values.field(index) for index, field in enumerate(values.type)}
        rows = np.zeros(len(values), self._dtype)
        number = category = 0
        for column in self.columns:
            given = fields[column.source]
            if column.num_ids:
                rows["ids"][:, category] = column.ids_of(given)
                category += 1
            else:
                made = column.numbers_of(to_doubles(given))
                rows["numbers"][:, number : number + made.shape[1]] = made
                number += made.shape[1]
        buffer = pa.py_buffer(np.ascontiguousarray(rows).view(np.uint8))
        return Encoded([pa.Array.from_buffers(self.stored("")[""], len(rows), [None, buffer])])

    def measure(self, arrays: Sequence[Any]) -> NumpyArray:
        # A resumed run compares these statistics of all standardized numbers and ids.
        rows: Any = self.decode(arrays)
        found: NumpyArray = np.concatenate([rows["numbers"].ravel(), rows["ids"].ravel()])
        return found[~np.isnan(found)]

    def decode(self, columns: Sequence[Any]) -> Rows:
        (column,) = columns
        return decode_fixed(column, "uint8", (self._dtype.itemsize,)).view(self._dtype).reshape(-1)

    def finish(self, name: str, rows: Any) -> dict[str, NumpyArray]:
        return {
            f"{name}.numbers": np.ascontiguousarray(rows["numbers"]),
            f"{name}.ids": rows["ids"].astype(np.int64),
        }

    def arguments(self, name: str) -> tuple[str, ...]:
        return self.batch_names(name)

    def arrays(self, name: str) -> dict[str, BatchArray]:
        return {
            f"{name}.numbers": BatchArray("float32", (self.num_numbers,)),
            f"{name}.ids": BatchArray("int64", (len(self.cardinalities),)),
        }

    @property
    def row_bytes(self) -> int:
        return 4 * self.num_numbers + 8 * len(self.cardinalities)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.tag, "columns": [asdict(column) for column in self.columns]}

    def __str__(self) -> str:
        return (
            f"float32[{self.num_numbers}] and int64[{len(self.cardinalities)}] of {len(self.sources)} columns"
        )

    def __repr__(self) -> str:
        return f"TableRow({', '.join(self.sources)})"

    @cached_property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype([("numbers", "<f4", (self.num_numbers,)), ("ids", "<i4", (len(self.cardinalities),))])


def _select_value(value: SparkColumn, value_type: DataType, column: TableColumn) -> SparkColumn:
    """Returns the value of one column as a string or a double, null if it is missing."""
    from pyspark.sql import functions as F

    for part in column.path:
        value, value_type = value.getField(part), _find_field(value_type, part).dataType
    if column.item is not None:
        if value_type.typeName() != "array":
            value = items_of_vector(value)
        item = F.get(value, F.lit(column.item))
        given = F.concat(
            F.lit(f"{MARK}column {column.title!r} is in an array of "), F.size(value).cast("string")
        )
        text = F.concat(given, F.lit(f" numbers; give arrays of {column.length}, as in the training"))
        is_known = value.isNull() | (F.size(value) == column.length)
        value = item if column.length is None else F.when(is_known, item).otherwise(F.raise_error(text))
    if column.form == "words":
        return value.cast("string")
    name = getattr(value_type, "elementType", value_type).typeName()
    if column.form == "calendar":
        if is_text(name):
            value, name = time_of(value, column.zone, column.day_first), "timestamp"
        if name == "timestamp":
            # Python reads them on the clock of the training's time zone.
            return F.unix_micros(value).cast("double") / 1e6
        return local_seconds(value, name)
    return double_of(value, name, column.origin)


def items_of_vector(vector: SparkColumn) -> SparkColumn:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    # Spark's function fails on null.
    return F.when(vector.isNotNull(), vector_to_array(vector))


def try_cast(value: SparkColumn, data_type: str) -> SparkColumn:
    """Casts a string; null if it cannot be cast."""
    trimmed = value.cast("string")
    # Before Spark 4.0, a cast gives null by default.
    return trimmed.try_cast(data_type) if hasattr(type(trimmed), "try_cast") else trimmed.cast(data_type)


def time_of(text: SparkColumn, zone: str, day_first: bool = False) -> SparkColumn:
    """Reads a text as a timestamp; null if it has no date. `zone` is the time zone of a text without one.

    Takes ISO 8601, also with slashes or dots, and "12/31/2020", or "31/12/2020" if `day_first`.
    """
    from pyspark.sql import functions as F

    # Spark reads "12:30" as a time of the current day.
    text = F.when(text.cast("string").rlike(r"^\s*(?:[+-]?\d{4,}-|\d+([/.-])\d+\1\d)"), text.cast("string"))
    for pattern, made in (
        (r"^\s*(\d{4})([/.])(\d\d?)\2(\d\d?)(?!\d)", "$1-$3-$4"),
        (r"^\s*(\d\d?)\.(\d\d?)\.(\d{4})(?!\d)", "$3-$2-$1"),
        (r"^\s*(\d\d?)([/-])(\d\d?)\2(\d{4})(?!\d)", "$4-$3-$1" if day_first else "$4-$1-$3"),
    ):
        text = F.regexp_replace(text, pattern, made)
    local = F.timestamp_micros(number_of(try_cast(text, "timestamp_ntz"), "timestamp_ntz"))
    names_zone = text.rlike(r":[\d.:]*\d\s*[^\d\s.:]")
    return F.when(names_zone, try_cast(text, "timestamp")).otherwise(F.to_utc_timestamp(local, zone))


def double_of(value: SparkColumn, type_name: str, origin: int = 0) -> SparkColumn:
    """Returns a number, or a text with a number, as a double, after the subtraction of `origin`."""
    from pyspark.sql import functions as F

    text = is_text(type_name)
    rounded = try_cast(value, "double") if text else number_of(value, type_name).cast("double")
    if not origin:
        return rounded
    if not type_name.startswith("decimal"):
        # A text, or an infinite double, fails in a plain cast.
        is_free = text or type_name in ("float", "double")
        value = try_cast(value, "decimal(38,0)") if is_free else value.cast("decimal(38,0)")
    distance = F.try_subtract(value, F.lit(Decimal(origin))).cast("double")
    return F.coalesce(distance, rounded - F.lit(float(origin)))  # beyond 38 digits


def local_seconds(value: SparkColumn, type_name: str) -> SparkColumn:
    """Returns the local time (session's time zone) in seconds since 1970-01-01, as a double."""
    from pyspark.sql import functions as F

    days = F.unix_date(value if type_name == "date" else F.to_date(value)).cast("double") * F.lit(_DAY)
    if type_name == "date":
        return days
    return days + F.hour(value) * 3600 + F.minute(value) * 60 + F.second(value)


def _find_field(data_type: DataType, name: str) -> Any:
    """Returns a field of a struct by the session's rule for names; None if there is none."""
    from pyspark.sql import SparkSession

    fields = getattr(data_type, "fields", ())
    alike = [field for field in fields if field.name == name]
    if not alike:
        session = SparkSession.getActiveSession()
        if session is None or str(session.conf.get("spark.sql.caseSensitive", "false")).lower() != "true":
            alike = [field for field in fields if field.name.lower() == name.lower()]
    return alike[0] if len(alike) == 1 else None


def to_doubles(values: Any) -> NumpyArray:
    """Converts to float64. Nulls become NaN; infinities stay."""
    return numbers(values.cast(pa.float64())).astype(np.float64, copy=False)


def is_number(type_name: str) -> bool:
    """Whether a Spark type is numeric."""
    return type_name.partition("(")[0] in _NUMERIC


def _on_clock(seconds: NumpyArray, zone: str) -> NumpyArray:
    """Converts UTC seconds since 1970 to the local time of a time zone, also in seconds since 1970."""
    import pandas as pd

    # pandas reaches from 1677 to 2262. Beyond, the UTC offset is constant.
    within = np.clip(seconds, -_PANDAS_SECONDS, _PANDAS_SECONDS)
    moments = pd.to_datetime(pd.Series(within), unit="s", utc=True)
    shown = moments.dt.tz_convert(_clock_of(zone)).dt.tz_localize(None)
    found: NumpyArray = ((shown - pd.Timestamp(0)) / pd.Timedelta(seconds=1)).to_numpy(np.float64)
    local: NumpyArray = seconds + (found - within)
    return local


def zone_name(zone: str) -> str:
    """Converts a Spark time zone, such as "GMT+8" or "PST", to a name or an offset "+08:00" for pandas."""
    offset = _OFFSET.fullmatch(zone)
    if offset is None:
        return _SHORT_ZONES.get(zone, zone)
    sign, *parts = offset.groups("0")
    hours, minutes, seconds = (f"{int(part):02}" for part in parts)
    return f"{sign}{hours}:{minutes}" + (f":{seconds}" if seconds != "00" else "")


def _clock_of(zone: str) -> Any:
    name = zone_name(zone)
    return datetime.strptime(name, "%z").tzinfo if name.startswith(("+", "-")) else name


def _calendar(part: str, seconds: NumpyArray) -> NumpyArray:
    """Returns a part of the date, such as the weekday, for seconds since 1970; see `CALENDAR`."""
    days = np.floor(seconds / _DAY)
    if part == "hour":
        return seconds / _DAY - days
    if part == "weekday":
        return (days + 3) % 7  # 1970-01-01 was a Thursday
    known = np.where(np.isfinite(days), days, 0).astype("datetime64[D]")
    start = known.astype("datetime64[M]" if part == "monthday" else "datetime64[Y]").astype("datetime64[D]")
    found = (known - start).astype(np.float64)
    return np.where(np.isfinite(days), found, np.nan)
