"""Data failures of Petastorm and the horovod.spark estimators, one test each.

The claims are from the source of horovod 0.28.1, petastorm 0.13 and pyspark 4.0. Each test passes the same
data in the same way and shows that ringspark returns it unchanged.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from changing_frames import ROWS, random_function

from ringspark.pipelines import (
    READERS,
    ShardManifest,
    Sparse,
    Vector,
    check_engine,
    open_reader,
    write_shards,
)

pytestmark = pytest.mark.spark

MakeShards = Callable[..., ShardManifest]


@pytest.fixture(params=READERS)
def engine(request: pytest.FixtureRequest) -> str:
    """Runs the test with every reading engine; skips unavailable engines."""
    try:
        check_engine(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    return str(request.param)


def _read(manifest: ShardManifest, name: str = "id", **options: Any) -> Any:
    """Returns one column of all rows in epoch order."""
    settings: dict[str, Any] = {"engine": "arrow", "shuffle": False} | options
    return np.concatenate([batch[name] for batch in open_reader(manifest, **settings).batches(0)])


def _ids(manifest: ShardManifest, **options: Any) -> list[int]:
    return sorted(_read(manifest, **options).tolist())


# --- horovod.spark: wrong answers


def test_row_counts_do_not_survive_an_overwrite(spark: Any, tmp_path: Path) -> None:
    """horovod.spark caches row counts with the data: after an overwrite, it takes the wrong steps per
    epoch.
    """
    uri = str(tmp_path / "s")
    write_shards(spark.range(1_000), uri)
    assert open_reader(ShardManifest.load(uri), batch_size=10, engine="arrow").num_steps == 100
    write_shards(spark.range(73), uri, overwrite=True)
    reader = open_reader(ShardManifest.load(uri), batch_size=10, engine="arrow")
    assert (reader.num_steps, reader.manifest.num_rows, len(_ids(reader.manifest))) == (8, 73, 73)


@pytest.mark.extras
def test_the_cache_is_not_keyed_by_the_identity_of_a_dataframe(spark: Any, tmp_path: Path) -> None:
    """horovod.spark's cache key is id(df) without the columns: a new DataFrame may get old data."""
    from ringspark.pipelines import cached_shards

    cache, seen = str(tmp_path / "cache"), set()
    for start in range(0, 40, 10):
        # Each object is deleted after its round, so the next DataFrame may get the same address.
        df = spark.range(start, 40)
        manifest = cached_shards(df, cache, key=f"from {start}")
        assert _ids(manifest) == list(range(start, 40))
        seen.add(manifest.uri)
        del df
    assert len(seen) == 4
    other = cached_shards(spark.range(40).selectExpr("id * 2 AS x"), cache, key="from 0")
    assert [column.name for column in other.columns] == ["x"]


def test_an_id_above_two_to_the_24_stays_what_it_is(spark: Any, tmp_path: Path, engine: str) -> None:
    """horovod.spark casts every feature and label to float32: id 16,777,217 becomes 16,777,216."""
    torch = pytest.importorskip("torch")
    from ringspark.estimators.training.feed import to_tensor

    manifest = write_shards(spark.range(16_777_217, 16_777_219), str(tmp_path / "s"))
    ids = _read(manifest, engine=engine)
    assert sorted(to_tensor(ids, torch.device("cpu")).tolist()) == [16_777_217, 16_777_218]


def test_shuffle_false_keeps_the_order_of_the_rows(make_shards: MakeShards, engine: str) -> None:
    """horovod.spark accepts shuffle=False and shuffles anyway."""
    manifest = make_shards({"id": np.arange(500)}, num_files=1)
    assert _read(manifest, engine=engine).tolist() == list(range(500))
    assert _read(manifest, engine=engine, shuffle=True).tolist() != list(range(500))


def test_an_unseeded_split_is_disjoint(spark: Any, tmp_path: Path) -> None:
    """horovod.spark writes train and validation separately: an unseeded split puts rows in both or in
    neither.
    """
    # Random in every execution of the plan, so a second execution would show.
    df = random_function(spark).selectExpr("id", "x < 0.4 AS held_out")
    manifest = write_shards(df, str(tmp_path / "s"), validation_col="held_out", num_files=3)
    train, held_out = _ids(manifest.select("train")), _ids(manifest.select("validation"))
    assert sorted(train + held_out) == list(range(ROWS))
    assert min(len(train), len(held_out)) > 100


