"""One contract for every engine in READERS."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringspark.pipelines import ShardManifest, check_engine, default_engine, open_reader, readers
from ringspark.pipelines.readers import Batch, ShardReader, base

pytestmark = pytest.mark.usefixtures("no_thread_left")

NUM_ROWS = 237


def _installed(engine: str) -> bool:
    try:
        check_engine(engine)
    except ValueError:
        return False
    return True


COLUMNS = {
    "id": np.arange(NUM_ROWS, dtype=np.int64) + 16_777_217,
    "flag": np.arange(NUM_ROWS) % 3 == 0,
    "byte": (np.arange(NUM_ROWS) % 100).astype(np.int8),
    "short": np.arange(NUM_ROWS, dtype=np.int16),
    "int": np.arange(NUM_ROWS, dtype=np.int32) * 1000,
    "float": np.linspace(-1, 1, NUM_ROWS, dtype=np.float32),
    "double": np.where(np.arange(NUM_ROWS) % 5 == 0, np.nan, np.linspace(0, 1e300, NUM_ROWS)),
    "features": np.arange(NUM_ROWS * 3, dtype=np.float32).reshape(-1, 3),
    "tokens": np.arange(NUM_ROWS * 2, dtype=np.int64).reshape(-1, 2) * 2**40,
    "mask": np.arange(NUM_ROWS * 4).reshape(-1, 4) % 3 == 1,
    "a.b (c)": np.arange(NUM_ROWS, dtype=np.int64),
}


@pytest.fixture
def shards(ordered_shards: Any) -> ShardManifest:
    return ordered_shards(COLUMNS, num_files=3, row_group_rows=16)


def _joined(batches: list[Batch], name: str = "id") -> np.ndarray:
    return np.concatenate([batch[name] for batch in batches])


def test_epochs_may_have_batches_of_their_own_size(shards: ShardManifest, engine: str) -> None:
    """One reader and one cache serve all batch sizes."""
    sizes = [20, 20, 64, 33]

    def reader(shard: int, batch_size: Any) -> ShardReader:
        return open_reader(shards, ["id"], shard, 2, batch_size, engine=engine, cache="memory")

    for shard in range(2):
        changing = reader(shard, sizes.__getitem__)
        assert changing.num_steps == 12
        for epoch, size in enumerate(sizes):
            constant = reader(shard, size)
            assert changing.plan(epoch).num_steps == constant.num_steps
            for start in (0, 2):
                found = [batch["id"].tolist() for batch in changing.batches(epoch, start)]
                assert found == [batch["id"].tolist() for batch in constant.batches(epoch, start)]
        with pytest.raises(ValueError, match="start_step must be from 0 to 4, got 5"):
            changing.batches(2, 5)
        assert changing.cache is not None
        changing.close()
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        reader(0, lambda epoch: 0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_all_engines_agree(shards: ShardManifest, engine: str, shuffle: bool) -> None:
    def read(name: str) -> list[Batch]:
        reader = open_reader(shards, shard=1, num_shards=3, batch_size=20, engine=name, shuffle=shuffle)
        return list(reader.batches(1))

    for left, right in zip(read(engine), read("arrow"), strict=True):
        assert list(left) == list(right)
        for name in left:
            assert left[name].dtype == right[name].dtype
            assert left[name].tobytes() == right[name].tobytes()


def test_batches_are_the_same_for_any_number_of_shards(shards: ShardManifest, engine: str) -> None:
    def step_ids(num_shards: int, step: int) -> list[int]:
        parts = [
            open_reader(shards, ["id"], shard, num_shards, 64, engine=engine).batches(0, start_step=step)
            for shard in range(num_shards)
        ]
        ids = [next(part)["id"] for part in parts]
        for part in parts:
            part.close()
        return sorted(np.concatenate(ids).tolist())

    for step in range(4):
        assert step_ids(1, step) == step_ids(4, step)


def test_a_shard_may_be_empty(ordered_shards: Any, engine: str) -> None:
    manifest = ordered_shards({"x": np.ones((2, 3), dtype=np.float32)}, num_files=1)
    shapes = [
        [batch["x"].shape for batch in open_reader(manifest, None, shard, 5, 1, engine=engine).batches(0)]
        for shard in range(5)
    ]
    assert all(len(steps) == 2 for steps in shapes)
    assert sorted(shape for steps in shapes for shape in steps) == [(0, 3)] * 8 + [(1, 3)] * 2


@pytest.mark.parametrize("shuffle", [True, False])
def test_resuming_gives_the_tail(shards: ShardManifest, engine: str, shuffle: bool) -> None:
    reader = open_reader(shards, ["id", "features"], 1, 2, 16, seed=2, engine=engine, shuffle=shuffle)
    whole = list(reader.batches(5))
    for start in (0, 1, 7, reader.num_steps - 1, reader.num_steps):
        tail = list(reader.batches(5, start_step=start))
        assert len(tail) == len(whole) - start
        for left, right in zip(tail, whole[start:], strict=True):
            assert np.array_equal(left["id"], right["id"])
            assert np.array_equal(left["features"], right["features"])


def test_row_groups_come_in_the_order_asked_for_with_repeats(shards: ShardManifest, engine: str) -> None:
    reader = open_reader(shards, ["id"], engine=engine)
    starts = np.cumsum([0, *shards.row_groups])
    wanted = [3, 0, 14, 3, 3, 7, 0]
    for index, columns in zip(wanted, reader.read_row_groups(wanted), strict=True):
        assert np.array_equal(columns["id"], COLUMNS["id"][starts[index] : starts[index + 1]])


def test_a_file_of_another_dtype_is_refused(shards: ShardManifest, engine: str, ordered_shards: Any) -> None:
    other = ordered_shards({"id": COLUMNS["int"]}, num_files=3, row_group_rows=16, name="other")
    for mine, theirs in zip(shards.files, other.files, strict=True):
        (Path(shards.uri) / mine.path).write_bytes((Path(other.uri) / theirs.path).read_bytes())
    with pytest.raises(RuntimeError, match=r"it has \d+ bytes, but the manifest says \d+"):
        list(open_reader(shards, ["id"], engine=engine).batches(0))
    # Also if the sizes are equal by chance.
    files = tuple(
        replace(mine, num_bytes=theirs.num_bytes)
        for mine, theirs in zip(shards.files, other.files, strict=True)
    )
    with pytest.raises(RuntimeError, match="column 'id' should hold int64, but the data is int32"):
        list(open_reader(replace(shards, files=files), ["id"], engine=engine).batches(0))


def test_batches_are_writable_and_independent(shards: ShardManifest, engine: str) -> None:
    reader = open_reader(shards, ["id"], batch_size=10, engine=engine)
    clean = list(reader.batches(0))
    batches = reader.batches(0)
    next(batches)["id"][:] = -1
    for left, right in zip(batches, clean[1:], strict=True):
        assert np.array_equal(left["id"], right["id"])


def test_no_warning_reaches_the_user(shards, engine, recwarn):
    list(open_reader(shards, engine=engine).batches(0))
    assert [str(warning.message) for warning in recwarn] == []


def test_petastorm_missing_is_one_sentence(shards: ShardManifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"reader 'petastorm' is not installed; pip install .* or set reader='arrow'"
    ):
        open_reader(shards, engine="petastorm")
    assert default_engine() == "arrow"


@pytest.mark.skipif(not _installed("petastorm"), reason="petastorm cannot run here")
def test_a_premature_end_in_petastorm_loses_no_row_group() -> None:
    from petastorm.workers_pool import EmptyResultError

    from ringspark.pipelines.readers.petastorm_reader import _TableResults

    class Pool:
        answers: list[Any] = [EmptyResultError(), "table"]

        def get_results(self) -> Any:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    assert _TableResults().read_next(Pool(), None, None) == "table"


def test_batches_that_are_kept_do_not_change(ordered_shards, engine, monkeypatch):
    monkeypatch.setattr(base, "_BLOCK_ROWS", 16)
    wide = np.arange(800 * 32, dtype=np.float32).reshape(-1, 32)
    reader = open_reader(ordered_shards({"x": wide}), batch_size=16, engine=engine)
    rows = np.concatenate([batch["x"] for batch in list(reader.batches(1))])
    assert rows[np.argsort(rows[:, 0])].tobytes() == wide.tobytes()
