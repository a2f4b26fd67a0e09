"""Rendezvous of up to 1,024 ranks: seconds to join, synchronize and gather, without and with strangers.

The ranks are threads of one process, which also runs the server, and start at the same time. The strangers
are another process. They attack the port from before the first rank connects until the last one has, and
reconnect when they are disconnected. Rank 0 gathers one number from each rank. Target: no rank fails, and
1,024 ranks take at most 10 s on 2 cores, also with 200 strangers.
"""

from __future__ import annotations

from statistics import median

import harness
import rendezvous_crowd

from ringspark.estimators.collectives import CollectiveError

SIZES, TINY_SIZES = (64, 256, 512, 1024), (4, 16)


def main() -> None:
    """Measures each size without and with strangers, in interleaved rounds."""
    options = harness.parse(__doc__, strangers=(200, 20))
    cases = [
        (size, num_strangers)
        for size in (TINY_SIZES if options.tiny else SIZES)
        for num_strangers in (0, options.strangers)
    ]
    found: dict[tuple[int, int], list[rendezvous_crowd.Met]] = {case: [] for case in cases}
    failures: list[str] = []
    for _ in range(options.repeats):
        for case in cases:
            try:
                found[case].append(rendezvous_crowd.run(*case))
            except CollectiveError as error:
                failures.append(f"{case[0]} ranks, {case[1]} strangers: {error}")
    rows = []
    for (size, num_strangers), runs in found.items():
        totals = [run.join + run.meet + run.gather for run in runs] or [float("nan")]
        phases = [[getattr(run, phase) for run in runs] for phase in ("join", "meet", "gather")]
        rows.append(
            [
                f"{size:,}",
                f"{num_strangers}",
                f"{sum(run.attacks for run in runs)}",
                f"{options.repeats - len(runs)} of {options.repeats}",
                *(f"{median(seconds):.2f}" if seconds else "" for seconds in [*phases, totals]),
                f"{max(totals):.2f}",
            ]
        )
    harness.print_table(
        f"rendezvous: seconds, median of {options.repeats} runs",
        ["ranks", "strangers", "attacks", "failed", "join", "synchronize", "gather", "sum", "max sum"],
        rows,
    )
    for failure in failures:
        print(failure)


if __name__ == "__main__":
    main()
