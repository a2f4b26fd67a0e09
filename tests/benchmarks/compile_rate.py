"""What the setting `compile` gives on the CPU: rows/s of one rank without and with it, and what it costs.

One rank trains from real shards without Spark, on one thread. The rate is that of the last epoch, when all is
compiled; the cost is what the first epoch took longer than the last one, with an empty cache of torch's
compiler, as a new worker has it. "Steps to win it back" is that cost by the seconds won per step.
"""

from __future__ import annotations

import math
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
from read_rate import write

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

SEQ_LEN, VOCAB = 64, 512
TRANSFORMER = ModelSpec(
    "transformer_classifier",
    {
        "vocab_size": VOCAB,
        "max_seq_len": SEQ_LEN,
        "dim": 128,
        "depth": 4,
        "num_heads": 4,
        "out_features": 2,
    },
)
MODES: dict[str, dict[str, Any]] = {"plain": {}, "compiled": {"compile": True}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network, the rows of its steps, and the columns that it trains on."""

    name: str
    spec: ModelSpec
    batch_size: int
    steps: int
    changes: dict[str, Any]


def data_of(case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """The rows of one epoch."""
    draw, rows = np.random.default_rng(0), case.batch_size * case.steps
    if case.spec is TRANSFORMER:
        ids = draw.integers(0, VOCAB, size=(rows, SEQ_LEN), dtype=np.int64)
        return {"x": ids, "y": ids[:, 0] % 2}
    x = draw.random((rows, harness.DIM), dtype=np.float32)
    return {"x": x, "y": x[:, 0] - x[:, 1] * x[:, 2]}


def rate(case: Case, manifest: ShardManifest, folder: Path, costs: list[float], mode: str) -> float:
    """Rows/s of the last epoch; notes how much longer the first one took."""
    # As on a worker that has compiled nothing yet.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"cache-{uuid.uuid4().hex}")
    is_classifier = case.spec is TRANSFORMER
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
        reader="arrow",
        **case.changes,
        **MODES[mode],
    )
    first, *_, last = train_here(config).history
    costs.append(first.seconds - last.seconds)
    return manifest.num_rows / last.seconds


def main() -> None:
    """Measures each network plain and compiled, in turns."""
    options = harness.parse(__doc__, steps=(40, 2))
    torch.set_num_threads(1)
    tiny = options.tiny
    cases = [
        Case(name="MLP, 1,024 rows", spec=harness.MLP, batch_size=1024, steps=10 * options.steps, changes={}),
        Case(name="MLP, 8,192 rows", spec=harness.MLP, batch_size=8192, steps=options.steps, changes={}),
        Case(
            name="transformer, 32 rows",
            spec=TRANSFORMER,
            batch_size=32,
            steps=math.ceil(options.steps / 4),
            changes={},
        ),
        Case(
            name="transformer, 32 rows, bf16",
            spec=TRANSFORMER,
            batch_size=32,
            steps=math.ceil(options.steps / 4),
            changes={"precision": "bf16"},
        ),
    ]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for number, case in enumerate(cases[:1] if tiny else cases):
            manifest = write(data_of(case), Path(name) / f"shards-{number}")
            costs: dict[str, list[float]] = {mode: [] for mode in MODES}
            turns: dict[str, Callable[[], float]] = {
                mode: partial(rate, case, manifest, Path(name), costs[mode], mode) for mode in MODES
            }
            rates = harness.measure_in_turns(turns, options.repeats, warm_ups=0)
            plain, compiled = (median(rates[mode]) for mode in MODES)
            cost = median(costs["compiled"]) - median(costs["plain"])
            won = case.batch_size * (1 / plain - 1 / compiled)
            rows.append(
                [
                    case.name,
                    f"{plain:,.0f}",
                    f"{compiled:,.0f}",
                    f"{harness.median_ratio(rates['compiled'], rates['plain']):.2f}",
                    f"{cost:.1f}",
                    f"{cost / won:,.0f}" if won > 0 else "never",
                ]
            )
    harness.print_table(
        f"compile_rate: one rank, one thread, {options.repeats} rounds",
        ["network, step", "rows/s", "compiled", "ratio", "compilation, s", "steps to win it back"],
        rows,
    )


if __name__ == "__main__":
    main()