@pytest.mark.parametrize("num_workers", [1, 3, 7])
def test_no_row_is_dropped_or_repeated_and_the_reader_ends(
    make_shards: MakeShards, engine: str, num_workers: int
) -> None:
    """horovod.spark takes floor(rows / batch / workers) steps of an endless reader: rows drop or repeat."""
    manifest = make_shards({"id": np.arange(103)}, num_files=2, row_group_rows=16)
    ids: list[int] = []
    for worker in range(num_workers):
        reader = open_reader(manifest, None, worker, num_workers, batch_size=10, engine=engine)
        batches = list(reader.batches(0))
        assert len(batches) == 11, "every worker takes every step, also the short one"
        ids += [value for batch in batches for value in batch["id"].tolist()]
    assert sorted(ids) == list(range(103))


# --- horovod.spark: slow or brittle


def test_vectors_never_become_python_rows(spark: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """horovod.spark sends vectors through rdd.map().toDF(), as one Python object per row."""
    from pyspark.ml.feature import VectorAssembler

    # The first rows are mostly zeros and the last have none, so the assembler makes sparse and dense
    # vectors.
    parts = spark.range(64).selectExpr(
        "id", *(f"if(id % 8 < {i}, 0D, id / {i + 3}) as x{i}" for i in range(8))
    )
    df = VectorAssembler(inputCols=[f"x{i}" for i in range(8)], outputCol="v").transform(parts)
    kinds = {type(row.v).__name__ for row in df.select("v").collect()}
    assert kinds == {"SparseVector", "DenseVector"}
    plans: list[str] = []
    original = type(df).mapInArrow

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        plans.append(result._jdf.queryExecution().toString() if hasattr(result, "_jdf") else "MapInArrow")
        return result

    monkeypatch.setattr(type(df), "mapInArrow", spy)
    columns = [*(f"x{i}" for i in range(8)), "v"]
    manifest = write_shards(df.select(columns), str(tmp_path / "s"), columns={"v": Vector("float64")})
    assert "MapInArrow" in plans[0]
    for step in ("BatchEvalPython", "ArrowEvalPython", "ExistingRDD", "LogicalRDD", "MapElements"):
        assert step not in plans[0]
    # Exact equality: each vector holds the doubles of its columns.
    expected = np.stack([_read(manifest, f"x{i}") for i in range(8)], axis=1)
    assert _read(manifest, "v").tobytes() == expected.tobytes()


def test_sparse_vectors_stay_sparse(spark: Any, tmp_path: Path, engine: str) -> None:
    """Neither horovod.spark nor Petastorm keeps sparse vectors sparse; users have asked for it."""
    from pyspark.ml.linalg import Vectors

    df = spark.createDataFrame([(Vectors.sparse(1 << 20, {7 * i: 0.5 + i}),) for i in range(30)], ["v"])
    manifest = write_shards(df, str(tmp_path / "s"), columns={"v": Sparse()})
    (batch,) = open_reader(manifest, engine=engine).batches(0)
    assert len(batch["v.data"]) == len(batch["v.indices"]) == 30
    assert np.array_equal(batch["v.indices"], 7 * (batch["v.data"] - 0.5))
    assert sum(file.num_bytes for file in manifest.files) < 50_000


def test_files_are_even_where_partitions_are_not(spark: Any, tmp_path: Path) -> None:
    """horovod.spark uses coalesce, which leaves files as uneven as the partitions."""
    df = spark.range(3_000).repartitionByRange(6, "id").where("id < 400 or id >= 2995")
    sizes = [file.num_rows for file in write_shards(df, str(tmp_path / "s"), num_files=5).files]
    assert sizes == [81] * 5


def test_two_writes_run_side_by_side(spark: Any, tmp_path: Path) -> None:
    """horovod.spark holds a global lock while it writes, so parallel fits queue."""
    here = str(tmp_path)

    def write(mine: str, other: str) -> int:
        def meet(batches: Any) -> Any:
            # Waits inside the running job for a file that only a concurrent second job can write.
            import time
            from pathlib import Path

            Path(here, mine).touch()
            deadline = time.monotonic() + 60
            while not Path(here, other).exists():
                assert time.monotonic() < deadline, "the other write never ran beside this one"
                time.sleep(0.01)
            yield from batches

        df = spark.range(0, 10, 1, 1).mapInPandas(meet, "id long")
        return write_shards(df, str(tmp_path / f"shards-{mine}")).num_rows

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(write, ["a", "b"], ["b", "a"])) == [10, 10]


# --- TorchDistributor's data


