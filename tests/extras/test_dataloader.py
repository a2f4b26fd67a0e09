"""`to_dataloader`: every row once, equal steps, resume to the bit, and no thread left behind."""

import itertools
import json
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ringspark.estimators.collectives import Collective
from ringspark.extras.dataloader import ShardLoader, to_dataloader
from ringspark.pipelines import Padded, ShardManifest, Vocabulary, open_reader, write_shards
from ringspark.pipelines.readers import base

ROWS, SIZE = 210, 32


@pytest.fixture
def shards(make_shards: Any) -> ShardManifest:
    """210 rows of training, of which 18 are in the last of 7 steps, and 20 of validation."""
    x = np.arange(230 * 3, dtype=np.float32).reshape(-1, 3)
    row = np.arange(230)
    return make_shards({"row": row, "x": x}, validation=row >= ROWS, row_group_rows=20, num_files=3)


def rows(batches: Iterable[dict[str, torch.Tensor]]) -> list[list[int]]:
    return [batch["row"].tolist() for batch in batches]


def loaders(shards: ShardManifest, ranks: int, **options: Any) -> list[ShardLoader]:
    return [to_dataloader(shards, SIZE, rank=r, world_size=ranks, **options) for r in range(ranks)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_row_is_in_one_batch_of_one_rank(shards: ShardManifest, ranks: int, shuffle: bool) -> None:
    parts = [rows(loader) for loader in loaders(shards, ranks, shuffle=shuffle)]
    assert {len(part) for part in parts} == {7} == {len(loaders(shards, ranks)[0])}
    steps = [sorted(itertools.chain.from_iterable(step)) for step in zip(*parts, strict=True)]
    assert [len(step) for step in steps] == [SIZE] * 6 + [18]
    assert sorted(itertools.chain.from_iterable(steps)) == list(range(ROWS))


def test_passes_go_through_the_epochs(shards: ShardManifest) -> None:
    loader = to_dataloader(shards, SIZE)
    first, second = rows(loader), rows(loader)
    assert first != second
    assert loader.epoch == 2
    loader.set_epoch(1)
    assert rows(loader) == second
    assert rows(to_dataloader(shards, SIZE, seed=1)) != first
    assert rows(to_dataloader(shards, SIZE)) == first


def test_a_resume_at_every_step_gives_the_next_batch_to_the_bit(shards: ShardManifest) -> None:
    for rank, whole in enumerate(loaders(shards, 2)):
        batches = list(itertools.chain(whole, whole))
        for step in range(15):
            first = loaders(shards, 2)[rank]
            state = json.dumps(first.state_dict())
            for _ in itertools.islice(itertools.chain(first, first), step):
                state = json.dumps(first.state_dict())
            resumed = to_dataloader(str(shards.uri), SIZE, rank=rank, world_size=2)
            resumed.load_state_dict(json.loads(state))
            found = []
            for epoch in range(resumed.epoch, 2):
                resumed.set_epoch(epoch)
                found += list(resumed)
            torch.testing.assert_close(found, batches[step:], rtol=0, atol=0)


def test_a_resume_on_other_ranks_goes_on_with_the_rows_of_the_next_step(shards: ShardManifest) -> None:
    whole = rows(to_dataloader(shards, SIZE))
    two = loaders(shards, 2)
    for loader in two:
        list(itertools.islice(loader, 3))
    assert two[0].state_dict() == two[1].state_dict()
    three = loaders(shards, 3)
    for loader in three:
        loader.load_state_dict(two[0].state_dict())
    steps = [sorted(itertools.chain.from_iterable(step)) for step in zip(*map(rows, three), strict=True)]
    assert steps == [sorted(step) for step in whole[3:]]


@pytest.fixture
def small_blocks(monkeypatch: Any) -> None:
    """A pass has many blocks, so the reader's threads still run while the loop has its first batches."""
    monkeypatch.setattr(base, "_BLOCK_ROWS", SIZE)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ringspark")]


def test_a_break_ends_the_threads_and_leaves_the_position(small_blocks: None, shards: ShardManifest) -> None:
    loader = to_dataloader(shards, SIZE)
    for _ in loader:
        assert our_threads()
        if loader.step == 2:
            break
    assert not our_threads()
    assert (loader.epoch, loader.step) == (0, 2)
    assert loader.state_dict()["step"] == 2
    assert len(list(loader)) == 7  # a new pass begins the epoch again


def test_close_ends_a_pass_that_is_still_held(small_blocks: None, shards: ShardManifest) -> None:
    with to_dataloader(shards, SIZE) as loader:
        held = iter(loader)
        next(held)
        assert our_threads()
    assert not our_threads()
    with pytest.raises(RuntimeError, match="or was closed"):
        next(held)


def test_a_second_pass_at_once_is_an_error_and_no_short_epoch(shards: ShardManifest) -> None:
    loader = to_dataloader(shards, SIZE)
    outer = iter(loader)
    next(outer)
    assert len(list(loader)) == 7
    with pytest.raises(RuntimeError, match="open a second loader to iterate twice"):
        next(outer)


def test_the_rows_of_a_step_weight_a_short_step(shards: ShardManifest) -> None:
    loader = to_dataloader(shards, SIZE, rank=1, world_size=2)
    assert [loader.step_rows for _ in loader] == [SIZE] * 6 + [18]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "has seed=0, but this loader has seed=1"),
        ({"shuffle": False}, "has shuffle=True"),
        ({"batch_size": 16}, "has batch_size=32"),
        ({"split": "validation"}, "is of other shards"),
    ],
)
def test_a_state_of_another_order_is_refused(shards: ShardManifest, options: Any, message: str) -> None:
    state = to_dataloader(shards, SIZE).state_dict()
    with pytest.raises(ValueError, match=message):
        to_dataloader(shards, **{"batch_size": SIZE, **options}).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "give both or none"),
        ({"rank": 2, "world_size": 2}, "got rank 2 of 2"),
        ({"columns": ["y"]}, "no column 'y'"),
        ({"split": "test"}, "split must be one of train, validation"),
        ({"split": "validation"}, "have no rows of split 'validation'"),
    ],
)
def test_wrong_options_are_refused(shards: ShardManifest, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_dataloader(shards.select("train"), SIZE, **options)


def test_the_rank_comes_from_torchrun_s_variables(shards: ShardManifest, monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rows(to_dataloader(shards, SIZE)) == rows(loaders(shards, 2)[1])


def _read(uri: str, collective: Collective) -> list[list[int]]:
    assert dist.get_world_size() == 2
    return rows(to_dataloader(uri, SIZE))


@pytest.mark.distributed
def test_the_rank_comes_from_torch_distributed(shards: ShardManifest) -> None:
    found = run_ranks(2, "torch", partial(_read, shards.uri))
    assert found == [rows(loader) for loader in loaders(shards, 2)]


@pytest.mark.spark
@pytest.mark.parametrize("engine", ["arrow", pytest.param("petastorm", marks=pytest.mark.slow)])
def test_columns_arrive_as_the_reader_gives_them(spark: Any, tmp_path: Path, engine: str) -> None:
    frame = spark.range(100).selectExpr(
        "concat('shop ', id % 7) AS shop",
        "IF(id % 5 = 0, NULL, double(id)) AS price",
        "slice(array(1, 2, 3, 4), 1, int(1 + id % 4)) AS words",
        "id % 2 = 0 AS even",
    )
    kinds = {"shop": Vocabulary(), "words": Padded()}
    uri = str(tmp_path / "shards")
    manifest = write_shards(frame, uri, columns=kinds, handle_invalid={"price": "keep"})
    expected = list(open_reader(manifest, batch_size=16, engine="arrow").batches(0))
    found = list(manifest.to_dataloader(16, engine=engine))
    assert len(found) == len(expected) == 7
    for tensors, arrays in zip(found, expected, strict=True):
        assert tensors.keys() >= {"shop", "price", "words", "even"}
        wanted = {name: torch.from_numpy(array) for name, array in arrays.items()}
        torch.testing.assert_close(tensors, wanted, rtol=0, atol=0)
    only = next(iter(manifest.to_dataloader(16, columns=["even"], device="meta")))
    assert only["even"].is_meta
