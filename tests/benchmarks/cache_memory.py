"""Memory per rank and rows/s for each `cache`, with 4 times as much data as memory.

Every case trains in a separate process, whose memory check gets `--given-mib` as the available memory. The
check rejects "memory", so this cache is measured again without the limit.

- own: largest growth of the process's anonymous memory, sampled every 5 ms.
- mapped: largest growth of mapped file pages; the kernel reclaims these when memory is short.
- check: the minimum that the memory check computes, in bytes.

    python tests/benchmarks/cache_memory.py --given-mib 256
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import harness
import numpy as np
import read_rate

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.memory import pressure
from ringspark.estimators.memory.available import Available
from ringspark.estimators.training.history import read_history
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

MIB = 1 << 20
TIMES = 4  # available memory
ROW_GROUP_ROWS = 1024  # A rank holds up to 96 row groups besides its cache.
MODEL = ModelSpec("linear", {"in_features": harness.DIM, "out_features": 1})
CASES = [("none", True), ("auto", True), ("disk", True), ("memory", True), ("memory", False)]


class Peaks:
    """Largest growth of anonymous memory and of mapped file pages while open, in bytes."""

    def __init__(self) -> None:
        self._before, self.own, self.mapped = self._now(), 0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            own, mapped = self._now()
            self.own, self.mapped = (
                max(self.own, own - self._before[0]),
                max(self.mapped, mapped - self._before[1]),
            )

    @staticmethod
    def _now() -> tuple[int, int]:
        text = Path("/proc/self/status").read_text()
        own, mapped = (
            1024 * int(found[1]) for found in re.finditer(r"^Rss(?:Anon|File):\s+(\d+)", text, re.MULTILINE)
        )
        return own, mapped


def train(shards: str, cache: Any, given: int | None, epochs: int) -> dict[str, Any]:
    """Trains in this process with `given` bytes of available memory. Returns the measured values."""
    with tempfile.TemporaryDirectory() as folder:
        # The libraries allocate memory at their first use, which is not part of the cache.
        train_here(replace(_config(f"{shards}-few", "none", 1), run_uri=f"{folder}/first"))
        config = replace(_config(shards, cache, epochs), run_uri=f"{folder}/run")
        if given is not None:
            pressure.find_process_limit = lambda: Available(num_bytes=given, source="given")
        with Peaks() as peaks:
            try:
                result = train_here(config)
            except ValueError as error:
                return {"refused": str(error)}
        history = read_history(result.run_uri)
    said = pressure.worker_needs(config, UserObjects(), ShardManifest.load(shards))
    # The first epoch fills the cache.
    first, *later = [record.rows / record.seconds for record in history]
    return {
        "own": peaks.own,
        "mapped": peaks.mapped,
        "said": sum(said.values()),
        "first": first,
        "later": median(later),
    }


def _config(shards: str, cache: Any, epochs: int) -> TrainConfig:
    return TrainConfig(
        shards_uri=shards,
        run_uri="",
        task="regression",
        losses=("mse",),
        input_columns=("features",),
        label_columns=("label",),
        model=MODEL.to_json(),
        batch_size=8192,
        epochs=epochs,
        reader="arrow",
        cache=cache,
        checkpoint_every_seconds=0,
    )


def main() -> None:
    """Writes the data, runs every case in a new process, and prints the table."""
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(train(**json.loads(sys.argv[2]))))
        return
    args = harness.parse(__doc__, given_mib=(256, 24), epochs=(3, 2))
    given = args.given_mib * MIB
    rows = TIMES * given // (4 * harness.DIM + 4)
    values = np.random.default_rng(0).random((rows, harness.DIM), dtype=np.float32)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        data = {"features": values, "label": values[:, 0]}
        read_rate.write(data, Path(folder) / "shards", row_group_rows=ROW_GROUP_ROWS)
        read_rate.write({name: part[:1000] for name, part in data.items()}, Path(folder) / "shards-few")
        for cache, is_limited in CASES:
            case = {"shards": f"{folder}/shards", "cache": cache, "epochs": args.epochs}
            case["given"] = given if is_limited else None
            command = [sys.executable, __file__, "--case", json.dumps(case)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            lines.append(_line(cache, is_limited, given, json.loads(done.stdout.splitlines()[-1])))
    harness.print_table(
        f"cache_memory: {rows:,} rows, {TIMES * args.given_mib} MiB, rank limit "
        f"{args.given_mib} MiB; {args.epochs} epochs, batches of 8192, linear network",
        ["cache", "own MiB", "of limit", "mapped MiB", "check MiB", "rows/s, epoch 1", "later epochs"],
        lines,
    )


def _line(cache: str, is_limited: bool, given: int, found: dict[str, Any]) -> list[str]:
    name = cache if is_limited else f"{cache}, without the limit"
    if "refused" in found:
        print(f"{name}: {found['refused']}")
        return [name, "refused", "-", "-", "-", "-", "-"]
    sizes = [f"{found[part] / MIB:.0f}" for part in ("mapped", "said")]
    rates = [f"{found[part]:,.0f}" for part in ("first", "later")]
    return [name, f"{found['own'] / MIB:.0f}", f"{found['own'] / given:.2f}", *sizes, *rates]


if __name__ == "__main__":
    main()
