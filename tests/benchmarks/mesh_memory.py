"""What a rank of each mesh holds, against theory; and a network that 4 ranks train and 1 or 2 cannot hold.

Real trainings by `train_worker`, without Spark. The first table counts tensors when a step's backward passes
are over: each memory once, on the rank that holds most of it. Theory is arithmetic on the layers.

In the second table the kernel refuses every rank more than a limit (RLIMIT_DATA, above what a connected
process has before it builds the network): tensors, buffers, threads and all. The network is built part by
part, trained for two steps, and its checkpoint is written. Fewer ranks get the same limit each, the same
network and the same rows.

    python tests/benchmarks/mesh_memory.py
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import harness
from rank_bytes import KINDS, columns, config_of, counted_bytes, expected_bytes, trained_within
from written_shards import written

from ringspark.estimators import WorkerError

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
LIMITED: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"pipeline": 4}, {"gradient_accumulation": 4}),
    ({"tensor": 4}, {}),
    ({"shard": 4}, {"sharding": "parameters"}),
    ({"data": 2}, {"sharding": "optimizer"}),
    ({"pipeline": 2}, {"gradient_accumulation": 4}),
    ({"shard": 2}, {"sharding": "parameters"}),
    ({"data": 1}, {}),
]


def told(mesh: dict[str, int], changes: dict[str, Any]) -> str:
    """A mesh in words."""
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    return axes + (f", sharding {changes['sharding']!r}" if "sharding" in changes else "")


def count(folder: Path, layers: int, width: int, rows: int, most_ranks: int) -> None:
    """The first table."""
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


def limit(folder: Path, layers: int, width: int, rows: int, most: int, *, only_first: bool) -> None:
    """The second table."""
    manifest = written(folder / "large", columns(2 * rows, width))
    state = 4 * (layers + 1) * width * (width + 1) * 4
    table = []
    for number, (mesh, changes) in enumerate(LIMITED[:1] if only_first else LIMITED):
        workers = math.prod(mesh.values())
        settings = {"num_workers": workers, "parallelism": mesh} | changes
        config = config_of(manifest, folder / f"large{number}", layers, width, rows, **settings)
        try:
            found = trained_within(config, most)
            result = f"{found['steps']} steps, loss {found['loss']:.4f}"
        except WorkerError as error:
            lines = str(error).splitlines()
            result = next((line for line in lines if "allocate" in line or "Memory" in line), lines[0])
            result = "ended: " + ("cannot allocate memory" if "alloc" in result.lower() else result[:60])
        table.append([told(mesh, changes), f"{state / workers / MIB:,.0f}", result])
        print(f"tried: {table[-1]}", flush=True)
    harness.print_table(
        f"weights, gradients and AdamW's moments of {state / MIB:,.0f} MiB, on ranks of at most "
        f"{most / MIB:,.0f} MiB each: the state is {state / most:.1f} times what a rank may have",
        ["", "state a rank, MiB", "training"],
        table,
    )


def main() -> None:
    """Prints both tables."""
    sizes = {"layers": (16, 4), "width": (4096, 64), "limit_mib": (1250, 400), "most_ranks": (4, 2)}
    options = harness.parse(__doc__, rows=(64, 16), **sizes)
    with tempfile.TemporaryDirectory() as folder:
        width = min(options.width, 256)
        count(Path(folder), 7, width, options.rows, options.most_ranks)
        limit(
            Path(folder),
            options.layers - 1,
            options.width,
            8,
            options.limit_mib * MIB,
            only_first=options.tiny,
        )


if __name__ == "__main__":
    main()
