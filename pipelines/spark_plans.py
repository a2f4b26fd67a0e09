"""Reads facts from Spark's plans on the driver, without a job, with Spark Classic and Spark Connect."""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The plan of a range without a given number of partitions shows the default parallelism.
_SPLITS = re.compile(r"\bsplits=(\d+)")
_SIZE = re.compile(r"sizeInBytes=([\d.E+]+) ([KMGTPE]?i?B)")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

# EXPLAIN shortens long lists of fields and file schemas.
_UNCUT = {"spark.sql.debug.maxToStringFields": "1000000", "spark.sql.maxMetadataStringLength": "10000000"}
_TITLE = "(?:Parsed Logical|Analyzed Logical|Optimized Logical|Physical) Plan"
# Operators that give the same rows in every job. "Repartition n, false" is `coalesce`. Broken rows of CSV and
# JSON can differ, because Spark parses only the columns of a job.
_REPEATABLE = re.compile(
    r"(?:Filter|Generate|Join|LocalRelation|Project|Range|Repartition \d+, false|ResolvedHint|SubqueryAlias"
    r"|Union|View)\b|Relation (?:[\w.`-]+)?\[.*\] (?:parquet|orc)$"
)
# Rows that arrive in another order change sums of doubles and the rows of a limit. Python functions may give
# other results, and so do dates such as 'today'.
_CHANGING = re.compile(
    r"(?<!Broadcast)Exchange\b|ShuffleQueryStage|Limit\b|TakeOrdered|\.\.\. \d+ more fields"
    r"|^[\s:*|+()\d-]*\w*(?:Python|Pandas|InArrow|UDTF)|\b(?i:now|today|tomorrow|yesterday)\b(?!#)",
    re.MULTILINE,
)
# A call has no space before its parenthesis; a nested column, `NOT (...)` and `IN (...)` have one.
_CALL = re.compile(r"([\w$>]+)\(")
# Common functions whose result depends only on their arguments. Any other function may depend on the clock,
# on randomness or on partitions, or a user may have written it.
_NAMES = """
    abs add_months array array_contains atleastnnonnulls between bigint cast ceil coalesce concat concat_ws
    contains cos date_add date_sub date_trunc datediff day dayofmonth dayofweek dayofyear decimal element_at
    endswith exp explode float floor greatest hash hour if initcap instr int isnan isnotnull isnull last_day
    least length ln log log10 log1p log2 lower lpad ltrim md5 minute month months_between named_struct nanvl
    nullif nvl pmod pow power quarter regexp_extract regexp_replace replace reverse rlike round rpad rtrim
    second sha2 signum sin size slice some split sqrt startswith string struct substring tan tanh to_date
    to_timestamp translate trim trunc upper weekday weekofyear xxhash64 year
"""
_PURE = frozenset(_NAMES.split())

# `explain` changes settings of the session, which parallel fits share.
_lock = threading.Lock()


def estimate_bytes(df: DataFrame) -> float:
    """Returns Spark's estimate of the bytes of a DataFrame; infinity if Spark reports none.

    For a filter or a join the estimate is usually too large.
    """
    frame: Any = df
    try:
        if hasattr(frame, "_jdf"):
            return float(frame._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())
        return parse_size(frame._explain_string(mode="cost"))
    except Exception:  # the JVM forbids access, or the plan has an error, which its first job reports
        return math.inf


def parse_size(cost: str) -> float:
    """Returns the first size in a text of EXPLAIN COST, in bytes; infinity if there is none."""
    found = _SIZE.search(cost)
    return float(found[1]) * 1024 ** _UNITS.index(found[2]) if found else math.inf


def default_parallelism(spark: SparkSession) -> int | None:
    """Returns the cores of all executors, unless the conf sets another number of partitions for `range`."""
    session: Any = spark
    if hasattr(session, "_jsparkSession"):
        return int(session.sparkContext.defaultParallelism)
    splits = _SPLITS.search(session.range(1)._explain_string())
    return int(splits[1]) if splits else None


def explain(df: DataFrame, *modes: str) -> list[str]:
    """Returns the output of EXPLAIN in each mode, such as "EXTENDED", without shortened lists.

    `df.explain` only prints the plan, and may print one from before a call of `cache()`.
    """
    spark = df.sparkSession
    # Spark makes a view for the statement. When it drops the view, it removes the view's plan from the cache,
    # so the plan must differ from the user's.
    other = df.where("true")
    with _lock, _settings(spark):
        return [
            str(spark.sql(f"EXPLAIN {mode} SELECT * FROM {{df}}", df=other).collect()[0][0]) for mode in modes
        ]


def section(text: str, title: str) -> str:
    # A string in the plan may look like a title; then the result is empty.
    found = re.findall(rf"^== {title} ==\n(.*?)(?=^== {_TITLE} ==$|\Z)", text, re.MULTILINE | re.DOTALL)
    return str(found[0]).strip("\n") if len(found) == 1 else ""


def is_cached(plan: str) -> bool:
    return "InMemoryRelation" in plan or "InMemoryTableScan" in plan


def find_changing_call(plan: str) -> str | None:
    """Returns the first function of a logical plan whose result may depend on more than its arguments."""
    return next((name for name in _CALL.findall(plan) if name.lower() not in _PURE), None)


def is_repeatable(df: DataFrame) -> bool:
    """Whether two jobs get the same rows from `df` if its files stay; False if that is uncertain."""
    (extended,) = explain(df, "EXTENDED")
    analysed, physical = (section(extended, f"{name} Plan") for name in ("Analyzed Logical", "Physical"))
    operators = [line.lstrip(" :+-") for line in analysed.splitlines()[1:]]
    return (
        bool(operators and physical)
        and all(map(_REPEATABLE.match, operators))
        and find_changing_call("\n".join(operators)) is None
        and not _CHANGING.search(extended)
    )


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
