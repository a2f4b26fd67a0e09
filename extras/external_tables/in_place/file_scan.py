"""Finds out whether the rows of a DataFrame are rows of Parquet files, and in which of the files' columns.

The plan that Spark prints says so, with Spark Classic and Spark Connect alike. A wrong reading of this text
changes no number, because the tasks that write the references compare each value with the file's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ringspark.pipelines.columns import quote
from ringspark.pipelines.spark_plans import explain, find_changing_call, is_cached, parse_size, section
from ringspark.pipelines.table_files import FileColumn, InPlaceError
from ringspark.pipelines.writing.references import REFERENCE_SQL

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# These keep the rows of a file in their order. "Repartition n, false" is `coalesce`.
_OPERATORS = ("Project", "Filter", "Relation", "ArrowEvalPython", "BatchEvalPython")
_MARK = "ringspark_column_"
FIELD_ID, READS_FIELD_IDS = "parquet.field.id", "spark.sql.parquet.fieldId.read.enabled"
"""Spark's metadata key of a field ID, and the setting by which Spark reads columns by field IDs."""
PHYSICAL, MAPPED_ID = "delta.columnMapping.physicalName", "delta.columnMapping.id"
"""Delta's metadata keys of a column's name and field ID in the files."""
_RELATION = re.compile(r"Relation (?:[\w.`-]+)?\[(.*)\] parquet$")
_ATTRIBUTE = re.compile(r"[^()\[\]#]+#(\d+)L?")
# A cast that only renames the fields of a struct.
_RENAME = re.compile(r"cast\((.*) as struct<.*>\)")
_ENDS = re.compile(r"#\d+L?(?:,|$)")
_NAMED = r"(?:\[|, )((?:cast\([^\[,]+? as struct<(?:(?! AS ).)*>\)|[^\[,]+?)) AS [^()\[\]]*?#{}L?(?:,|\])"
_CAST = re.compile(r"cast\((.*) as (tinyint|smallint|int|bigint|float|double|boolean)\)")


@dataclass(frozen=True, kw_only=True)
class FileScan:
    """The columns in the files, by their names in the DataFrame, and Spark's estimate of the bytes."""

    columns: dict[str, FileColumn]
    num_bytes: float = 0.0


def find_scan(df: DataFrame, names: Sequence[str]) -> FileScan:
    """Finds the columns of `names` that are in the Parquet files below a DataFrame.

    The result lacks computed columns and partition columns.

    Raises:
        InPlaceError: The plan does more than select columns and filter rows of one scan of Parquet files.
    """
    from pyspark.sql import functions as F

    if "_metadata" in map(str.lower, df.columns):
        raise InPlaceError("its column '_metadata' hides Spark's column of this name; rename it")
    chosen = [F.col(quote(name)).alias(f"{_MARK}{index}") for index, name in enumerate(names)]
    try:
        extended, cost = explain(df.select(*chosen, *REFERENCE_SQL), "EXTENDED", "COST")
    except Exception as error:  # Spark raises many classes
        raise InPlaceError(
            "Spark does not report from which file each row comes, because the DataFrame is not a scan of "
            "files or mixes several"
        ) from error
    lines = [line.lstrip(" :+-") for line in section(extended, "Optimized Logical Plan").splitlines()]
    for line in lines:
        if not line.startswith(_OPERATORS) and not re.fullmatch(r"Repartition \d+, false", line):
            operator = re.split(r"\W", line, maxsplit=1)[0] or line[:40]
            raise InPlaceError(f"the DataFrame's plan has {operator!r}")
    relation = _RELATION.match(lines[-1])
    if relation is None:
        raise InPlaceError(
            f"the DataFrame reads {lines[-1].rpartition('] ')[2] or 'no files'!r}, not Parquet files"
        )
    # Spark does not read `_metadata` from a cache, so it calls the function again.
    call = find_changing_call(section(extended, "Analyzed Logical Plan").partition("\n")[2])
    if call is not None and is_cached(*explain(df, "EXTENDED")):
        raise InPlaceError(
            f"the DataFrame is cached and calls {call!r}, so its files may now give other rows than the cache"
        )
    above, names_below = "\n".join(lines[:-1]), {*_ENDS.split(relation[1]), *_nested_names(df.schema)}
    stored = _top_level_names(section(extended, "Physical Plan"), names_below - {""})
    found, has_ids = {}, df.sparkSession.conf.get(READS_FIELD_IDS, "false") == "true"
    for index, name in enumerate(names):
        # The mark ends the expression; the start is a bracket, or the mark of the column before it.
        before = rf"{_MARK}{index - 1}#\d+L?, " if index else r"^Project \["
        expression = re.search(rf"{before}(.*?) AS {_MARK}{index}#", above, re.MULTILINE)
        field = df.schema[name]
        field_id = field.metadata.get(FIELD_ID) if has_ids else None
        fields = _fields_in_files(field.dataType, field_id is not None)
        column = expression and _follow(expression[1], above, relation[1], renames=bool(fields))
        if column and column.name in stored:
            known = replace(column, fields=fields)
            found[name] = known if field_id is None else replace(known, name=name, field_id=field_id)
    return FileScan(columns=found, num_bytes=parse_size(cost[cost.rindex("Relation ") :]))


