"""Every row of a DataFrame of any kind is in the files once, whichever way it is written."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from frames_of_any_kind import CHANGING, FRAMES, partner

from ringspark import pipelines
from ringspark.estimators.stages.fit_data import FitData
from ringspark.pipelines import ShardManifest, Vocabulary, write_shards

pytestmark = [pytest.mark.spark, pytest.mark.modes]

Way = Callable[[Any, str], ShardManifest]


def _with_nulls(df: Any) -> Any:
    return df.selectExpr("id", "if(id % 7 = 3, null, x) AS x")


def _fit(**settings: Any) -> Way:
    def write(df: Any, uri: str) -> ShardManifest:
        return FitData(columns=("id", "x"), root=uri, **settings).write(df, f"{uri}/rows")

    return write


def _marks(way: str, *, is_slow: bool) -> list[Any]:
    return [pytest.mark.slow] * is_slow + [pytest.mark.extras] * (way in ("a cache", "a fit in place"))


WAYS: dict[str, Way] = {
    "as they are": write_shards,
    "three files": lambda df, uri: write_shards(df, uri, num_files=3),
    "a fraction": lambda df, uri: write_shards(df, uri, validation_fraction=0.3, seed=5),
    "an indicator": lambda df, uri: write_shards(
        df.selectExpr("id", "x", "id % 4 = 0 AS held"), uri, validation_col="held", row_group_rows=7
    ),
    "skipped nulls": lambda df, uri: write_shards(_with_nulls(df), uri, handle_invalid="skip"),
    "kept nulls": lambda df, uri: write_shards(_with_nulls(df), uri, handle_invalid="keep"),
    "words": lambda df, uri: write_shards(
        df.selectExpr("id", "x", "concat('w', id % 5) AS word"),
        uri,
        columns={"word": Vocabulary()},
        validation_fraction=0.2,
    ),
    "a cache": lambda df, uri: pipelines.cached_shards(df, uri, key="v1"),
    "a fit": _fit(validation_fraction=0.25, seed=3),
    "a fit that skips": lambda df, uri: _fit(drops_invalid=True)(_with_nulls(df), uri),
    "a fit in place": _fit(place="auto"),
}

ALL = [
    # In `make test`, each frame takes one way: the next one.
    pytest.param(kind, way, id=f"{kind}-{way}", marks=_marks(way, is_slow=(at - at_way) % len(WAYS) != 0))
    for at, kind in enumerate(FRAMES)
    for at_way, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("kind", "way"), ALL)
def test_every_row_is_written_once(spark: Any, tmp_path: Path, kind: str, way: str) -> None:
    df = FRAMES[kind](spark, tmp_path)
    df = df.cache() if kind.startswith(CHANGING) else df
    rows = [(row["id"], row["x"]) for row in df.collect()]
    assert rows, "a frame without rows shows nothing"
    manifest = WAYS[way](df, str(tmp_path / "shards"))
    left_out = sum(number % 7 == 3 for number, _ in rows) if "skip" in way else 0
    found = [
        pair
        for path in manifest.paths
        for pair in zip(*(pq.read_table(path).column(name).to_pylist() for name in ("id", "x")), strict=True)
    ]
    wanted = Counter(rows) if way != "kept nulls" else Counter((n, 0.0 if n % 7 == 3 else x) for n, x in rows)
    if "skip" in way:
        wanted = Counter({pair: count for pair, count in wanted.items() if pair[0] % 7 != 3})
    assert Counter(found) == wanted
    assert all(x == partner(number) for number, x in rows)
    assert manifest.num_rows == len(rows) - left_out
    for split in manifest.stats:
        assert {stats.rows for stats in manifest.stats[split].values()} == {manifest.select(split).num_rows}
    manifest.verify()
