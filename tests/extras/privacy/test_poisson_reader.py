"""Samples of the Poisson reader: rates, independence, and the rows of each rank."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from private_shards import private_config

from ringspark.extras.privacy.poisson_reader import PoissonReader, plan_poisson
from ringspark.pipelines import open_reader

ROWS, BATCH = 101, 9


@pytest.fixture
def readers(make_shards: Any, tmp_path: Path) -> Callable[..., list[PoissonReader]]:
    def make(ranks: int, rows: int = ROWS, **changes: Any) -> list[PoissonReader]:
        name = "-".join(["x", *changes.values()])
        manifest = make_shards({"x": np.arange(rows)}, row_group_rows=16, name=name)
        config = private_config(manifest, tmp_path, batch_size=BATCH, **changes)
        given = {"num_shards": ranks, "batch_size": BATCH, "shuffle": False, "engine": "arrow"}
        plain = (open_reader(manifest, ["x"], rank, **given) for rank in range(ranks))
        return [PoissonReader(reader, config) for reader in plain]

    return make


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_row_is_in_each_step_with_the_same_probability(readers: Any, ranks: int) -> None:
    taken = []
    for reader in readers(ranks):
        assert reader.num_steps == 12
        steps = [batch["x"] for epoch in range(300) for batch in reader.batches(epoch)]
        taken.append(np.stack([np.bincount(step, minlength=ROWS) for step in steps]))
    counts = np.sum(taken, axis=0)  # (steps, rows)
    assert counts.max() == 1  # no row twice in a step, and on one rank only
    rate, number = BATCH / ROWS, len(counts)
    deviation = (rate * (1 - rate) / number) ** 0.5
    assert np.abs(counts.mean(0) - rate).max() < 5 * deviation
    # The sizes vary as with independent choices, and no two rows are chosen together more often.
    assert counts.sum(1).var() == pytest.approx(ROWS * rate * (1 - rate), rel=0.12)
    correlation = np.corrcoef(counts.T)
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 6 / number**0.5
    # No sample is drawn again. Of so many short ones, 0.11 pairs are equal by chance.
    assert len({tuple(each) for each in counts}) >= number - 5


def test_a_share_of_all_rows_takes_every_row(readers: Any) -> None:
    for batch in readers(1, rows=BATCH)[0].batches(0):
        np.testing.assert_array_equal(batch["x"], np.arange(BATCH))


def test_a_resume_takes_the_remaining_steps(readers: Any) -> None:
    assert len(list(readers(1)[0].batches(1, start_step=7))) == 5


@pytest.mark.parametrize("cache", ["disk", "memory", "auto"])
def test_rows_can_wait_on_the_disk(readers: Any, cache: str) -> None:
    (reader,) = readers(1, cache=cache)
    assert isinstance(reader._columns["x"], np.memmap) is (cache == "disk")
    np.testing.assert_array_equal(np.sort(reader._columns["x"]), np.arange(ROWS))
    rows = np.concatenate([batch["x"] for epoch in range(40) for batch in reader.batches(epoch)])
    assert set(rows.tolist()) == set(range(ROWS))


def test_rows_that_do_not_fit_are_refused(readers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=800))
    with pytest.raises(ValueError, match="101 rows take 808 B of 800 B free memory; set cache='disk'"):
        readers(1, cache="memory")
    assert isinstance(readers(1, cache="auto")[0]._columns["x"], np.memmap)


def test_the_plan_tells_only_the_expected_number_of_rows() -> None:
    plan = plan_poisson(ROWS, BATCH)
    assert [plan.global_rows(step) for step in range(3)] == [BATCH] * 3
    assert plan.sample_rate * ROWS == BATCH
    with pytest.raises(ValueError, match=r"batchSize \(102\) must not exceed the 101 training rows"):
        plan_poisson(ROWS, ROWS + 1)
