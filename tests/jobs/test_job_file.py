"""Job files in this process: values, line numbers of mistakes, sources of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspark.jobs.job_file import JobFile, read_section, yaml_or_json
from ringspark.jobs.row_source import RowSource

TEXT = "inner:\n  count: 010\n  names: {a: 1}\n"


@dataclass(frozen=True, kw_only=True)
class Inner:
    count: int
    names: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Job:
    inner: Inner


def test_numbers_are_those_of_yaml_1_2_and_booleans_are_none() -> None:
    assert read_section(JobFile.parse("job.yaml", TEXT), Job).inner.count == 10
    with pytest.raises(ValueError, match=r"job.yaml, line 2: inner.count must be a whole number, got True"):
        read_section(JobFile.parse("job.yaml", TEXT.replace("010", "true")), Job)


def test_dates_and_words_of_yaml_1_1_stay_strings() -> None:
    text = "a: 2024-01-02\nb: no\nc: 1e-3\nd: [12:30, on]\n"
    expected = {"a": "2024-01-02", "b": "no", "c": 1e-3, "d": ["12:30", "on"]}
    assert JobFile.parse("job.yaml", text).tree == expected
    assert JobFile.parse("job.yaml", yaml_or_json(expected)).tree == expected


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("p: &t true\nq: *t\n", {"p": True, "q": True}),
        ("007: x\n2024_01: y\nnull: z\n1e3: v\n", {"007": "x", "2024_01": "y", "null": "z", "1e3": "v"}),
        (
            "a: 1_000\nb: 0x1F\nc: TRUE\nd: !!str 5\ne: =\n",
            {"a": "1_000", "b": "0x1F", "c": "TRUE", "d": "5", "e": "="},
        ),
        ("a: &b [1, {c: 2}]\nd: *b\n", {"a": [1, {"c": 2}], "d": [1, {"c": 2}]}),
    ],
)
def test_keys_and_values_are_as_they_are_written(text: str, tree: Any) -> None:
    assert JobFile.parse("job.yaml", text).tree == tree


_TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(["?a", ":b", "- c", "007", "1e3", "no", "~", "a: b", "&x"])
)
_SCALARS = st.one_of(_TEXTS, st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False))
_DATA = st.recursive(_SCALARS, lambda d: st.lists(d, max_size=3) | st.dictionaries(_TEXTS, d, max_size=3))


@given(st.dictionaries(_TEXTS, _DATA, max_size=3))
def test_a_printed_job_reads_back_as_the_same(tree: dict[str, Any]) -> None:
    assert JobFile.parse("job.yaml", yaml_or_json(tree)).tree == tree


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("%YAML 1.1\n---\na: yes\n", "line 1: a job file has no YAML directives"),
        ("1: a\n'1': b\n", "line 2: '1' is a duplicate key; remove one"),
        ("a: !!set {b}\n", "line 1: .*must not have the YAML tag 'tag:yaml.org,2002:set'"),
        ("a: 1\na: 2\n", "line 2: 'a' is a duplicate key; remove one"),
        ("a: 1\nb: !run x\n", "line 2: .*must not have the YAML tag '!run'; remove it"),
        ("a: &b [*b]\n", "an alias refers to itself"),
    ],
)
def test_what_no_job_needs_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JobFile.parse("job.yaml", text)


def test_a_mistake_below_a_changed_key_is_told_of_the_option() -> None:
    file = JobFile.parse("job.yaml", TEXT).set_value("inner.names={}")
    assert str(file.error(("inner", "names", "a"), "wrong")) == "--set inner.names: wrong"
    assert str(file.error(("inner", "count"), "wrong")) == "job.yaml, line 2: wrong"


def test_a_duplicate_key_in_json_is_refused() -> None:
    with pytest.raises(ValueError, match=r"job\.json, line 1: 'a' is a duplicate key; remove one"):
        JobFile.parse("job.json", '{"a": 1, "a": 2}')


@pytest.mark.parametrize(
    ("source", "trains", "problem"),
    [
        ({}, True, "needs just one of the keys"),
        ({"parquet": "/a", "csv": "/b"}, True, "got parquet and csv"),
        ({"shards": "/a"}, False, "cannot be shards, since Spark reads the rows"),
        ({"parquet": "/a", "inPlace": True}, False, "cannot be read inPlace, since Spark reads the rows"),
        ({"csv": "/a", "inPlace": True}, True, "only from parquet, delta or table, got csv"),
        ({"shards": "/a", "where": "x > 1"}, True, "cannot have 'where', because shards are read without"),
        ({"parquet": "/a", "version": 0}, True, "can have a version only with delta"),
        ({"delta": "/a", "version": 0}, False, ""),
        ({"table": "lake.db.a", "version": 0, "inPlace": True}, True, ""),
        ({"parquet": "/a", "inPlace": True}, True, ""),
    ],
)
def test_a_source_of_rows_says_what_refuses_it(source: dict[str, Any], trains: bool, problem: str) -> None:
    found = RowSource(**source).find_problem(trains=trains)
    assert problem in found
    assert bool(problem) == bool(found)