def test_an_empty_partition_is_no_error(spark: Any, tmp_path: Path, engine: str) -> None:
    """TorchDistributor raises for an empty partition, and a KeyError hides the reason."""
    manifest = write_shards(spark.range(3).repartition(4, "id").where("id != 1"), str(tmp_path / "s"))
    shards = [
        [len(batch["id"]) for batch in open_reader(manifest, None, n, 4, 4, engine=engine).batches(0)]
        for n in range(4)
    ]
    assert sorted(shards) == [[0], [0], [1], [1]]


def test_rows_come_in_batches_shuffled_over_all_files(make_shards: MakeShards, engine: str) -> None:
    """TorchDistributor's data loader reads row by row, without shuffling."""
    manifest = make_shards({"id": np.arange(2_000)}, num_files=4, row_group_rows=50)
    reader = open_reader(manifest, batch_size=200, seed=1, engine=engine)
    first, second = (next(iter(reader.batches(epoch)))["id"] for epoch in (0, 1))
    assert first.shape == (200,)
    assert {int(value) // 500 for value in first} == {0, 1, 2, 3}
    assert np.mean(np.diff(first) == 1) < 0.1
    assert not np.array_equal(first, second)


def test_the_global_random_numbers_are_left_alone(make_shards: MakeShards, engine: str) -> None:
    """TorchDistributor's data loader reseeds the global `random`; this test checks NumPy's generator too."""
    manifest = make_shards({"id": np.arange(200)})
    before = random.getstate(), json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist)
    assert len(_read(manifest, engine=engine, shuffle=True, seed=5)) == 200
    after = random.getstate(), json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist)
    assert before == after


# --- Petastorm


def test_nested_lists_arrive(spark: Any, tmp_path: Path, engine: str) -> None:
    """Petastorm drops nested list columns with a warning."""
    df = spark.range(0, 20, 1, 1).selectExpr("id", "array(array(id, 1L), array(2L, 3L), array(4L, -id)) as m")
    matrices = _read(write_shards(df, str(tmp_path / "s")), "m", engine=engine)
    assert matrices.tolist() == [[[row, 1], [2, 3], [4, -row]] for row in range(20)]


def test_strings_and_nulls_are_refused_on_the_driver_by_name(spark: Any, tmp_path: Path) -> None:
    """In Petastorm, strings and nulls raise in a worker thread without the column's name."""
    for expression, message in (
        ("cast(id as string) as city", "column 'city' has type string"),
        ("if(id = 3, null, id) as age", "column 'age' has nulls in 1 of 9 rows"),
        ("if(id = 3, array(1D, null), array(1D, 2D)) as sizes", "column 'sizes' has nulls in 1 of 9 rows"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            write_shards(spark.range(9).selectExpr("id", expression), str(tmp_path / "s"))
        assert type(caught.value) is ValueError
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_fewer_row_groups_than_shards_are_fine(make_shards: MakeShards, engine: str) -> None:
    """Petastorm refuses shards without their own row group: "row groups must be >= shards"."""
    manifest = make_shards({"id": np.arange(60)}, num_files=1, row_group_rows=60)
    assert len(manifest.row_groups) == 1
    parts = [_read(manifest, engine=engine, shard=n, num_shards=8, batch_size=16) for n in range(8)]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(60))
    assert all(len(part) for part in parts)


# One epoch has 16 MiB of rows, so growth by a twelfth of the rows per epoch fails. The baseline is the
# first 5 epochs, which also fill the allocators' pools.
_MEMORY_TOLERANCE_BYTES = 20 << 20
_MEMORY_OF_EPOCHS = """
    import gc, json, sys
    import psutil
    from ringspark.pipelines import ShardManifest, open_reader

    reader = open_reader(ShardManifest.load(sys.argv[1]), batch_size=512, engine=sys.argv[2])
    process, sizes = psutil.Process(), []
    for epoch in range(20):
        assert sum(len(batch["x"]) for batch in reader.batches(epoch)) == reader.manifest.num_rows
        gc.collect()
        sizes.append(process.memory_info().rss)
    print(json.dumps(sizes))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_epochs(make_shards: MakeShards, engine: str) -> None:
    """Petastorm's memory grows in every epoch."""
    values = np.arange(1 << 22, dtype=np.float32).reshape(1 << 14, 256)
    manifest = make_shards({"x": values}, num_files=4, row_group_rows=1 << 10)
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_MEMORY_OF_EPOCHS), manifest.uri, engine]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert len(sizes) == 20
    assert max(sizes[-5:]) <= max(sizes[:5]) + _MEMORY_TOLERANCE_BYTES, sizes
