"""A resumed run writes its rows again, compares them, and trains on the rows of the first start."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringspark.estimators import run_layout
from ringspark.estimators.run.folder import RunFolder, RunRefusedError
from ringspark.estimators.run.identity import FORMAT_VERSION
from ringspark.estimators.run.shards import run_shards
from ringspark.estimators.stages.fit_data import FitData
from ringspark.pipelines import Padded, Vocabulary

pytestmark = pytest.mark.spark

ARRAYS, WORDS = "array_repeat(id, cast(1 + id % 2 as int))", "if(id % 2 = 0, 'a', 'b')"


def _rows(spark: Any, sql: str = "id * 0.5D") -> Any:
    return spark.range(10).selectExpr(f"{sql} as x")


@pytest.fixture
def data(tmp_path):
    split = {"validation_col": None, "validation_fraction": None, "drops_invalid": False}
    return FitData(columns=("x",), seed=0, root=str(tmp_path), **split)


@pytest.fixture
def run(tmp_path):
    return RunFolder(str(tmp_path / "run"), is_given=True)


@pytest.fixture
def begun(spark, data, run):
    """Starts a run of ten rows; returns its shard files and their modification times."""
    run_shards(_rows(spark), data, run)
    _begin(run)
    return files_of(run)


def _begin(run: RunFolder) -> None:
    identity = {"format_version": FORMAT_VERSION, "identity": {}}
    Path(run.uri, run_layout.IDENTITY).write_text(json.dumps(identity))


def files_of(run: RunFolder) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path(run.uri).rglob("*") if path.is_file()}


def test_a_resume_writes_once_more_and_trains_on_the_first(spark, data, run, begun, monkeypatch, caplog):
    written, write = [], FitData.write
    monkeypatch.setattr(FitData, "write", lambda *given: written.append(1) or write(*given))
    manifest = run_shards(_rows(spark), data, run)
    assert len(written) == 1
    assert not caplog.records, "equal digests prove equal rows"
    assert manifest.uri == f"{run.uri}/{run_layout.SHARDS}"
    assert files_of(run) == begun, "the second write is removed, the first untouched"


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("id * 0.25D", "maximum of column 'x': 4.5 -> 2.25"),
        ("cast(id as float)", "columns: "),
        ("if(id < 9, id * 0.5D, 4.6D)", "maximum of column 'x': 4.5 -> 4.6"),
    ],
)
def test_a_resume_with_other_rows_is_refused(spark, data, run, begun, sql, told):
    with pytest.raises(ValueError, match=told):
        run_shards(_rows(spark, sql), data, run)
    assert files_of(run) == begun


@pytest.mark.parametrize(
    ("sql", "begun_with", "resumed_with", "told"),
    [
        (ARRAYS, Padded(value=0), Padded(value=-1), "value of column 'x': 0 -> -1"),
        (WORDS, Vocabulary(words=("a", "b")), Vocabulary(words=("b", "a")), "words of column 'x': "),
    ],
)
def test_columns_made_in_another_way_are_refused(spark, data, run, sql, begun_with, resumed_with, told):
    """The stored rows or statistics are the same, but mean something else."""
    rows = _rows(spark, sql)
    start, changed = (
        replace(data, kinds=json.dumps({"x": kind.to_json()})) for kind in (begun_with, resumed_with)
    )
    run_shards(rows, start, run)
    _begin(run)
    run_shards(rows, start, run)
    with pytest.raises(RunRefusedError, match=told):
        run_shards(rows, changed, run)


def test_rows_that_only_statistics_prove_equal_are_told(spark, data, run, begun, caplog):
    manifest = run_shards(_rows(spark, "(9 - id) * 0.5D"), data, run)
    assert manifest.uri == f"{run.uri}/{run_layout.SHARDS}"
    assert files_of(run) == begun
    (told,) = [record.getMessage() for record in caplog.records]
    assert "but its files differ" in told
    assert "continues with the rows that the run wrote first" in told
