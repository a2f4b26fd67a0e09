"""Reads a DataFrame's plan from Spark, to find out which rows it yields and whether they may be reused.

`df.semanticHash()` takes types into account, which the plan's text does not show. But it has only 32 bits and
collides easily: `id > 3` and `id > -4` have the same hash. Therefore the plan's text, its folders and its
reader options belong to the fingerprint too.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# EXPLAIN shortens long lists of fields and file schemas; a shortened text does not identify a plan.
_UNCUT = {"spark.sql.debug.maxToStringFields": "1000000", "spark.sql.maxMetadataStringLength": "10000000"}
_CUT = re.compile(r"\.\.\. \d+ more fields|more characters|\.\.\.,? |\.\.\.\)?$", re.MULTILINE)

_NAMES = """
    Aggregate CTERelationDef CTERelationRef Deduplicate Distinct Except Expand Filter Generate GlobalLimit
    Intersect Join LocalLimit LocalRelation Offset OneRowRelation Project Range RebalancePartitions Relation
    Repartition RepartitionByExpression ResolvedHint Sort SubqueryAlias Union View Window WithCTE
"""
_OPERATORS = frozenset(_NAMES.split())

# Functions whose result depends only on their arguments, by the names that plans print. Any other function is
# not trusted: it may depend on the clock, on randomness, on partitions or on the user, or a user may have
# written it.
_FUNCTION_NAMES = """
    abs acos acosh add_months aes_decrypt aggregate any any_value approx_count_distinct approx_percentile
    array array_agg array_append array_compact array_contains array_distinct array_except array_insert
    array_intersect array_join array_max array_min array_position array_prepend array_remove array_repeat
    array_size array_sort array_union arrays_overlap arrays_zip arraytransform ascii asin asinh atan atan2
    atanh atleastnnonnulls avg base64 between bigint bin binary bit_and bit_count bit_get bit_length bit_or
    bit_xor bitmap_bit_position bitmap_bucket_number bitmap_construct_agg bitmap_count bitmap_or_agg bool_and
    bool_or boolean bround btrim cardinality cast cbrt ceil ceiling char char_length character_length chr
    coalesce collect_list collect_set concat concat_ws contains conv convert_timezone corr cos cosh cot count
    count_if count_min_sketch covar_pop covar_samp crc32 csc cume_dist currentrow$ date date_add date_diff
    date_format date_from_unix_date date_part date_sub date_trunc dateadd datediff datepart day dayname
    dayofmonth dayofweek dayofyear decimal decode degrees dense_rank double e element_at elt encode endswith
    equal_null every exists exp explode explode_outer expm1 extract factorial filter find_in_set first
    first_value flatten float floor forall format_number format_string from_csv from_json from_unixtime
    from_utc_timestamp from_xml get get_json_object getarrayitem getbit getjsonobject getmapvalue gettimestamp
    greatest grouping grouping_id hash hex histogram_numeric hll_sketch_agg hll_sketch_estimate hll_union
    hll_union_agg hour hypot if ifnull ilike initcap inline inline_outer instr int is_valid_utf8
    is_variant_null isnan isnotnull isnull json_array_length json_object_keys json_tuple kurtosis lag
    lambdafunction last last_day last_value lcase lead least left len length levenshtein like listagg ln
    locate log log10 log1p log2 lower lpad ltrim luhn_check make_date make_dt_interval make_interval
    make_timestamp make_timestamp_ltz make_timestamp_ntz make_valid_utf8 make_ym_interval map map_concat
    map_contains_key map_entries map_filter map_from_arrays map_from_entries map_keys map_values map_zip_with
    mask max max_by md5 mean median min min_by minute mod mode month monthname months_between named_struct
    nanvl negative next_day none nth_value ntile nullif nullifzero nvl nvl2 octet_length overlay parse_json
    parse_url percent_rank percentile percentile_approx percentile_cont percentile_disc pi pivotfirst pmod
    posexplode posexplode_outer position positive pow power printf quarter radians raise_error rank reduce
    regexp regexp_count regexp_extract regexp_extract_all regexp_instr regexp_like regexp_replace
    regexp_substr regr_avgx regr_avgy regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy
    regr_syy repeat replace
    reverse right rint rlike round row_number rpad rtrim schema_of_csv schema_of_json schema_of_variant
    schema_of_variant_agg schema_of_xml sec second sentences sequence sha sha1 sha2 shiftleft shiftright
    shiftrightunsigned sign signum sin sinh size skewness slice smallint some sort_array soundex space
    specifiedwindowframe split split_part sqrt stack startswith std stddev stddev_pop stddev_samp str_to_map
    string string_agg struct substr substring substring_index sum tan tanh timestamp timestamp_micros
    timestamp_millis timestamp_seconds timestampadd timestampdiff tinyint to_binary to_char to_csv to_date
    to_json to_number to_timestamp to_timestamp_ltz to_timestamp_ntz to_unix_timestamp to_utc_timestamp
    to_varchar to_variant_object to_xml transform transform_keys transform_values translate trim trunc try_add
    try_aes_decrypt try_avg try_cast try_divide try_element_at try_make_interval try_make_timestamp
    try_make_timestamp_ltz try_make_timestamp_ntz try_mod try_multiply try_parse_json try_parse_url
    try_subtract try_sum try_to_binary try_to_number try_to_timestamp try_url_decode try_validate_utf8
    try_variant_get typeof ucase unbase64 unboundedfollowing$ unboundedpreceding$ unhex unix_date unix_micros
    unix_millis unix_seconds unix_timestamp upper url_decode url_encode validate_utf8 var_pop var_samp varchar
    variance variant_explode variant_explode_outer variant_get weekday weekofyear width_bucket
    windowspecdefinition xpath xpath_boolean xpath_double xpath_float xpath_int xpath_long xpath_number
    xpath_short xpath_string xxhash64 year zeroifnull zip_with
