"""Seconds and memory to plan an epoch of a million row groups, for one shard and for all shards.

One shard's plan is the work of a rank at the start of an epoch: the order of all row groups, and the reads of
its own range. All shards' plan does this for every shard in one process. The upper bound also keeps the reads
of all shards, which no program needs. Every run is a new process, so that runs share no memory. The growth of
the peak is counted from just before the plan, with the row counts in memory. Target: all shards in under 2 s
and 1 GiB.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import harness
import numpy as np

from ringspark.pipelines import plan_epoch

NUM_SHARDS = 1024
ROWS_PER_GROUP = 1000
ROWS_PER_SHARD = 32
MIB = 1 << 20
# Name -> (num_shards, number of shards to plan, keep the reads, shuffle).
CASES = {
    "one shard": (NUM_SHARDS, 1, False, True),
    "all shards": (NUM_SHARDS, NUM_SHARDS, False, True),
    "all shards, reads kept": (NUM_SHARDS, NUM_SHARDS, True, True),
    "one shard, file order": (NUM_SHARDS, 1, False, False),
    "the only shard": (1, 1, False, True),
}


def plan_shards(
    row_groups: int, num_shards: int, planned: int, keep: bool, shuffle: bool
) -> tuple[float, float, int]:
    """Plans in this process. Returns (seconds, growth of the peak in MiB, reads)."""
    sizes = np.full(row_groups, ROWS_PER_GROUP, dtype=np.int64)
    plan_epoch(sizes[:100], num_shards=1, batch_size=1, epoch=0, seed=0).shard(0).reads()  # a warm-up
    before, start = _peak_bytes(), time.perf_counter()
    plan = plan_epoch(
        sizes, num_shards=num_shards, batch_size=ROWS_PER_SHARD * num_shards, epoch=0, seed=0, shuffle=shuffle
    )
    kept, num_reads = [], 0
    for shard in range(planned):
        reads = plan.shard(shard).reads()
        num_reads += len(reads)
        if keep:
            kept.append(reads)
    seconds = time.perf_counter() - start
    return seconds, (_peak_bytes() - before) / MIB, num_reads


def _peak_bytes() -> int:
    """Returns the peak of this program alone. `ru_maxrss` would begin at the peak of the parent process."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def in_fresh_process(row_groups: int, case: str) -> tuple[float, float, int]:
    """Runs `plan_shards` for one case in a new process."""
    output = subprocess.run(
        [sys.executable, __file__, "--case", case, str(row_groups)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    seconds, mib, reads = json.loads(output)
    return seconds, mib, reads


def main() -> None:
    """Runs every case once per round."""
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(plan_shards(int(sys.argv[3]), *CASES[sys.argv[2]])))
        return
    options = harness.parse(__doc__, row_groups=(1_000_000, 2_000))
    runs: dict[str, list[tuple[float, float, int]]] = {case: [] for case in CASES}
    for _ in range(options.repeats):
        for case, results in runs.items():
            results.append(in_fresh_process(options.row_groups, case))
    lines = []
    for case, results in runs.items():
        seconds, mib, reads = zip(*results, strict=True)
        lines.append(
            [
                case,
                *(f"{value:.3f}" for value in (median(seconds), min(seconds), max(seconds))),
                f"{max(mib):.0f}",
                f"{reads[0]:,}",
            ]
        )
    harness.print_table(
        f"plan_scale: {options.row_groups:,} row groups of {ROWS_PER_GROUP} rows, {NUM_SHARDS} shards, "
        f"{options.repeats} runs",
        ["", "median s", "min", "max", "peak growth MiB", "reads"],
        lines,
    )


if __name__ == "__main__":
    main()
