"""Transformer training on a CUDA device: tokens/s and peak memory against a plain PyTorch loop.

Runs without Spark: the package's writer writes the shards, and one rank trains in this process. Both have the
same network, autocast, checkpointing, optimizer and batches; the plain loop has its batches in host memory.
Without a CUDA device it prints a message, measures nothing and ignores `--rows`.

    python tests/benchmarks/gpu_transformer.py
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import harness
import numpy as np
import torch
from read_rate import write
from torch.nn import functional

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.history import read_history
from ringspark.estimators.training.optimizers.registry import make_optimizer
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models import ModelSpec, apply_activation_checkpoint
from ringspark.pipelines import ShardManifest, open_reader

SEQ_LEN, VOCAB, BATCH = 512, 8192, 32
SPEC = ModelSpec(
    "transformer_lm",
    {"vocab_size": VOCAB, "max_seq_len": SEQ_LEN, "dim": 768, "depth": 12, "num_heads": 12},
)
# Precision and checkpointing of each case.
CASES = (("fp32", "none"), ("bf16", "none"), ("bf16", "sqrt"), ("bf16", "all"))


def write_tokens(folder: Path, rows: int) -> ShardManifest:
    """Writes random sequences, `ids` (SEQ_LEN,), and the `next` token at each position."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, size=(rows, SEQ_LEN + 1), dtype=np.int64)
    return write({"ids": tokens[:, :-1], "next": tokens[:, 1:]}, folder)


def worker_rate(
    manifest: ShardManifest, folder: Path, device: str, peaks: dict[str, list[int]], case: tuple[str, str]
) -> float:
    """Returns tokens/s of the second epoch of `train_worker` on one rank."""
    run_uri = folder / f"run-{uuid.uuid4().hex}"
    config = TrainConfig(
        shards_uri=manifest.uri,
        run_uri=str(run_uri),
        model=SPEC.to_json(),
        losses=("cross_entropy",),
        input_columns=("ids",),
        label_columns=("next",),
        batch_size=BATCH,
        epochs=2,
        reader="arrow",
        use_gpu=True,
        precision=case[0],  # type: ignore[arg-type]
        gradient_checkpointing=case[1],
    )
    torch.cuda.reset_peak_memory_stats()
    train_here(config, device=device)
    peaks.setdefault(f"{case}", []).append(torch.cuda.max_memory_allocated())
    return manifest.num_rows * SEQ_LEN / read_history(str(run_uri))[-1].seconds


def bare_rate(
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    device: str,
    peaks: dict[str, list[int]],
    case: tuple[str, str],
) -> float:
    """Returns tokens/s of the second epoch of a plain PyTorch loop."""
    precision, checkpointing = case
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    module = apply_activation_checkpoint(SPEC.build().to(device), checkpointing)
    optimizer = make_optimizer("adamw", module.parameters(), 1e-3, 0.0)

    def epoch() -> None:
        for ids, following in batches:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                logits = module(ids.to(device, non_blocking=True))
            loss = functional.cross_entropy(logits.float(), following.to(device, non_blocking=True))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        torch.cuda.synchronize()

    epoch()
    rate = sum(ids.numel() for ids, _ in batches) / harness.seconds_of(epoch)
    peaks.setdefault(f"bare {case}", []).append(torch.cuda.max_memory_allocated())
    return rate


def main() -> None:
    """Measures every case and its plain loop in interleaved rounds."""
    options = harness.parse(__doc__, rows=(1024, 64))
    if not torch.cuda.is_available():
        print("gpu_transformer: skipped, there is no CUDA device here")
        return
    device, peaks = "cuda:0", dict[str, list[int]]()
    with tempfile.TemporaryDirectory() as name:
        manifest = write_tokens(Path(name) / "shards", options.rows)
        reader = open_reader(manifest, batch_size=BATCH, engine="arrow")
        batches = [
            tuple(torch.tensor(batch[key]).pin_memory() for key in ("ids", "next"))
            for batch in reader.batches(0)
        ]
        cases: dict[str, Callable[[], float]] = {}
        for case in CASES:
            cases[f"bare {case}"] = partial(bare_rate, batches, device, peaks, case)  # type: ignore[arg-type]
            cases[f"{case}"] = partial(worker_rate, manifest, Path(name), device, peaks, case)
        rates = harness.measure_in_turns(cases, options.repeats)
    harness.print_table(
        f"gpu_transformer: {torch.cuda.get_device_name()}, {SPEC.kwargs}, batch {BATCH}",
        ["precision, checkpointing", "tokens/s", "bare", "ratio", "peak GiB", "bare"],
        [
            [
                ", ".join(case),
                f"{median(rates[f'{case}']):,.0f}",
                f"{median(rates[f'bare {case}']):,.0f}",
                f"{harness.median_ratio(rates[f'{case}'], rates[f'bare {case}']):.2f}",
                f"{max(peaks[f'{case}']) / 2**30:.2f}",
                f"{max(peaks[f'bare {case}']) / 2**30:.2f}",
            ]
            for case in CASES
        ],
    )


if __name__ == "__main__":
    main()
