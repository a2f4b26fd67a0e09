"""Latency of 1, 8 and 64 rows: eager torch, ONNX Runtime and AOTInductor, one thread each.

Two networks: the MLP of the other benchmarks, and the network that a table of 30 columns gets. "network" is
the time of the network on arrays. "rows to predictions" is the time of the model that MLflow serves, from a
pandas DataFrame of raw rows to a DataFrame of predictions. A value is the mean of many calls.
"""

from __future__ import annotations

import os

# Before the libraries are imported, which read it.
os.environ["OMP_NUM_THREADS"] = "1"

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch

from ringspark.estimators import TorchClassifier, TorchRegressor
from ringspark.jobs import cli

EAGER = "network, eager"
SIZES = (1, 8, 64)


def milliseconds(call: Callable[[], object], calls: int) -> float:
    """Returns the mean time of one call."""
    return 1e3 * harness.seconds_of(lambda: [call() for _ in range(calls)]) / calls


def cases(stage: Any, frame: Any, folder: Path, rows: int) -> dict[str, Callable[[], object]]:
    """Returns a call per case, for the first rows of a pandas DataFrame."""
    from ringspark.extras.serving.plain import load
    from ringspark.extras.serving.plain.network import load_network

    served = load(str(folder / "served"))
    raw = frame.iloc[:rows]
    arrays, problems = served._read(raw)
    assert not problems
    tensors = [torch.from_numpy(array) for array in arrays]
    module, run = stage.module(), load_network(str(folder / "served"), "onnx")
    compiled = None
    if (folder / "compiled.pt2").exists():
        from torch._inductor import aoti_load_package

        compiled = aoti_load_package(str(folder / "compiled.pt2"))

    def eager() -> object:
        with torch.inference_mode():
            return module(*tensors)

    found: dict[str, Callable[[], object]] = {EAGER: eager, "network, ONNX Runtime": partial(run, arrays)}
    if compiled is not None:
        found["network, AOTInductor"] = partial(compiled, *tensors)
        torch.testing.assert_close(compiled(*tensors), eager(), rtol=1e-3, atol=1e-3)
    found["rows to predictions"] = partial(served.predict, raw)
    return found


def main() -> None:
    """Trains both networks for a moment, exports them, and measures in interleaved rounds."""
    options = harness.parse(__doc__, rows=(20_000, 400), calls=(200, 2))
    torch.set_num_threads(1)
    lines = []
    with (
        tempfile.TemporaryDirectory() as name,
        cli.spark("ringspark bench serving", harness.MASTER) as spark,
    ):
        import mixed_table

        from ringspark.extras.serving.served_folder import write_served

        common = {"storageUri": f"{name}/runs", "showProgress": False, "epochs": 1}
        table, plain = mixed_table.make(spark, options.rows), harness.random_frame(spark, 1_000)
        models = {
            "MLP": (TorchRegressor(model=harness.MLP, **common).fit(plain), plain),
            "table": (TorchClassifier(**common).fit(table), table),
        }
        for number, (title, (stage, frame)) in enumerate(models.items()):
            folder = Path(name, str(number))
            write_served(stage, folder / "served", "onnx")
            # Compiling takes a minute, which the tests have not.
            if shutil.which("g++") and not options.tiny:
                stage.export(str(folder / "compiled.pt2"), format="aotinductor")
            few = frame.drop("label").limit(max(SIZES)).toPandas()
            for rows in SIZES:
                calls = {
                    case: partial(milliseconds, call, options.calls)
                    for case, call in cases(stage, few, folder, rows).items()
                }
                times = harness.measure_in_turns(calls, options.repeats)
                lines += [
                    [
                        f"{title}, {rows} rows: {case}",
                        *(f"{value:.3f}" for value in (median(values), min(values))),
                        f"{harness.median_ratio(values, times[EAGER]):.2f}",
                    ]
                    for case, values in times.items()
                ]
    harness.print_table(
        f"serving_latency: milliseconds, one thread, {options.repeats} rounds of {options.calls} calls",
        ["", "median", "min", "ratio to eager"],
        lines,
    )


if __name__ == "__main__":
    main()
