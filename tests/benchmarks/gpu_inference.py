"""Batched inference on a CUDA device: rows/s of `Predictor` against a plain PyTorch loop.

Runs without Spark: it measures the part of a `transform` task between decoding the rows and encoding the
results. The plain loop copies each batch to the device and its outputs back, as fp32. Without a CUDA device
it prints a message and measures nothing.

    python tests/benchmarks/gpu_inference.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import harness
import numpy as np
import torch

from ringspark.estimators.inference.predictor import Predictor
from ringspark.models import ModelSpec

BATCH_SIZES = (2048, 65_536)
SPECS = {
    "MLP 32-128-128-1": harness.MLP,
    "MLP 32-2048-2048-2048-1": ModelSpec(
        "mlp", {"in_features": harness.DIM, "hidden": [2048] * 3, "out_features": 1}
    ),
}
DEVICE = "cuda:0"


def predictor_rate(spec: ModelSpec, batch_size: int, features: np.ndarray[Any, Any]) -> float:
    """Returns rows/s of `Predictor`."""
    predictor = Predictor(
        model=spec.to_json(),
        weights_uri="",
        weights_id="",
        feeds=(),
        results=None,  # type: ignore[arg-type]  # only the forward passes run
        output_widths=(1,),
        batch_size=batch_size,
        use_gpu=True,
    )
    module = spec.build().to(DEVICE).eval()
    return len(features) / harness.seconds_of(lambda: predictor.predict(module, [features], DEVICE))


def plain_rate(spec: ModelSpec, batch_size: int, features: np.ndarray[Any, Any]) -> float:
    """Returns rows/s of a plain PyTorch loop."""
    module = spec.build().to(DEVICE).eval()

    def loop() -> None:
        with torch.inference_mode():
            for batch in torch.from_numpy(features).split(batch_size):
                module(batch.to(DEVICE)).cpu()

    return len(features) / harness.seconds_of(loop)


def main() -> None:
    """Measures each network and batch size in interleaved rounds."""
    options = harness.parse(__doc__, rows=(4_000_000, 70_000))
    if not torch.cuda.is_available():
        print("gpu_inference: skipped, there is no CUDA device here")
        return
    features = np.random.default_rng(0).random((options.rows, harness.DIM), dtype=np.float32)
    cases: dict[str, Callable[[], float]] = {}
    for name, spec in SPECS.items():
        for size in BATCH_SIZES:
            cases[f"plain {name} {size}"] = partial(plain_rate, spec, size, features)
            cases[f"{name} {size}"] = partial(predictor_rate, spec, size, features)
    rates = harness.measure_in_turns(cases, options.repeats)
    rows = []
    for name in SPECS:
        for size in BATCH_SIZES:
            own, plain = rates[f"{name} {size}"], rates[f"plain {name} {size}"]
            ratio = f"{harness.median_ratio(own, plain):.2f}"
            rows.append([f"{name}, {size:,}", f"{median(own):,.0f}", f"{median(plain):,.0f}", ratio])
    harness.print_table(
        f"gpu_inference: {torch.cuda.get_device_name()}, {options.rows:,} rows x {harness.DIM} fp32",
        ["network, rows per pass", "rows/s", "plain loop", "ratio"],
        rows,
    )


if __name__ == "__main__":
    main()
