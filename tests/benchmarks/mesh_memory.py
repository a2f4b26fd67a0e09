"""Memory per rank of each mesh against theory, and networks that fit on 4 ranks but not on 1 or 2.

Runs real trainings with `train_worker`, without Spark. The first table counts tensors after the backward
passes of a step, each storage once, on the rank with the most bytes. Theory is computed from the layers.

In the second table the kernel limits the memory of every rank (RLIMIT_DATA, above the memory of a connected
process before it builds the network), with tensors, buffers and threads. The network is built shard by shard,
trained for two steps, and its weights are written. Its state is what one worker needs with AdamW in fp32:
weights, gradients and moments, 16 bytes per parameter. The first limit is the state divided by 6 or 3.75. The
divisor decreases by 0.25 until 4 ranks train to the end. Then 2 ranks and 1 rank get the same limit per rank,
the same network and settings, and the same rows.

    python tests/benchmarks/mesh_memory.py
"""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import harness
from rank_bytes import (
    KINDS,
    columns,
    config_of,
    counted_bytes,
    expected_bytes,
    is_of_the_limit,
    trained_within,
)
from written_shards import written

from ringspark.estimators import WorkerError
from ringspark.estimators.options.sync import AllReduce, Zero

MIB = 2**20
PIPELINE = {"gradient_accumulation": 8}
MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"data": 2}, {"sync": Zero(stage=1)}),
    ({"data": 2}, {"sync": Zero(stage=2)}),
    ({"shard": 2}, {"sync": Zero(stage=3)}),
    ({"tensor": 2}, {}),
    ({"pipeline": 2}, PIPELINE),
    ({"data": 2, "shard": 2}, {"sync": Zero(stage=1)}),
    ({"data": 2, "shard": 2}, {"sync": Zero(stage=2)}),
    ({"data": 2, "shard": 2}, {"sync": Zero(stage=3)}),
    ({"shard": 4}, {"sync": Zero(stage=3)}),
    ({"tensor": 4}, {}),
    ({"pipeline": 4}, PIPELINE),
    ({"pipeline": 2, "tensor": 2}, PIPELINE),
    ({"shard": 2, "tensor": 2}, {"sync": Zero(stage=3)}),
    ({"shard": 2, "pipeline": 2}, {"sync": Zero(stage=1)} | PIPELINE),
]
# Axis, settings, and the first ratio of the state to the limit. In theory a larger ratio is impossible.
LIMITED: list[tuple[str, dict[str, Any], float]] = [
    ("tensor", {}, 3.75),
    ("pipeline", {"gradient_accumulation": 4}, 3.75),
    ("shard", {"sync": Zero(stage=3)}, 3.75),
    ("pipeline", {"gradient_accumulation": 4, "optimizer": "adamw8bit"}, 6.0),
]


def told(mesh: dict[str, int], changes: dict[str, Any]) -> str:
    """Returns a description of a mesh."""
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    return axes + (f", sharding {changes['sharding']!r}" if "sharding" in changes else "")


def count(folder: Path, layers: int, width: int, rows: int, most_ranks: int) -> None:
    """Trains over every mesh of at most `ranks` ranks, and prints the table."""
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
        f"MiB on the rank with the most (and theory): {layers + 1} layers of {width} x {width}, AdamW, fp32, "
        f"{rows} rows per step",
        ["", *KINDS],
        table,
    )


def limit(folder: Path, layers: int, width: int, *, is_tiny: bool) -> None:
    """Prints the second table."""
    manifest = written(folder / "large", columns(16, width))
    state = 16 * layers * width * (width + 1)

    def tried(axis: str, changes: dict[str, Any], workers: int, times: float) -> bool:
        """Returns whether the ranks train to the end with a limit of the state divided by `times`."""
        mesh = {axis: workers} if workers > 1 else {"data": 1}
        alone = {"sync": AllReduce()} if workers == 1 else {}
        settings = {"num_workers": workers, "parallelism": mesh} | changes | alone
        run = Path(tempfile.mkdtemp(dir=folder))
        try:
            trained_within(config_of(manifest, run, layers - 1, width, 8, **settings), int(state / times))
        except WorkerError as error:
            if not is_of_the_limit(error):
                raise
            return False
        finally:
            shutil.rmtree(run)
        return True

    table = []
    for axis, changes, most in LIMITED[-1:] if is_tiny else LIMITED:
        # The threads and buffers of a tiny network are larger than its state.
        times = 0.001 if is_tiny else most
        while not tried(axis, changes, 4, times):
            times -= 0.25
        fewer = ["trains" if tried(axis, changes, n, times) else "ended by the limit" for n in (2, 1)]
        name = told({axis: 4}, changes) + (f", {changes['optimizer']}" if "optimizer" in changes else "")
        table.append([name, f"{state / times / MIB:,.0f}", f"{times:.2f}", *fewer])
        print(f"found: {table[-1]}", flush=True)
    harness.print_table(
        f"{layers} layers of {width} x {width}: AdamW state of {state / MIB:,.0f} MiB",
        ["4 workers", "sufficient MiB per worker", "state / limit", "2 workers", "1 worker"],
        table,
    )


def main() -> None:
    """Prints both tables or one."""
    sizes = {"layers": (8, 8), "width": (256, 64), "most_ranks": (4, 2)}
    options = harness.parse(__doc__, rows=(512, 16), large_layers=(16, 4), large_width=(4096, 64), **sizes)
    with tempfile.TemporaryDirectory() as folder:
        count(Path(folder), options.layers - 1, options.width, options.rows, options.most_ranks)
        limit(Path(folder), options.large_layers, options.large_width, is_tiny=options.tiny)


if __name__ == "__main__":
    main()
