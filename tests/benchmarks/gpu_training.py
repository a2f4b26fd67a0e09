"""Training on a CUDA device: rows/s of one rank against a plain PyTorch loop, by precision, offload and
reader.

Runs without Spark: the package's writer writes the shards, and one rank trains in this process. The plain
loop holds its batches in pinned host memory and copies each one when needed. Offload is compared with the
plain loop without offload. Without a CUDA device it prints a message and measures nothing.

    python tests/benchmarks/gpu_training.py
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import harness
import torch
from read_rate import array_data, write
from torch.nn import functional

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.optimizers.registry import make_optimizer
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest, open_reader

BATCH = 8192
SPEC = ModelSpec("mlp", {"in_features": harness.DIM, "hidden": [2048] * 4, "out_features": 1})
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEVICE = "cuda:0"

Pair = tuple[torch.Tensor, torch.Tensor]


class Case(NamedTuple):
    """Settings of a training."""

    precision: Any
    offload: Any
    reader: str
    compile: bool = False


CASES = (
    Case("fp32", "none", "arrow"),
    Case("fp32", "none", "petastorm"),
    Case("bf16", "none", "arrow"),
    Case("fp16", "none", "arrow"),
    Case("bf16", "host", "arrow"),
    Case("bf16", "none", "arrow", compile=True),
)


def worker_rate(manifest: ShardManifest, folder: Path, case: Case) -> float:
    """Returns rows/s of the last epoch of `train_worker` on one rank."""
    config = TrainConfig(
        shards_uri=manifest.uri,
        run_uri=str(folder / f"run-{uuid.uuid4().hex}"),
        task="regression",
        model=SPEC.to_json(),
        losses=("mse",),
        input_columns=("features",),
        label_columns=("label",),
        batch_size=BATCH,
        epochs=2,
        use_gpu=True,
        precision=case.precision,
        activation_offload=case.offload,
        reader=case.reader,
        compile=case.compile,
    )
    return manifest.num_rows / train_here(config, device=DEVICE).history[-1].seconds


def bare_rate(batches: list[Pair], precision: str) -> float:
    """Returns rows/s of the second epoch of a plain PyTorch loop."""
    torch.manual_seed(0)
    module = SPEC.build().to(DEVICE)
    optimizer = make_optimizer("adamw", module.parameters(), 1e-3, 0.0)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")

    def epoch() -> None:
        for pair in batches:
            features, label = (t.to(DEVICE, non_blocking=True) for t in pair)
            optimizer.zero_grad()
            with torch.autocast("cuda", DTYPES[precision], enabled=precision != "fp32"):
                output = module(features)
            scaler.scale(functional.mse_loss(output.float().squeeze(-1), label)).backward()
            scaler.step(optimizer)
            scaler.update()
        torch.cuda.synchronize()

    epoch()
    return sum(len(label) for _, label in batches) / harness.seconds_of(epoch)


def main() -> None:
    """Measures every case and the plain loop of its precision in interleaved rounds."""
    options = harness.parse(__doc__, rows=(1_000_000, BATCH * 2))
    if not torch.cuda.is_available():
        print("gpu_training: skipped, there is no CUDA device here")
        return
    with tempfile.TemporaryDirectory() as name:
        data = dict(array_data(options.rows).data)
        data["label"] = data["features"][:, 0] - data["features"][:, 1] * data["features"][:, 2]
        manifest = write(data, Path(name) / "shards")
        batches = [
            (torch.tensor(batch["features"]).pin_memory(), torch.tensor(batch["label"]).pin_memory())
            for batch in open_reader(manifest, batch_size=BATCH, engine="arrow").batches(0)
        ]
        cases: dict[str, Callable[[], float]] = {}
        for precision in DTYPES:
            cases[f"plain {precision}"] = partial(bare_rate, batches, precision)
        for case in CASES:
            cases[f"{case}"] = partial(worker_rate, manifest, Path(name), case)
        rates = harness.measure_in_turns(cases, options.repeats)
    harness.print_table(
        f"gpu_training: {torch.cuda.get_device_name()}, {SPEC.kwargs}, batch {BATCH:,}",
        ["precision, offload, reader", "rows/s", "plain loop", "ratio"],
        [
            [
                ", ".join(case[:3]) + (", compiled" if case.compile else ""),
                f"{median(rates[f'{case}']):,.0f}",
                f"{median(rates[f'plain {case.precision}']):,.0f}",
                f"{harness.median_ratio(rates[f'{case}'], rates[f'plain {case.precision}']):.2f}",
            ]
            for case in CASES
        ],
    )


if __name__ == "__main__":
    main()
