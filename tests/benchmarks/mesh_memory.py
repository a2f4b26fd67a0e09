"""What a rank of each mesh holds, counted from its tensors, against theory.

Real trainings by `train_worker`, without Spark. Counted when a step's backward passes are over: each memory
once, on the rank that holds most of it. Theory is arithmetic on the layers.

    python tests/benchmarks/mesh_memory.py
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import harness
from rank_bytes import KINDS, columns, config_of, counted_bytes, expected_bytes
from written_shards import written

MIB = 2**20
PIPELINE = {"gradient_accumulation": 8}
MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"data": 2}, {"sharding": "optimizer"}),
    ({"data": 2}, {"sharding": "gradients"}),
    ({"shard": 2}, {"sharding": "parameters"}),
    ({"tensor": 2}, {}),
    ({"pipeline": 2}, PIPELINE),
    ({"data": 2, "shard": 2}, {"sharding": "optimizer"}),
    ({"data": 2, "shard": 2}, {"sharding": "gradients"}),
    ({"data": 2, "shard": 2}, {"sharding": "parameters"}),
    ({"shard": 4}, {"sharding": "parameters"}),
    ({"tensor": 4}, {}),
    ({"pipeline": 4}, PIPELINE),
    ({"pipeline": 2, "tensor": 2}, PIPELINE),
    ({"shard": 2, "tensor": 2}, {"sharding": "parameters"}),
    ({"shard": 2, "pipeline": 2}, {"sharding": "optimizer"} | PIPELINE),
]


def told(mesh: dict[str, int], changes: dict[str, Any]) -> str:
    """A mesh in words."""
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    return axes + (f", sharding {changes['sharding']!r}" if "sharding" in changes else "")


def count(folder: Path, layers: int, width: int, rows: int, most_ranks: int) -> None:
    """Trains over every mesh of at most so many ranks, and prints the table."""
    manifest = written(folder / "shards", columns(3 * rows, width))
    table = []
    for number, (mesh, changes) in enumerate(MESHES):
        workers = math.prod(mesh.values())
        if workers > most_ranks:
            continue
        settings = {"num_workers": workers, "parallelism": mesh} | changes
        config = config_of(manifest, folder / f"run{number}", layers, width, rows, **settings)
        expected, ranks = expected_bytes(config, layers, width), counted_bytes(config)
        most = {kind: max(rank[kind] for rank in ranks) for kind in KINDS}
        cells = [f"{most[kind] / MIB:.2f} ({most[kind] / expected[kind] - 1:+.1%})" for kind in KINDS]
        table.append([told(mesh, changes), *cells])
    harness.print_table(
        f"MiB on the fullest rank (against theory): {layers + 1} layers of {width} x {width}, AdamW, fp32, "
        f"{rows} rows a step",
        ["", *KINDS],
        table,
    )


def main() -> None:
    """Prints the table."""
    options = harness.parse(__doc__, rows=(512, 16), layers=(8, 8), width=(256, 64), most_ranks=(4, 2))
    with tempfile.TemporaryDirectory() as folder:
        count(Path(folder), options.layers - 1, options.width, options.rows, options.most_ranks)


if __name__ == "__main__":
    main()
