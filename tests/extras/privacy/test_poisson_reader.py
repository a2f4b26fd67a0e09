"""Samples of the Poisson reader: rates, independence, and the rows of each rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from private_shards import private_config

from ringspark.extras.privacy.poisson_reader import PoissonReader, plan_poisson
from ringspark.pipelines import ShardManifest, open_reader

MakeShards = Callable[..., ShardManifest]
ROWS, BATCH = 101, 9


def readers(manifest: ShardManifest, run: Path, ranks: int, **changes: Any) -> list[PoissonReader]:
    config = private_config(manifest, run, batch_size=BATCH, **changes)
    return [
        PoissonReader(open_reader(manifest, ["x"], rank, ranks, BATCH, shuffle=False, engine="arrow"), config)
        for rank in range(ranks)
    ]


@pytest.fixture
def manifest(make_shards: MakeShards) -> ShardManifest:
    return make_shards({"x": np.arange(ROWS)}, row_group_rows=16)


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_row_is_in_each_step_with_the_same_probability(
    manifest: ShardManifest, tmp_path: Path, ranks: int
) -> None:
    taken = []
    for reader in readers(manifest, tmp_path, ranks):
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


def test_some_ranks_have_no_row_in_a_step(manifest: ShardManifest, tmp_path: Path) -> None:
    reader = readers(manifest, tmp_path, BATCH)[0]
    sizes = [len(batch["x"]) for epoch in range(20) for batch in reader.batches(epoch)]
    assert min(sizes) == 0 < max(sizes)


def test_a_share_of_all_rows_takes_every_row(make_shards: MakeShards, tmp_path: Path) -> None:
    manifest = make_shards({"x": np.arange(BATCH)})
    for batch in readers(manifest, tmp_path, 1)[0].batches(0):
        np.testing.assert_array_equal(batch["x"], np.arange(BATCH))


def test_a_resume_takes_the_remaining_steps(manifest: ShardManifest, tmp_path: Path) -> None:
    assert len(list(readers(manifest, tmp_path, 1)[0].batches(1, start_step=7))) == 5


@pytest.mark.parametrize("cache", ["disk", "memory", "auto"])
def test_rows_can_wait_on_the_disk(manifest: ShardManifest, tmp_path: Path, cache: str) -> None:
    (reader,) = readers(manifest, tmp_path, 1, cache=cache)
    assert isinstance(reader._columns["x"], np.memmap) is (cache == "disk")
    np.testing.assert_array_equal(np.sort(reader._columns["x"]), np.arange(ROWS))
    rows = np.concatenate([batch["x"] for epoch in range(40) for batch in reader.batches(epoch)])
    assert set(rows.tolist()) == set(range(ROWS))


def test_rows_that_do_not_fit_are_refused(
    manifest: ShardManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Free:
        available = 800

    monkeypatch.setattr("psutil.virtual_memory", Free)
    with pytest.raises(ValueError, match="101 rows take 808 B of 800 B free memory; set cache='disk'"):
        readers(manifest, tmp_path, 1, cache="memory")
    assert isinstance(readers(manifest, tmp_path, 1, cache="auto")[0]._columns["x"], np.memmap)


def test_the_plan_tells_only_the_expected_number_of_rows() -> None:
    plan = plan_poisson(ROWS, BATCH)
    assert [plan.global_rows(step) for step in range(3)] == [BATCH] * 3
    assert plan.sample_rate * ROWS == BATCH
    with pytest.raises(ValueError, match=r"batchSize \(102\) must not exceed the 101 training rows"):
        plan_poisson(ROWS, ROWS + 1)
