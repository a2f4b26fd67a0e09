"""Data failures of Petastorm and the horovod.spark estimators that no other file tests."""

import json
import random
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringspark.pipelines import ShardManifest, Vector, open_reader, write_shards

pytestmark = pytest.mark.spark


def _read(manifest: ShardManifest, name: str = "id", **options: Any) -> Any:
    """Returns one column of all rows in epoch order."""
    settings: dict[str, Any] = {"engine": "arrow", "shuffle": False} | options
    return np.concatenate([batch[name] for batch in open_reader(manifest, **settings).batches(0)])


def test_vectors_never_become_python_rows(spark: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """horovod.spark sends vectors through rdd.map().toDF(), as one Python object per row."""
    from pyspark.ml.feature import VectorAssembler

    # The first rows are mostly zeros and the last have none, so the assembler makes sparse and dense vectors.
    values = [f"if(id % 8 < {i}, 0D, id / {i + 3}) as x{i}" for i in range(8)]
    parts = spark.range(64).selectExpr("id", *values)
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


def test_the_global_random_numbers_are_left_alone(make_shards: Any, engine: str) -> None:
    """TorchDistributor's data loader reseeds the global `random`; this test checks NumPy's generator too."""
    manifest = make_shards({"id": np.arange(200)})
    before = random.getstate(), json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist)
    assert len(_read(manifest, engine=engine, shuffle=True, seed=5)) == 200
    after = random.getstate(), json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist)
    assert before == after


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
def test_memory_does_not_grow_with_the_epochs(make_shards: Any, engine: str) -> None:
    """Petastorm's memory grows in every epoch."""
    values = np.arange(1 << 22, dtype=np.float32).reshape(1 << 14, 256)
    manifest = make_shards({"x": values}, num_files=4, row_group_rows=1 << 10)
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_MEMORY_OF_EPOCHS), manifest.uri, engine]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert len(sizes) == 20
    assert max(sizes[-5:]) <= max(sizes[:5]) + _MEMORY_TOLERANCE_BYTES, sizes