"""
_REPEATABLE_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())

_TITLE = "(?:Parsed Logical|Analyzed Logical|Optimized Logical|Physical) Plan"
_FORMATS = frozenset({"parquet", "orc", "csv", "json"})
# The rows of these formats depend on reader options: delimiters, the text of a null, date patterns.
_TEXT_FORMATS = frozenset({"csv", "json"})

_RELATION = re.compile(r"Relation (?:[\w.`-]+)?\[.*\] (\w+)$")
# A call has no space before its parenthesis; a nested column, `NOT (...)` and `IN (...)` have one.
_CALL = re.compile(r"([\w$>]+)\(")
_SUBQUERY = re.compile(r"(?:subquery|exists|list)#\d+ \[")
_PYTHON = re.compile(
    r"^[\s:*|+()\d-]*\w*(?:Python|Pandas|InArrow|ScriptTransformation|UDTF)\w*", re.MULTILINE
)
_SPECIAL_DATE = re.compile(r"\b(?:now|today|tomorrow|yesterday)\b(?!#)", re.IGNORECASE)
# Rows arrive in another order each time, which changes sums of doubles and the rows of a limit.
_SHUFFLE = re.compile(r"(?<!Broadcast)Exchange\b|ShuffleQueryStage|Limit\b|TakeOrdered")
_LOCATION = re.compile(r"Location: (\w+)")
_FOLDERS = re.compile(r"Location: (.*?), PartitionFilters: ")
_STATISTICS = re.compile(r"Relation .*Statistics\(sizeInBytes=([\d.]+) ([KMGTPE]i)?B\b")
_VIEW_OF_OURS = re.compile(r"_pyspark_(?:connect_temp_view_)?[0-9a-f]{32}")
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}

# `explain` changes settings of the session, which parallel fits share.
_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class PlanFingerprint:
    """Fingerprint of a plan.

    Attributes:
        text: Analysed plan. Expression ids are replaced by numbers, in the order of their first appearance.
        sources: Formats of all file-based tables, then their folders; both in the order of the plan.
        options: Options of each table's reader, if the driver can query the JVM.
        size_range: Smallest and largest possible number of bytes of the source files; Spark prints the size
            rounded.
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
        names = [line.lstrip(" :+-").partition(" ")[0] for line in self.text.splitlines()]
        return " < ".join(names[:8]) + (" < ..." if len(names) > 8 else "")


def fingerprint(df: DataFrame) -> PlanFingerprint:
    found = judge(*explain(df, "EXTENDED", "COST"))
    if found.refusal is not None:
        return found
    if hasattr(df, "_jdf"):
        try:
            found = replace(found, options=_options(df))
        except Exception as error:  # another data source, or a JVM that forbids access
            return replace(
                found, refusal=f"Spark does not report its readers' options ({type(error).__name__})"
            )
    elif text_format := next((name for name in found.sources if name in _TEXT_FORMATS), None):
        return replace(
            found, refusal=f"it reads {text_format}, and Spark Connect does not report its options"
        )
    return replace(found, semantic_hash=df.semanticHash())


def _options(df: DataFrame) -> tuple[str, ...]:
    leaves = df._jdf.queryExecution().analyzed().collectLeaves()
    found = [leaves.apply(number) for number in range(leaves.size())]
    return tuple(
        leaf.relation().options().mkString("\0") for leaf in found if leaf.nodeName() == "LogicalRelation"
    )


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


def is_repeatable(df: DataFrame) -> bool:
    """Whether two jobs get the same rows from `df`, if nobody changes its files in between.

    False for CSV and JSON: Spark parses only the columns of a job, so broken rows can differ.
    """
    (extended,) = explain(df, "EXTENDED")
    analysed, physical = (section(extended, name) for name in ("Analyzed Logical Plan", "Physical Plan"))
    operators = [line.lstrip(" :+-") for line in _without_view(analysed.splitlines()[1:])]
    formats = {found[1] for operator in operators if (found := _RELATION.match(operator))}
    if not operators or not physical or formats & _TEXT_FORMATS or _SHUFFLE.search(physical):
        return False
    return _find_change(operators, extended) is None


