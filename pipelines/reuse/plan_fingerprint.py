"""Asks Spark about a DataFrame's plan: which rows it yields, and whether they may be used again.

`df.semanticHash()` covers types, which no text prints, but it has a meaning only within one Spark
application. It is 32 bits wide, and easily met twice: `id > 3` and `id > -4` have the same hash, and so
have the texts "Aa" and "BB". So the plan's text counts beside it, and the folders and options of its
readers. `refusal` says why rows of this plan must never be used twice. `judge` is pure.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ringspark.pipelines.reuse.repeatable_functions import REPEATABLE_FUNCTIONS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# EXPLAIN cuts long lists of fields and long file schemas; a cut text no longer tells two plans apart.
_UNCUT = {"spark.sql.debug.maxToStringFields": "1000000", "spark.sql.maxMetadataStringLength": "10000000"}
_CUT = re.compile(r"\.\.\. \d+ more fields|more characters|\.\.\.,? |\.\.\.\)?$", re.MULTILINE)

_NAMES = """
    Aggregate CTERelationDef CTERelationRef Deduplicate Distinct Except Expand Filter Generate GlobalLimit
    Intersect Join LocalLimit Offset OneRowRelation Project Range RebalancePartitions Relation Repartition
    RepartitionByExpression ResolvedHint Sort SubqueryAlias Union View Window WithCTE
"""
_OPERATORS = frozenset(_NAMES.split())
_FORMATS = frozenset({"parquet", "orc", "csv", "json"})
# A reader's option decides what these mean: delimiters, the text of a null, patterns of dates.
_TEXT_FORMATS = frozenset({"csv", "json"})

_RELATION = re.compile(r"Relation (?:[\w.`-]+)?\[.*\] (\w+)$")
# A call has no space before its parenthesis; a nested column, `NOT (...)` and `IN (...)` have one.
_CALL = re.compile(r"([\w$>]+)\(")
_SUBQUERY = re.compile(r"(?:subquery|exists|list)#\d+ \[")
_PYTHON = re.compile(
    r"^[\s:*|+()\d-]*\w*(?:Python|Pandas|InArrow|ScriptTransformation|UDTF)\w*", re.MULTILINE
)
_SPECIAL_DATE = re.compile(r"\b(?:now|today|tomorrow|yesterday)\b(?!#)", re.IGNORECASE)
_LOCATION = re.compile(r"Location: (\w+)")
_FOLDERS = re.compile(r"Location: (.*?), PartitionFilters: ")
_STATISTICS = re.compile(r"Relation .*Statistics\(sizeInBytes=([\d.]+) ([KMGTPE]i)?B\b")
_VIEW_OF_OURS = re.compile(r"_pyspark_(?:connect_temp_view_)?[0-9a-f]{32}")
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}

# The settings below belong to the session, which parallel fits share.
_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class PlanFingerprint:
    """What is known about a plan.

    Attributes:
        text: The analysed plan; expression ids are numbered by first appearance.
        sources: Format of each table of files, then the folders of each, in the order of the plan.
        options: Options of each table's reader, where the driver's JVM can be asked for them.
        semantic_hash: Spark's hash, valid within the application; None if the rows must not be reused.
        size_range: Least and most bytes that the source files have by the listing that the DataFrame was
            made with; a range, because Spark prints the size rounded.
        refusal: Reason why rows of this plan must not be reused; None if they may be.
    """

    text: str
    sources: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    semantic_hash: int | None = None
    size_range: tuple[float, float] = (0.0, 0.0)
    refusal: str | None = None

    @property
    def summary(self) -> str:
        """Names of the operators, from the result down to the sources."""
        names = [line.lstrip(" :+-").partition(" ")[0] for line in self.text.splitlines()]
        return " < ".join(names[:8]) + (" < ..." if len(names) > 8 else "")


def fingerprint(df: DataFrame) -> PlanFingerprint:
    """Returns the fingerprint of the plan of `df`. Runs no job."""
    found = judge(*explain(df))
    if found.refusal is not None:
        return found
    if hasattr(df, "_jdf"):
        try:
            found = replace(found, options=_options(df))
        except Exception as error:  # a data source of other make, or a JVM that lets nobody ask
            return replace(
                found, refusal=f"Spark does not tell its readers' options ({type(error).__name__})"
            )
        return replace(found, semantic_hash=df.semanticHash())
    if text_format := next((name for name in found.sources if name in _TEXT_FORMATS), None):
        return replace(found, refusal=f"it reads {text_format}, and Spark Connect does not tell its options")
    return replace(found, semantic_hash=df.semanticHash())


def _options(df: DataFrame) -> tuple[str, ...]:
    """Returns the options of every reader of files in the plan, as the driver's JVM has them."""
    leaves = df._jdf.queryExecution().analyzed().collectLeaves()
    found = [leaves.apply(number) for number in range(leaves.size())]
    return tuple(
        leaf.relation().options().mkString("\0") for leaf in found if leaf.nodeName() == "LogicalRelation"
    )


def explain(df: DataFrame) -> tuple[str, str]:
    """Returns Spark's EXPLAIN EXTENDED and EXPLAIN COST of `df`, uncut.

    It runs a statement instead of `df.explain`, which prints to the stdout of all threads and shows a
    plan made before the DataFrame was cached.
    """
    spark = df.sparkSession
    with _lock, _settings(spark):
        extended, cost = (
            str(spark.sql(f"EXPLAIN {mode} SELECT * FROM {{df}}", df=df).collect()[0][0])
            for mode in ("EXTENDED", "COST")
        )
    return extended, cost