def _fields_in_files(data_type: Any, by_ids: bool) -> dict[str, FileColumn]:
    """Returns the fields of a struct in the files, as its metadata says; {} if they have the same names."""
    found = {
        field.name: FileColumn(
            name=field.metadata.get(PHYSICAL, field.name),
            field_id=field.metadata.get(FIELD_ID, field.metadata.get(MAPPED_ID)) if by_ids else None,
            fields=_fields_in_files(field.dataType, by_ids),
        )
        for field in getattr(data_type, "fields", ())
    }
    plain = all(each == FileColumn(name=name) for name, each in found.items())
    return {} if plain else found


def _follow(expression: str, above: str, relation: str, *, renames: bool) -> FileColumn | None:
    """Returns the file's column that an expression only renames or casts; None if it computes something."""
    casts: list[str] = []
    while True:
        if cast := _CAST.fullmatch(expression) or (renames and _RENAME.fullmatch(expression)):
            casts += cast.groups()[1:]
            expression = cast[1]
            continue
        # First, because the name of a column may look like an expression.
        if re.search(rf"(?:^|,){re.escape(expression)}(?:,|$)", relation):
            return FileColumn(name=expression.rpartition("#")[0], casts=tuple(reversed(casts)))
        attribute = _ATTRIBUTE.fullmatch(expression)
        if attribute is None:
            return None
        # Spark gives an attribute of the scan the name of the column, and a renamed column a new number.
        named = re.search(_NAMED.format(attribute[1]), above)
        if named is None:
            return None
        expression = named[1]


def _nested_names(data_type: Any) -> set[str]:
    inner = [getattr(data_type, part, None) for part in ("elementType", "keyType", "valueType")]
    inner += [field.dataType for field in getattr(data_type, "fields", ())]
    names = {field.name for field in getattr(data_type, "fields", ())}
    return names.union(*(_nested_names(each) for each in inner if each is not None))


def _top_level_names(physical: str, known: set[str]) -> set[str]:
    """Returns the columns that Spark reads from the files, which it prints as `ReadSchema: struct<a:int>`.

    `known`: Names of columns and fields, which may hold the marks of such a text.
    """
    each = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    names: set[str] = set()
    for schema in re.findall(r"ReadSchema: struct<(.*)>", physical):
        depth = 0
        for name, mark in re.findall(rf"(?<![^,<])({each}):|([<>()])", schema):
            depth += (mark in ("<", "(")) - (mark in (">", ")"))
            if name and not depth:
                names.add(name)
    return names
