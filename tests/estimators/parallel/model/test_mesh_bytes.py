"""A mesh's memory: each rank holds what theory gives it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_bytes import KINDS, columns, config_of, counted_bytes, expected_bytes

from ringspark.pipelines import ShardManifest

pytestmark = pytest.mark.distributed
MakeShards = Callable[..., ShardManifest]
# So many rows that the few by which ranks' shares of a step differ are next to nothing.
LAYERS, WIDTH, ROWS = 7, 128, 512
PIPELINE = {"gradient_accumulation": 8}


def _case(mesh: dict[str, int], sharding: str = "none", *, is_slow: bool = True, **changes: Any) -> Any:
    name = "-".join(f"{axis}{size}" for axis, size in mesh.items()) + f"-{sharding}"
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(mesh, {"sharding": sharding} | changes, id=name, marks=marks)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        _case({"shard": 2}, "parameters", is_slow=False),
        _case({"data": 2}, "optimizer"),
        _case({"data": 2}, "gradients"),
        _case({"tensor": 2}),
        _case({"pipeline": 2}, **PIPELINE),
        *(_case({"data": 2, "shard": 2}, level) for level in ("optimizer", "gradients", "parameters")),
        _case({"shard": 4}, "parameters"),
        _case({"tensor": 4}),
        _case({"pipeline": 4}, **PIPELINE),
        _case({"pipeline": 2, "tensor": 2}, **PIPELINE),
        _case({"shard": 2, "tensor": 2}, "parameters"),
        _case({"shard": 2, "pipeline": 2}, "optimizer", **PIPELINE),
    ],
)
def test_the_fullest_rank_holds_what_theory_gives_it(
    make_shards: MakeShards, tmp_path: Path, mesh: dict[str, int], changes: dict[str, Any]
) -> None:
    manifest = make_shards(columns(3 * ROWS, WIDTH))
    workers = 1
    for size in mesh.values():
        workers *= size
    settings = {"num_workers": workers, "parallelism": mesh} | changes
    config = config_of(manifest, tmp_path / "run", LAYERS, WIDTH, ROWS, **settings)
    expected, ranks = expected_bytes(config, LAYERS, WIDTH), counted_bytes(config)
    most = {kind: max(rank[kind] for rank in ranks) for kind in KINDS}
    assert most == {kind: pytest.approx(count, rel=0.1) for kind, count in expected.items()}
