"""Each row of the table of bad inputs: one sentence with subject and remedy, and nothing left behind."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.spark


def _table() -> Any:
    """The module beside this one: tests are in no package."""
    spec = spec_from_file_location("bad_inputs_table", Path(__file__).with_name("bad_inputs.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TABLE = _table()


@pytest.fixture(scope="module")
def place(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The rows' table, shards, run and model."""
    yield TABLE.Place(spark, tmp_path_factory.mktemp("place"))
    sys.modules.pop("bad_inputs_table")


@pytest.mark.parametrize("row", TABLE.BAD_INPUTS, ids=lambda row: row.name.replace(" ", "-"))
def test_a_bad_input_is_refused_in_one_sentence(
    place: Any, row: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    place.enter(tmp_path / "row")
    threads = set(threading.enumerate())
    with pytest.raises(row.error) as caught:
        row.do(place)
    assert not row.problem(caught.value), str(caught.value)
    assert place.holds() == place.before
    assert not list(temporary.iterdir())
    assert [thread for thread in threading.enumerate() if thread not in threads] == []
    assert not place.spark.sparkContext.statusTracker().getActiveJobsIds()


def test_the_table_has_each_name_once() -> None:
    names = [row.name for row in TABLE.BAD_INPUTS]
    assert len(names) == len(set(names)) > 60
