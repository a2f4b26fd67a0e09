"""Every row of the bad-input table raises one clear error and leaves nothing behind."""

import tempfile
import threading

import pytest
import torch._dynamo  # noqa: F401 (its import makes a temporary folder, which no row is to blame for)

# Many rows of the table are of techniques.
pytest.importorskip("ringspark.extras")

from bad_input_table import BAD_INPUTS, OF_EXTRAS, Place
from waiting import wait_for

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def place(spark, tmp_path_factory):
    """The table, shards, run and model that the rows use."""
    return Place(spark, tmp_path_factory.mktemp("place"))


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.extras] if row.name in OF_EXTRAS else []) for row in BAD_INPUTS],
    ids=lambda row: row.name.replace(" ", "-"),
)
def test_a_bad_input_is_refused_in_one_sentence(place, row, tmp_path, monkeypatch):
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
    # Spark counts an ended job as active until its listeners receive the event.
    tracker = place.spark.sparkContext.statusTracker()
    assert wait_for("the end of Spark's jobs", lambda: not tracker.getActiveJobsIds(), seconds=10)


def test_the_table_has_each_name_once():
    names = [row.name for row in BAD_INPUTS]
    assert len(names) == len(set(names)) > 60
