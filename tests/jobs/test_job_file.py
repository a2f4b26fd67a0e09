"""Job files in this process: values, line numbers of mistakes, sources of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from ringspark.jobs.job_file import JobFile, read_section
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
        (
            {"shards": "/a", "where": "x > 1"},
            True,
            "cannot have 'where', because shards are read without",
        ),
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