def judge(extended: str, cost: str) -> PlanFingerprint:
    """Makes a fingerprint from the two texts that `explain` returned."""
    analysed, optimised, physical = (
        _section(extended, title)
        for title in ("Analyzed Logical Plan", "Optimized Logical Plan", "Physical Plan")
    )
    lines = _without_view(analysed.splitlines()[1:])
    if not lines or not physical:
        return PlanFingerprint(text=analysed, refusal="Spark did not explain its plan")
    operators = [line.lstrip(" :+-") for line in lines]
    text = "\n".join(_renumber(lines))
    refusal = _refusal(operators, f"{analysed}\n{optimised}\n{physical}", physical)
    formats = [found[1] for operator in operators if (found := _RELATION.match(operator))]
    if refusal is None and len(formats) > len(re.findall(r"\bRelation [\w.`-]*\[", optimised)):
        # Spark answers from metadata alone, and then `df.inputFiles()` leaves the files out too.
        refusal = "Spark answers a part of it without reading its files"
    if refusal is not None:
        return PlanFingerprint(text=text, refusal=refusal)
    sources = (*formats, *_FOLDERS.findall(physical))
    return PlanFingerprint(text=text, sources=sources, size_range=_size_range(cost))


def _refusal(operators: Sequence[str], everything: str, physical: str) -> str | None:
    for operator in operators:
        name = re.split(r"\W", operator, maxsplit=1)[0]
        if name == "Relation":
            relation = _RELATION.match(operator)
            if relation is None or relation[1] not in _FORMATS:
                source = operator.rpartition("] ")[2] or "a table"
                return f"it reads {source}, where Spark does not tell one version or reader from another"
        elif name == "Sample":
            return "it samples, and another run gives other rows"
        elif name not in _OPERATORS:
            return f"its plan has {name or 'an operator'!r}, whose rows the plan does not tell"
    if "InMemoryRelation" in everything or "InMemoryTableScan" in everything:
        return "it is cached in Spark, which may hold older rows than its files"
    if _PYTHON.search(physical):
        return "it calls a Python function, whose code is not in the plan"
    if _CUT.search(everything):
        return "Spark shortened its plan"
    for operator in operators:
        if _SUBQUERY.search(operator):
            return "it has a subquery, whose files Spark does not list"
        if unknown := [name for name in _CALL.findall(operator) if name.lower() not in REPEATABLE_FUNCTIONS]:
            return f"it calls {unknown[0]!r}, which is not known to give the same result again"
        if _SPECIAL_DATE.search(operator) and re.search(r"date|time", operator, re.IGNORECASE):
            return "it may depend on today's date"
    # Other tables have files that no scan lists (deletion vectors), or their own lists of files.
    if others := set(_LOCATION.findall(physical)) - {"InMemoryFileIndex"}:
        return f"it reads a table of its own kind ({sorted(others)[0]})"
    return None


def _section(text: str, title: str) -> str:
    match = re.search(rf"^== {title} ==\n(.*?)(?=^== \w|\Z)", text, re.MULTILINE | re.DOTALL)
    return match[1].strip("\n") if match else ""


def _without_view(lines: Sequence[str]) -> list[str]:
    """Removes the Project, SubqueryAlias and View that the statement of `explain` adds."""
    for number, line in enumerate(lines[:3]):
        if "View (" in line and _VIEW_OF_OURS.search(line):
            below = lines[number + 1 :]
            indent = min((len(re.match(r"[ :+-]*", rest)[0]) for rest in below), default=0)  # type: ignore[index]
            return [rest[indent:] for rest in below]
    return []


def _renumber(lines: Sequence[str]) -> list[str]:
    """Numbers expression ids, CTEs and lambda variables by first appearance; drops text without effect."""
    numbers: dict[tuple[bool, str], int] = {}

    def number(match: re.Match[str]) -> str:
        # A CTE and its references share one number, which a column may have too.
        key = (match[1] == "#", match[2])
        return f"{match[1]}{numbers.setdefault(key, len(numbers))}"

    return [re.sub(r"(#|CTERelation(?:Def|Ref) )(\d+)", number, _plain(line)) for line in lines]


def _plain(line: str) -> str:
    # Names of lambda variables contain a counter of the process; the splits of a Range change no row.
    line = re.sub(r"\blambda (\w+?)_\d+#", r"lambda \1#", line)
    return re.sub(r"(\bRange \(.*), splits=\w+(?:\(\d+\))?\)", r"\1)", line)


def _size_range(cost: str) -> tuple[float, float]:
    """Returns the bytes of all relations. Two relations of equal size are taken for one table read twice."""
    least = most = 0.0
    for number, unit in set(_STATISTICS.findall(cost)):
        rounding = 0.05 * _UNITS[unit] if unit else 0.0
        least += float(number) * _UNITS[unit] - rounding
        most += float(number) * _UNITS[unit] + rounding
    return least, most


@contextlib.contextmanager
def _settings(spark: SparkSession) -> Iterator[None]:
    before = {name: spark.conf.get(name, None) for name in _UNCUT}
    try:
        for name, value in _UNCUT.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)
