"""Hierarchical all-reduce on two hosts with two workers each: traffic between the hosts and step time.

The workers of a host share memory, and a link of 100 Mbit/s connects the hosts, shaped inside network
namespaces of this machine. Each compression is applied between all workers and between the hosts, in
interleaved rounds in one gang. Bytes are counted at the first host's network interface, for both its workers.

    OMP_NUM_THREADS=1 make bench ARGS="two_levels"
"""

from __future__ import annotations

from typing import Any

import compression
import harness
from links import link_refusal

NAMES = ("none", "powersgd, rank 2", "topk, 1 %", "sign", "fp16")


def main() -> None:
    """Measures steps over a shaped link, by compression and by its level."""
    options = harness.parse(__doc__, steps=(5, 1), gangs=(2, 1), rows=(32, 2), compressors=(len(NAMES), 1))
    if reason := link_refusal():
        print(f"two_levels: skipped, no shaped links: {reason}")
        return
    cases: dict[str, Any] = {}
    for name in NAMES[: options.compressors]:
        value = compression.COMPRESSIONS[name]
        given = {"name": value} if isinstance(value, str) else value
        cases[name] = given
        cases[f"{name}, between hosts"] = {**given, "between": "hosts"}
    size = sum(p.numel() for p in compression.SPEC.build().parameters())
    harness.print_table(
        f"two_levels: a step of {size:,} parameters by two workers on each of two hosts, {options.rows} rows "
        f"each, median of {options.steps}; bytes of the first host's network interface",
        ["", "ms", "speedup", "bytes sent", "bytes, 1 /"],
        compression.step_times(cases, options, rates=(100,), ranks=2),
    )


if __name__ == "__main__":
    main()