def judge(extended: str, cost: str) -> PlanFingerprint:
    """Creates a fingerprint from EXPLAIN EXTENDED and EXPLAIN COST."""
    analysed, optimised, physical = (
        section(extended, title)
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
        # Spark uses only metadata, and then `df.inputFiles()` omits the files too.
        refusal = "Spark computes a part of it without reading its files"
    if refusal is not None:
        return PlanFingerprint(text=text, refusal=refusal)
    sources = (*formats, *_FOLDERS.findall(physical))
    return PlanFingerprint(text=text, sources=sources, size_range=size_range(cost))


def _refusal(operators: Sequence[str], everything: str, physical: str) -> str | None:
    if any(operator.startswith("LocalRelation") for operator in operators):
        return "it has data in memory, which is not in the plan"
    if is_cached(everything):
        return "it is cached in Spark, which may hold older rows than its files"
    if (change := _find_change(operators, everything)) is not None:
        return change
    if _CUT.search(everything):
        return "Spark shortened its plan"
    # Other tables have files that no scan lists (deletion vectors), or their own lists of files.
    if others := set(_LOCATION.findall(physical)) - {"InMemoryFileIndex"}:
        return f"it reads a table with its own list of files ({sorted(others)[0]})"
    return None


def _find_change(operators: Sequence[str], everything: str) -> str | None:
    """Returns why two jobs may get different rows although no file changes; None if they cannot."""
    for operator in operators:
        name = re.split(r"\W", operator, maxsplit=1)[0]
        if name == "Relation":
            relation = _RELATION.match(operator)
            if relation is None or relation[1] not in _FORMATS:
                source = operator.rpartition("] ")[2] or "a table"
                return f"it reads {source}, and Spark reports neither version nor reader of this source"
        elif name == "Sample":
            return "it takes a sample, and another run gives other rows"
        elif name not in _OPERATORS:
            return f"its plan has {name or 'an operator'!r}, which may give other rows next time"
    if _PYTHON.search(everything):
        return "it calls a Python function, whose code is not in the plan"
    if _CUT.search("\n".join(operators)):
        return "Spark shortened its plan"
    for operator in operators:
        if _SUBQUERY.search(operator):
            return "it has a subquery, whose files Spark does not list"
        if unknown := find_unrepeatable_call(operator):
            return f"it calls {unknown!r}, which may give another result next time"
        if _SPECIAL_DATE.search(operator) and re.search(r"date|time", operator, re.IGNORECASE):
            return "it may depend on today's date"
    return None


def is_cached(plan: str) -> bool:
    return "InMemoryRelation" in plan or "InMemoryTableScan" in plan


def find_unrepeatable_call(plan: str) -> str | None:
    """Returns the first function of a logical plan whose result may depend on more than its arguments."""
    return next((name for name in _CALL.findall(plan) if name.lower() not in _REPEATABLE_FUNCTIONS), None)


def section(text: str, title: str) -> str:
    # A string in the plan may look like a title; then the result is empty.
    found = re.findall(rf"^== {title} ==\n(.*?)(?=^== {_TITLE} ==$|\Z)", text, re.MULTILINE | re.DOTALL)
    return str(found[0]).strip("\n") if len(found) == 1 else ""


def _without_view(lines: Sequence[str]) -> list[str]:
    for number, line in enumerate(lines[:3]):
        if "View (" in line and _VIEW_OF_OURS.search(line):
            below = lines[number + 1 :]
            if below and below[0].lstrip(" :+-") == "Filter true":
                below = below[1:]  # the filter of `explain`
            indent = min((len(re.match(r"[ :+-]*", rest)[0]) for rest in below), default=0)  # type: ignore[index]
            return [rest[indent:] for rest in below]
    return []


def _renumber(lines: Sequence[str]) -> list[str]:
    """Replaces ids of expressions, CTEs and lambdas by numbers in order of appearance; drops other noise."""
    numbers: dict[tuple[bool, str], int] = {}

    def number(match: re.Match[str]) -> str:
        # A CTE and its references share one number; a column may have the same number.
        key = (match[1] == "#", match[2])
        return f"{match[1]}{numbers.setdefault(key, len(numbers))}"

    numbered = []
    for line in lines:
        # Names of lambda variables contain a process counter; the splits of a Range change no row.
        line = re.sub(r"\blambda (\w+?)_\d+#", r"lambda \1#", line)
        line = re.sub(r"(\bRange \(.*), splits=\w+(?:\(\d+\))?\)", r"\1)", line)
        numbered.append(re.sub(r"(#|CTERelation(?:Def|Ref) )(\d+)", number, line))
    return numbered


def size_range(cost: str) -> tuple[float, float]:
    """Returns the smallest and largest possible bytes of all relations.

    Two relations of equal size count as one table that is read twice.
    """
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
