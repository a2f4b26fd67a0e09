"""`plan_parallelism` against the trainer's steps over every mesh of 4 ranks of this host: time and memory.

One gang holds all meshes of a network and runs their steps in interleaved rounds. The plan takes its own
measurements before, so on a busy machine compare times as shares of data parallelism's (`data 4`). The peak
is the bytes of the rank with the most. The plan assumes an even load of the experts, but the router may be
uneven. `--rows` is the rows of the transformers' step over all ranks; `--steps` is the steps per mesh and
round.

    OMP_NUM_THREADS=1 make bench ARGS="plan_parallelism"
"""

from __future__ import annotations

import json

import harness
from measured_step import Network, Rounds, make_networks

from ringspark.estimators.launch.local import run_spawned
from ringspark.extras.planning import plan_parallelism

RANKS = 4


def measure(network: Network, rounds: int, steps: int) -> None:
    """Prints the table of one network and the value of the choice."""
    plan = plan_parallelism(network.spec, network.batch, RANKS, loss=network.loss, repeats=max(3, rounds))
    meshes = [mesh for mesh in plan.meshes if mesh.fits]
    configs = [network.config(mesh.parallelism, mesh.num_micro, RANKS) for mesh in meshes]
    work = Rounds(network, configs, rounds, steps)
    found = [json.loads(text) for text in run_spawned(RANKS, "torch", work, timeout_seconds=300)]
    seconds = found[0][0]
    whole = next(index for index, mesh in enumerate(meshes) if not mesh.cuts_network)
    shares = [harness.median_ratio(own, seconds[whole]) for own in seconds]
    lines = []
    for index, mesh in enumerate(meshes):
        peak = max(peaks[index] for _, peaks in found)
        # The measured steps copy nothing for a checkpoint.
        planned = mesh.peak - mesh.at_peak.get("checkpoint", 0)
        lines.append(
            [
                mesh.name + (" <- chosen" if mesh is plan.chosen else ""),
                str(mesh.num_micro),
                f"{mesh.step_seconds / meshes[whole].step_seconds:.2f}",
                f"{shares[index]:.2f}",
                f"{planned / 2**20:.1f}",
                f"{peak / 2**20:.1f}",
            ]
        )
    header = ["mesh", "micro-batches", "step / data parallelism", "measured", "peak, MiB", "measured"]
    harness.print_table(
        f"plan_parallelism: {network.name}, {network.rows} rows on {RANKS} ranks", header, lines
    )
    assert plan.chosen is not None
    chosen, best = meshes.index(plan.chosen), shares.index(min(shares))
    worth = harness.median_ratio(seconds[chosen], seconds[best])
    print(f"best measured: {meshes[best].name}; the choice takes {worth:.2f} of its time")


def main() -> None:
    """Measures all networks."""
    options = harness.parse(__doc__, rows=(32, 16), steps=(3, 2))
    for network in make_networks(options.rows, tiny=options.tiny):
        measure(network, options.repeats, options.steps)


if __name__ == "__main__":
    main()
