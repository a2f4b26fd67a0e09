"""Overlap of gradient all-reduce and backward pass: the hidden share and the saved time.

Trains a network on two hosts with a shaped link between them, one rank per host. "Off" sends all gradients in
one message after the backward pass. "On" sends buckets during the backward pass, as a training over a network
does. Both run in interleaved rounds in one gang. Steps come in pairs: one is timed, and one is measured as in
a training, which reports the communication time of a rank, its hidden share, and the exposed part, by which
the step took longer.

The first table has 5 million parameters. The second shows from which size on buckets are faster, and which
bucket size. `--delay-ms 5` adds a link of 100 Mbit/s with 5 ms more round-trip time.

    OMP_NUM_THREADS=1 make bench ARGS="overlap"
"""

from __future__ import annotations

import time
from argparse import Namespace
from statistics import median
from typing import Any, Literal

import harness
import torch
from links import link_refusal, shaped_hosts

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.data.gradient_all_reduce import GradientAllReduce
from ringspark.estimators.training.observation.overlap import hidden_and_total
from ringspark.estimators.training.observation.timeline import now_ns
from ringspark.models import ModelSpec

GANGS = ("torch", "horovod")
LAYERS = 5
WARM_UPS = 2
# Bytes per bucket; without buckets all gradients are one message.
BucketBytes = int | Literal["chosen"] | None
OFF_AND_ON: dict[str, BucketBytes] = {"off": None, "on": "chosen"}
BUCKETS: dict[str, BucketBytes] = {"off": None, "256 KiB": 1 << 18, "1 MiB": 1 << 20, "4 MiB": 4 << 20}


def spec_of(width: int) -> ModelSpec:
    return ModelSpec("mlp", {"in_features": width, "hidden": [width] * LAYERS, "out_features": 1})


def num_parameters(width: int) -> int:
    return sum(p.numel() for p in spec_of(width).build().parameters())


class Training:
    """One network on one rank."""

    def __init__(self, width: int, bucket_bytes: BucketBytes, collective: Collective, rows: int) -> None:
        torch.manual_seed(0)
        network = spec_of(width).build()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        self._sync = GradientAllReduce(network, optimizer, collective, bucket_bytes=bucket_bytes)
        self._x = torch.randn(rows, width, generator=torch.Generator().manual_seed(collective.rank))

    def step(self) -> list[tuple[int, int]]:
        """Takes a step; returns when its kernels have finished."""
        begin = now_ns()
        self._sync.optimizer.zero_grad()
        with self._sync.micro_batch(last=True):
            self._sync.module(self._x).square().mean().backward()
        passed = now_ns()
        self._sync.reduce()
        reduced = now_ns()
        self._sync.optimizer.step()
        return [(begin, passed), (reduced, now_ns())]


def steps_of(
    collective: Collective, width: int, modes: dict[str, BucketBytes], repeats: int, rows: int
) -> dict[str, Any]:
    """Returns milliseconds by mode: steps, measured steps, communication, and the hidden part."""
    trainings = {name: Training(width, mode, collective, rows) for name, mode in modes.items()}
    told: dict[str, Any] = {name: {"step": [], "measured": [], "total": [], "hidden": []} for name in modes}
    for turn in range(WARM_UPS + repeats):
        for name, training in trainings.items():
            taken = {}
            for is_measured in (False, True):
                collective.barrier()
                begin = time.perf_counter()
                if is_measured:
                    collective.operations.start()
                computing = training.step()
                if is_measured:
                    hidden, total = hidden_and_total(collective.operations.take(), computing)
                taken["measured" if is_measured else "step"] = 1000 * (time.perf_counter() - begin)
            taken |= {"total": total / 1e6, "hidden": hidden / 1e6}
            if turn >= WARM_UPS:
                for key, value in taken.items():
                    told[name][key].append(value)
    return told


def line_of(name: str, own: dict[str, list[float]], off: dict[str, list[float]]) -> list[str]:
    """Returns one row of a table."""
    exposed = [total - hidden for total, hidden in zip(own["total"], own["hidden"], strict=True)]
    shares = [hidden / total for total, hidden in zip(own["total"], own["hidden"], strict=True)]
    return [
        name,
        f"{median(own['step']):,.1f}",
        f"{1 / harness.median_ratio(own['step'], off['step']):.2f}x",
        f"{median(own['total']):,.1f}",
        f"{median(shares):.2f}",
        f"{median(exposed):,.1f}",
        f"{harness.median_ratio(own['measured'], own['step']):.3f}",
    ]


def table_of(
    title: str, links: list[tuple[float, float]], widths: list[int], modes: dict[str, Any], options: Namespace
) -> None:
    """Prints one table over links, collectives, sizes and modes."""
    lines = []
    for megabits, delay_ms in links:
        with shaped_hosts(2, mbit=megabits, delay_ms=delay_ms) as hosts:
            for collective in GANGS[: options.gangs]:
                for width in widths:
                    results = hosts.run(
                        steps_of, width, modes, options.repeats, options.rows, collective=collective
                    )
                    delay = f", {delay_ms:g} ms" if delay_ms else ""
                    size = "" if len(widths) == 1 else f", {4e-6 * num_parameters(width):.2g} MB"
                    for name, own in results[0].items():
                        what = f"{collective}, {megabits:g} Mbit/s{delay}{size}, {name}"
                        lines.append(line_of(what, own, results[0]["off"]))
                        print(*lines[-1], flush=True)
    header = [
        "",
        "step, ms",
        "speedup",
        "communication, ms",
        "hidden",
        "exposed, ms",
        "measured / unmeasured",
    ]
    harness.print_table(title, header, lines)


def main() -> None:
    """Prints both tables."""
    made = harness.parser(
        __doc__, gangs=(2, 1), rows=(768, 2), width=(1024, 16), narrow=(128, 8), repeats=(5, 1)
    )
    made.add_argument("--delay-ms", type=float, default=0.0, metavar="MS", help="delay of a third link")
    made.add_argument("--only", choices=("main", "sizes"), help="one of the tables")
    made.add_argument(
        "--megabits", type=float, nargs="+", default=[100, 1000], help="rates of the links, a second"
    )
    options = made.parse_args()
    if reason := link_refusal():
        print(f"overlap: skipped, no shaped links: {reason}")
        return
    links = [(megabits, 0.0) for megabits in options.megabits]
    links += [(100.0, options.delay_ms)] if options.delay_ms else []
    links = links[:1] if options.tiny else links
    told = f"{options.rows} rows per rank, medians of {options.repeats}"
    if options.only != "sizes":
        size = num_parameters(options.width)
        table_of(f"overlap: {size:,} parameters, {told}", links, [options.width], OFF_AND_ON, options)
    if options.only != "main":
        widths = [options.narrow * 2**power for power in range(1 if options.tiny else 3)]
        table_of(f"overlap: networks of several sizes, {told}", links, widths, BUCKETS, options)


if __name__ == "__main__":
    main()
