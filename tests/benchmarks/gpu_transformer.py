"""Transformer training on a CUDA device: tokens/s and peak memory against a plain PyTorch loop.

Runs without Spark: the package's writer writes the shards, and one rank trains in this process. Both have the
same network, autocast, checkpointing, optimizer and batches; the plain loop has its batches in host memory.
Without a CUDA device it prints a message, measures nothing and ignores `--rows`.

    python tests/benchmarks/gpu_transformer.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import harness
import numpy as np
import torch
from check.part import Setup
from check.shards import read_batches, train
from check.workloads import Batch, Workload, plain_rate
from written_shards import written

from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

SEQ_LEN, VOCAB, BATCH = 512, 8192, 32
SPEC = ModelSpec(
    "transformer_lm",
    {"vocab_size": VOCAB, "max_seq_len": SEQ_LEN, "dim": 768, "depth": 12, "num_heads": 12},
)
WORK = Workload(spec=SPEC, rows=BATCH, shape=(SEQ_LEN,), vocabulary=VOCAB, classes=VOCAB)
# Precision and checkpointing of each case.
CASES = (("fp32", "none"), ("bf16", "none"), ("bf16", "sqrt"), ("bf16", "all"))
DEVICE = "cuda:0"


def write_tokens(folder: Path, rows: int) -> ShardManifest:
    """Writes random sequences, `ids` (SEQ_LEN,), and the `next` token at each position."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, size=(rows, SEQ_LEN + 1), dtype=np.int64)
    return written(folder, {"ids": tokens[:, :-1], "next": tokens[:, 1:]}, row_group_rows=None, num_files=4)


def worker_rate(manifest: ShardManifest, setup: Setup, precision: str, checkpointing: str) -> float:
    """Returns tokens/s of the second epoch of `train_worker` on one rank."""
    settings = {"task": "any", "precision": precision, "gradient_checkpointing": checkpointing}
    history = train(manifest, WORK, setup, epochs=2, **settings).history
    return manifest.num_rows * SEQ_LEN / history[-1].seconds


def bare_rate(batches: list[Batch], precision: str, checkpointing: str) -> float:
    """Returns tokens/s of the second epoch of a plain PyTorch loop."""
    return SEQ_LEN * plain_rate(WORK, batches, DEVICE, precision, checkpointing)


def with_peak(peaks: list[int], call: Callable[..., float], *arguments: object) -> float:
    torch.cuda.reset_peak_memory_stats()
    rate = call(*arguments)
    peaks.append(torch.cuda.max_memory_allocated())
    return rate


def main() -> None:
    """Measures every case and its plain loop in interleaved rounds."""
    options = harness.parse(__doc__, rows=(1024, 64))
    if not torch.cuda.is_available():
        print("gpu_transformer: skipped, there is no CUDA device here")
        return
    peaks: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as name:
        setup = Setup(device=DEVICE, is_tiny=False, is_short=False, folder=Path(name))
        manifest = write_tokens(setup.folder / "shards", options.rows)
        batches = read_batches(manifest, BATCH)
        cases: dict[str, Callable[[], float]] = {}
        for case in CASES:
            for key, call in (
                (f"bare {', '.join(case)}", partial(bare_rate, batches)),
                (", ".join(case), partial(worker_rate, manifest, setup)),
            ):
                cases[key] = partial(with_peak, peaks.setdefault(key, []), call, *case)
        rates = harness.measure_in_turns(cases, options.repeats)
    rows = []
    for case in CASES:
        names = [f"bare {', '.join(case)}", ", ".join(case)]
        lines = harness.rate_rows({name: rates[name] for name in names}, names[0])
        rows += [[*line, f"{max(peaks[name]) / 2**30:.2f}"] for name, line in zip(names, lines, strict=True)]
    harness.print_table(
        f"gpu_transformer: {torch.cuda.get_device_name()}, {SPEC.kwargs}, batch {BATCH}",
        ["precision, checkpointing", "tokens/s", "lowest", "highest", "ratio", "peak GiB"],
        rows,
    )


if __name__ == "__main__":
    main()
