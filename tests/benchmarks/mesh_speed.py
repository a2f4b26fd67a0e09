"""Step time over every axis of the mesh, on 2 pinned ranks, compared with data parallelism.

One gang holds all meshes of a network and runs the trainer's steps in interleaved rounds, without the reading
of rows. All meshes get the same rows per step, so the network learns the same per step, and only time
matters. The peak counts torch's allocations on the rank with the larger peak.

    OMP_NUM_THREADS=1 python tests/benchmarks/mesh_speed.py

`--rows` is the rows per step over both ranks; `--steps` is the steps per mesh and round.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import harness
from plan_parallelism import SEQ, VOCAB, Network, Rounds

from ringspark.estimators.collectives import Collective
from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.training.phase import Status
from ringspark.models import ModelSpec

RANKS = 2
# Parallelism and micro-batches per step.
DENSE: dict[str, tuple[Mapping[str, Any], int]] = {
    "data 2": ({"data": 2}, 1),
    "tensor 2": ({"tensor": 2}, 1),
    "sequence 2": ({"sequence": 2}, 1),
    "pipeline 2, one by one": ({"pipeline": {"stages": 2, "schedule": "naive"}}, 1),
    "pipeline 2, 1f1b of 4": ({"pipeline": 2}, 4),
    "pipeline 2, zero bubble of 4": ({"pipeline": {"stages": 2, "schedule": "zero_bubble"}}, 4),
}
MIXTURE: dict[str, tuple[Mapping[str, Any], int]] = {
    "data 2": ({"data": 2}, 1),
    "expert 2": ({"expert": 2}, 1),
}


@dataclass(frozen=True)
class Pinned:
    """`Rounds` with each rank pinned to a separate core."""

    rounds: Rounds

    def __call__(self, collective: Collective, device: str, status: Status) -> str:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[collective.rank % len(cores)]})
        return self.rounds(collective, device, status)


def networks(rows: int, *, tiny: bool) -> list[tuple[Network, Mapping[str, tuple[Mapping[str, Any], int]]]]:
    width, depth = (32, 2) if tiny else (256, 4)
    sizes = {"vocab_size": VOCAB, "max_seq_len": SEQ, "dim": width, "depth": depth, "num_heads": 4}
    specs = {
        "transformer": (ModelSpec("transformer_lm", sizes), DENSE),
        "mixture of 4 experts": (
            ModelSpec("transformer_lm", {**sizes, "experts": {"num_experts": 4}}),
            MIXTURE,
        ),
    }
    ids = ((SEQ,), "int64")
    return [
        (Network(name=name, spec=spec, rows=rows, inputs=ids, labels=ids, loss="cross_entropy"), meshes)
        for name, (spec, meshes) in specs.items()
    ]


def main() -> None:
    options = harness.parse(__doc__, rows=(32, 8), steps=(3, 1))
    for network, meshes in networks(options.rows, tiny=options.tiny):
        configs = [
            network.config(parallelism, num_micro, RANKS) for parallelism, num_micro in meshes.values()
        ]
        work = Pinned(Rounds(network, configs, options.repeats, options.steps))
        found = [json.loads(text) for text in run_spawned(RANKS, "torch", work, timeout_seconds=600)]
        (seconds, _), *_ = found
        lines = [
            [
                name,
                f"{1e3 * median(own):.0f}",
                f"{harness.median_ratio(own, seconds[0]):.2f}",
                f"{max(peaks[index] for _, peaks in found) / 2**20:.1f}",
            ]
            for index, (name, own) in enumerate(zip(meshes, seconds, strict=True))
        ]
        size = sum(p.numel() for p in network.spec.build().parameters())
        harness.print_table(
            f"mesh_speed: {network.name} of {size:,} parameters, {network.rows} rows of {SEQ} tokens "
            f"per step on {RANKS} pinned ranks, medians of {options.repeats} rounds of {options.steps} steps",
            ["mesh", "step, ms", "relative to data parallelism", "peak, MiB"],
            lines,
        )


if __name__ == "__main__":
    main()
