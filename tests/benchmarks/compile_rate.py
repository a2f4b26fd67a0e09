"""The setting `compile` on the CPU: rows/s of one rank with and without it, and the compile time.

One rank trains from real shards without Spark, on one thread. The rate is the rate of the median step after
the first epoch, when everything is compiled. "compilation, s" is the time by which the first epoch was longer
than the last one with an empty disk cache of torch. "from the cache, s" is the same after another training
has filled the cache. A process imports torch's compiler before its first network, and a host compiles its
headers once; the title has both times. "steps to break even" is the compile time with an empty cache, divided
by the seconds saved per step.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import harness
import numpy as np
import torch
from efficiency import SEQ_LEN, SPEC, VOCAB, StepClock
from read_rate import write

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network, its precision, and its steps per epoch."""

    name: str
    spec: ModelSpec
    precision: Any
    batch_size: int
    steps: int


def cases_of(options: Any) -> list[Case]:
    """Returns the networks, sorted by their time."""
    few = max(3, options.steps // 10)
    transformer: dict[str, Any] = {"spec": SPEC, "batch_size": 32, "steps": max(3, few // 2)}
    mlp: dict[str, Any] = {"spec": harness.MLP, "precision": "fp32"}
    return [
        Case(name="MLP, 1,024 rows", batch_size=1024, steps=10 * few, **mlp),
        Case(name="MLP, 8,192 rows", batch_size=8192, steps=2 * few, **mlp),
        Case(name="transformer, 32 rows, fp32", precision="fp32", **transformer),
        Case(name="transformer, 32 rows, bf16", precision="bf16", **transformer),
    ]


def data_of(case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the rows of one epoch."""
    draw, rows = np.random.default_rng(0), case.batch_size * case.steps
    if case.spec is SPEC:
        ids = draw.integers(0, VOCAB, size=(rows, SEQ_LEN), dtype=np.int64)
        return {"x": ids, "y": ids[:, 0] % 2}
    x = draw.random((rows, harness.DIM), dtype=np.float32)
    return {"x": x, "y": x[:, 0] - x[:, 1] * x[:, 2]}


def rate(case: Case, manifest: ShardManifest, folder: Path, extra: list[float], *, compiles: bool) -> float:
    """Returns rows/s, and records by how many seconds the first epoch was longer than the last."""
    is_classifier = case.spec is SPEC
    config = TrainConfig(
        shards_uri=manifest.uri,
        run_uri=str(folder / f"run-{uuid.uuid4().hex}"),
        task="classification" if is_classifier else "regression",
        model=case.spec.to_json(),
        losses=("cross_entropy" if is_classifier else "mse",),
        input_columns=("x",),
        label_columns=("y",),
        batch_size=case.batch_size,
        epochs=3,
        precision=case.precision,
        reader="arrow",
        compile=compiles,
    )
    clock = folder / f"clock-{uuid.uuid4().hex}"
    first, *_, last = train_here(config, UserObjects(callbacks=(StepClock(clock),))).history
    extra.append(first.seconds - last.seconds)
    return case.batch_size / float(clock.read_text())


def measure(case: Case, folder: Path, repeats: int) -> list[str]:
    """Measures one line of the table."""
    manifest = write(data_of(case), folder / f"shards-{uuid.uuid4().hex}")
    extra: dict[bool, list[float]] = {False: [], True: []}
    turns: dict[str, Callable[[], float]] = {
        name: partial(rate, case, manifest, folder, extra[compiles], compiles=compiles)
        for name, compiles in (("plain", False), ("compiled", True))
    }
    # The warm-up round also fills the cache.
    rates = harness.measure_in_turns(turns, repeats)
    plain, compiled = median(rates["plain"]), median(rates["compiled"])
    usual = median(extra[False])
    cold, warm = extra[True][0] - usual, median(extra[True][1:]) - usual
    won = case.batch_size * (1 / plain - 1 / compiled)
    return [
        case.name,
        f"{plain:,.0f}",
        f"{compiled:,.0f}",
        f"{harness.median_ratio(rates['compiled'], rates['plain']):.2f}",
        f"{cold:.1f}",
        f"{warm:.1f}",
        f"{cold / won:,.0f}" if won > 0 else "never",
    ]


def main() -> None:
    """Measures each network with and without compilation, in interleaved rounds."""
    parser = harness.parser(__doc__, steps=(100, 2))
    parser.add_argument("--only", default="", metavar="TEXT", help="networks whose name holds this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [case for case in cases_of(options) if options.only in case.name]
    with tempfile.TemporaryDirectory() as name:
        if not options.tiny:
            # As on a host that has not compiled anything.
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(name) / "cache")
        ready = harness.seconds_of(lambda: torch.compile(torch.sin)(torch.ones(8)))
        rows = [measure(case, Path(name), options.repeats) for case in (cases[:1] if options.tiny else cases)]
    harness.print_table(
        f"compile_rate: one rank, one thread, {options.repeats} rounds; compiler startup {ready:.1f} s",
        [
            "network, step",
            "rows/s",
            "compiled",
            "ratio",
            "compilation, s",
            "from the cache, s",
            "steps to break even",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
