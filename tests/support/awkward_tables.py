"""Generates tables of few rows: any Spark type, any name, nulls and extreme values."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from spark_tables import spark_conf

from ringspark.pipelines.columns import quote

ROWS = 48
ID = "row number"
"""Column that names a row; no input."""
LABEL = "the label"


def _any_of(*values: str) -> str:
    """Returns SQL that repeats the values over the rows."""
    return f"element_at(array({', '.join(values)}), int(id % {len(values)}) + 1)"


def _decimal(digits: int, scale: int) -> list[str]:
    whole, kind = "9" * (digits - scale) or "0", f"decimal({digits},{scale})"
    largest = f"{whole}.{'9' * scale}" if scale else whole
    ends = _any_of(f"CAST('{largest}' AS {kind})", f"CAST('-{largest}' AS {kind})", f"CAST(0 AS {kind})")
    return [ends, f"TRY_CAST(id % 7 / 8 AS {kind})"]


ANY_CASE, PADDED = _any_of("'a'", "'A'", "'ä'"), _any_of("'a'", "'b '")
NUMBERS = {
    "tinyint": [_any_of("-128Y", "127Y", "0Y"), "CAST(id AS tinyint)"],
    "smallint": [_any_of("-32768S", "32767S"), "CAST(id * 99 AS smallint)"],
    "int": [_any_of("2147483647", "-2147483648", "0"), "int(id)"],
    "bigint": [
        _any_of("9223372036854775807L", "-9223372036854775808L", "0L"),
        "id + (1L << 60)",
        "id * id",
        "id - 9223372036854775807L - 1",
        "id % 5",
    ],
    "float": [
        _any_of("float('inf')", "float('-inf')", "float('nan')", "float(-0.0)", "float(3.4028235e38)"),
        _any_of("float(1e-45)", "float(0)", "float(-1e-45)"),
        "float(sin(id))",
    ],
    "double": [
        _any_of("double('inf')", "double('-inf')", "double('nan')", "-0D", "1.7976931348623157e308D", "1D"),
        _any_of("-1.7976931348623157e308D", "1.7976931348623157e308D"),
        _any_of("4.9e-324D", "0D", "1e-310D"),
        "id * 3.7e306D",
        "id * 1e-300D",
        "IF(id = 7, 1e300, sin(id))",
        "sin(id)",
        "5D",
        "double('nan')",
        "double('inf')",
        "1e15D + id / 8",
    ],
    **{
        f"decimal({d},{s})": _decimal(d, s)
        for d, s in ((1, 0), (3, 3), (9, 2), (15, 5), (18, 0), (19, 1), (22, 2), (38, 0), (38, 18), (38, 38))
    },
    "boolean": ["id % 2 = 0", "true"],
}
TEXTS = {
    "string": [
        _any_of("'a'", "'b'", "''", "' '", "'null'", "'\\0null'", "'\\0'"),
        "concat('item ', id)",
        "repeat('ä', 3000)",
        "concat(repeat('x', 3000), id % 3)",
        "lpad(id, 5, '0')",
        "string(sqrt(id))",
        "string(date_add(DATE'2020-01-01', int(id)))",
        "string(id * 1e300D)",
        "string(timestamp_seconds(id * 77777))",
        _any_of("'NaN'", "'Infinity'", "'1'", "'-0'"),
        _any_of("'1e400'", "'0x10'", "'1_0'", "'٣'", "'😀'", "'a\nb'"),
        "IF(id < 24, string(id), concat('x', id))",
    ],
    "collated": [f"{ANY_CASE} COLLATE {name}" for name in ("UTF8_LCASE", "UNICODE_CI")],
    "char": [f"CAST({PADDED} AS char(3))", "CAST(string(id % 5) AS varchar(9))"],
}
TIMES = {
    "date": [
        "date_add(DATE'2020-01-01', int(id * 11))",
        _any_of("DATE'0001-01-01'", "DATE'9999-12-31'", "DATE'1582-10-10'"),
        "date_add(DATE'1970-01-01', int(id) * 44739242)",
        "DATE'2020-02-29'",
    ],
    "timestamp": [
        "timestamp_seconds(id * 77777)",
        "timestamp_micros(id)",
        _any_of(
            "TIMESTAMP'0001-01-01 00:00:00Z'",
            "TIMESTAMP'9999-12-31 23:59:59.999999Z'",
            "TIMESTAMP'1883-11-18 12:03:58Z'",
        ),
        "timestamp_micros(id * 192153584101141162L)",
    ],
    "timestamp_ntz": [
        "TIMESTAMP_NTZ'2020-03-29 02:30:00' + INTERVAL '13' HOUR * id",
        _any_of("TIMESTAMP_NTZ'0001-01-01 00:00:00'", "TIMESTAMP_NTZ'9999-12-31 23:59:59.999999'"),
    ],
    "time": ["make_time(int(id % 24), 3, 4.5)"],
}
OTHERS = {
    "interval": ["INTERVAL '1' DAY * id", "INTERVAL '1' MONTH * int(id)", "make_interval(int(id), 1, 1)"],
    "variant": ["parse_json(concat('{\"a\":', id, '}'))", "parse_json('null')"],
    "binary": ["CAST(string(id) AS binary)", "X''"],
    "map": ["map('a', id)", "map()", "map(id, map('b', array(id)))"],
    "void": ["NULL"],
    "array": [
        "array(id, NULL, 3)",
        "array(double('nan'), sin(id))",
        "array(id % 2 = 0)",
        "array()",
        "slice(array(1, 2, 3), 1, int(id % 3) + 1)",
        "array(string(id % 2))",
        "array(array(id))",
        "array(CAST(id AS decimal(30,2)))",
        "array(named_struct('x', id))",
        "array(1.7e308D, -1.7e308D * (id % 2))",
        "transform(sequence(1, 40), i -> i * id)",
        "array(DATE'2020-01-01')",
        "array(parse_json('1'))",
    ],
    "vector": [
        "array(sin(id), 1D)",
        "array(double('nan'), id * 3e306D)",
        "slice(array(1D, 2D), 1, int(id % 2) + 1)",
    ],
}
SIMPLE = NUMBERS | TEXTS | TIMES
ALL = SIMPLE | OTHERS

NAMES = [
    *("a", "B", "c d", "e.f", "g`h", "i'j", 'k"l', "m:n", "o,p", "q>r", "s<t", "u[0]", "v(w)", "x#y", "ä€😀"),
    *("select", "id", "0", "a.b.c", "1e5", " z ", "[]", "{n}", "%s", "new\nline", "label", "features", "*"),
    *("__ringspark_table", "c0", "row", "number", "value", "pair", "target", "held", "leaf", "fold", "rows"),
    *("a" * 300, "_metadata", "`", "\\", "-", "null", "v0", "numbers", "a.isnull", "A.b"),
]
TWINS = ["Aa", "aA", "AA", "aa"]
"""Names that are equal for a session that ignores case."""

NULLS = {
    "none": "false",
    "a third": "id % 3 = 0",
    "the first half": "id < 24",
    "all but one": "id <> 5",
    "all": "true",
}
ZONES = ["UTC", "America/St_Johns", "+05:30", "GMT+8", "Asia/Kathmandu", "PST"]

CLASSES = [
    "int(id % 2)",
    "string(id % 3)",
    "id % 2 = 0",
    "CAST(id % 2 AS decimal(22,2))",
    "double(id % 3)",
    "IF(id % 2 = 0, '', 'a')",
    "concat('class ', id % 4)",
    "IF(id % 2 = 0, 'a', 'A') COLLATE UTF8_LCASE",
    "IF(id = 9, NULL, id % 2)",
    "IF(id = 9, double('inf'), id % 2)",
    "IF(id = 9, double('nan'), id % 2)",
    *("id % 2 - 1", "id % 2 + (1L << 60)", "id % 2 / 2", "1", "CAST(NULL AS string)"),
    *("IF(id % 2 = 0, '\\0', 'null')", "array(id)", "DATE'2020-01-01'", "parse_json('1')", "id"),
    *("CAST(id % 2 AS tinyint)", "X'00'", "-100L - id % 2"),
    "CAST(IF(id % 2 = 0, 'a', 'b') AS char(3))",
    "1e300D * (id % 2)",
    "IF(id = 9, NULL, string(id % 2))",
]
TARGETS = [
    *("sin(id)", "id", "CAST(id / 7 AS decimal(38,18))", "CAST(id AS decimal(22,2))", "id % 2 = 0"),
    *("float(id)", "id + (1L << 60)", "1e300D * id", "1e30D * id", "1e-30D * id", "4.9e-324D * id", "5"),
    *("IF(id = 9, NULL, id)", "IF(id = 9, double('nan'), id)", "IF(id = 9, double('inf'), id)"),
    *("string(id)", "named_struct('a', id)", "1e15D + id", "CAST(NULL AS double)", "-0D"),
    *("CAST(id AS tinyint)", "INTERVAL '1' DAY * id", "3.4e38D - id"),
]


@dataclass(frozen=True)
class AwkwardColumn:
    """A column: its name, its type in `ALL`, its SQL, and the condition under which it is null."""

    name: str
    type: str
    sql: str
    nulls: str
    path: tuple[str, ...] = ()

    @property
    def value(self) -> Column:
        if self.type == "vector":  # its function takes no null
            return F.when(F.expr(f"NOT ({NULLS[self.nulls]})"), array_to_vector(F.expr(self.sql)))
        made = f"IF({NULLS[self.nulls]}, NULL, {self.sql})"
        for inner in reversed(self.path):
            escaped = inner.replace("'", "\\'")
            made = f"named_struct('{escaped}', {made}, 'other', id % 3)"
        return F.expr(made)


@dataclass(frozen=True)
class AwkwardTable:
    """One case.

    Attributes:
        label: SQL of the label.
        is_class: Whether the label is for a classifier.
        zone: Time zone of the session.
        partitions: Number of partitions; most are empty if there are more than 8.
        is_exact: Whether the session tells names apart by case.
    """

    columns: tuple[AwkwardColumn, ...]
    label: str
    is_class: bool
    zone: str
    partitions: int
    is_exact: bool

    def make(self, spark: Any) -> DataFrame:
        """Returns the rows, fixed: other settings of the session change no value."""
        rows = spark.range(0, ROWS, 1, 2)
        made = [column.value.alias(column.name) for column in self.columns]
        made += [F.expr(self.label).alias(LABEL), F.col("id").alias(ID)]
        rows = rows.select(*made)
        return self.spread(rows).localCheckpoint()

    def spread(self, rows: DataFrame) -> DataFrame:
        return rows.repartition(self.partitions, F.col(quote(ID)) % 5)


def interpreted(spark: Any, **more: str) -> AbstractContextManager[None]:
    """Returns a context in which Spark compiles no plan of few rows, with `more` settings of Spark SQL."""
    wanted = {
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        **{f"spark.sql.{name}": value for name, value in more.items()},
    }
    return spark_conf(spark, wanted)


def settings_of(spark: Any, table: AwkwardTable, zone: str | None = None) -> AbstractContextManager[None]:
    """Returns a context in which the session has the settings of a case, or another time zone."""
    settings = {"session.timeZone": zone or table.zone, "caseSensitive": str(table.is_exact).lower()}
    settings |= {"preserveCharVarcharTypeInfo": "true", "timeType.enabled": "true"}
    return interpreted(spark, **settings)


@st.composite
def tables(draw: st.DrawFn, most: int = 6) -> AwkwardTable:
    """Draws a case with up to `most` columns."""
    is_exact = draw(st.sampled_from([False, False, False, True]))
    key = (lambda name: name) if is_exact else str.lower
    names = [*NAMES, *TWINS] if is_exact else NAMES
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=most, unique_by=key))
    is_class = draw(st.booleans())
    # Most labels can be learned, or little of a table would be looked at.
    label = draw(
        st.one_of(
            st.sampled_from((CLASSES if is_class else TARGETS)[:2]),
            st.sampled_from(CLASSES if is_class else TARGETS),
        )
    )
    return AwkwardTable(
        columns=tuple(draw(_columns(name)) for name in chosen),
        label=label,
        is_class=is_class,
        zone=draw(st.sampled_from(ZONES)),
        partitions=draw(st.sampled_from([1, 2, 5, 20])),
        is_exact=is_exact,
    )


@st.composite
def _columns(draw: st.DrawFn, name: str) -> AwkwardColumn:
    kind = draw(st.sampled_from(sorted(ALL)))
    path = draw(st.sampled_from([(), (), (), ("x",), ("a.b", "c`d"), ("q'r",)]))
    return AwkwardColumn(
        name=name,
        type=kind,
        sql=draw(st.sampled_from(ALL[kind])),
        nulls=draw(st.sampled_from(["none", "none", *NULLS])),
        path=() if kind == "vector" else path,
    )
