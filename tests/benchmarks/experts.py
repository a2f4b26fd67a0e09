"""Mixtures of experts: loss against a dense network of equal FLOPs, dropped tokens and load balance.

Causal language models over the bytes of Python's docstrings, cut into rows; every tenth text is held out. In
every second block, 8 experts replace the MLP. With top-1 routing an expert is as wide as the MLP, with top-2
half as wide. So each byte costs the same operations as in the MLP, plus the router. The operations are those
of a forward pass without dropped tokens, because the history counts them only in the first batch, which drops
the most. The loss is measured on the held-out rows after the last epoch, in bits per byte, as a mean over
`--repeats` seeds. All networks train with the same settings. `--networks 4` adds one that drops no tokens.

    OMP_NUM_THREADS=1 make bench ARGS="experts --chart docs/experts.png"
"""

from __future__ import annotations

import math
import tempfile
from argparse import Namespace
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import harness
import pandas as pd
import torch

import docstrings
from ringspark.estimators import TorchEstimator
from ringspark.extras.planning.layers import count_layers
from ringspark.jobs import cli
from ringspark.models import ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LENGTH = 128  # bytes per row
DIM, DEPTH = 64, 2
MIXTURE: dict[str, Any] = {"num_experts": 8}
# Name -> options of the experts.
NETWORKS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "Switch, 1 of 8": {**MIXTURE, "router": "switch"},
    "GShard, 2 of 8": {**MIXTURE, "router": "gshard", "mlp_dim": 2 * DIM},
    "Switch, nothing dropped": {**MIXTURE, "router": "switch", "capacity_factor": None},
}


def rows(options: Namespace) -> list[tuple[list[int], list[int], bool]]:
    """Returns bytes, the bytes after them, and the held-out mask."""
    texts = [text.encode() for _, text in docstrings.rows(options.packages)]
    found = []
    for held in (False, True):
        # A zero byte ends each text.
        chosen = [text for number, text in enumerate(texts) if (number % 10 == 0) == held]
        joined = b"\0".join(chosen) + b"\0"
        starts = range(0, len(joined) - LENGTH, LENGTH)
        found += [(list(joined[i:][:LENGTH]), list(joined[i + 1 :][:LENGTH]), held) for i in starts]
    return found


def trained(
    frame: DataFrame, experts: dict[str, Any] | None, seed: int, folder: str, options: Namespace
) -> pd.DataFrame:
    """Returns the history of one training."""
    model = TorchEstimator(
        model=spec_of(experts),
        loss="cross_entropy",
        inputCols=["bytes"],
        labelCols=["next"],
        validationIndicatorCol="held",
        epochs=options.epochs,
        batchSize=16,
        optimizer="adamw",
        learningRate=3e-3,
        lrSchedule="one_cycle",
        weightDecay=0.1,
        seed=seed,
        numWorkers=harness.NUM_WORKERS,
        storageUri=folder,
        showProgress=False,
    ).fit(frame)
    history: pd.DataFrame = model.summary.history
    return history


def spec_of(experts: dict[str, Any] | None) -> ModelSpec:
    """The network with these experts, or the dense one."""
    sizes = {"vocab_size": 256, "max_seq_len": LENGTH, "dim": DIM, "depth": DEPTH, "num_heads": 4}
    return ModelSpec("transformer_lm", sizes | ({} if experts is None else {"experts": experts}))


def work_of(experts: dict[str, Any] | None) -> int:
    """Returns the operations of a forward pass over 16 rows, with an even load and no dropped tokens."""
    ids = torch.zeros(16, LENGTH, dtype=torch.int64)
    return sum(layer.work for layer in count_layers(spec_of(experts).build(), (ids,)).layers)


def main() -> None:
    """Trains all networks with every seed, prints two tables and draws the chart."""
    options = harness.parse(__doc__, repeats=(3, 1), packages=(10, 1), epochs=(8, 1), networks=(3, 2))
    networks = dict(list(NETWORKS.items())[: options.networks])
    histories: dict[str, list[pd.DataFrame]] = {name: [] for name in networks}
    nets = {name: spec_of(experts).build() for name, experts in networks.items()}
    with tempfile.TemporaryDirectory() as folder, cli.spark("ringspark experts", harness.MASTER) as spark:
        frame, count = frame_of(spark, options)
        for seed in range(options.repeats):
            for name, experts in networks.items():
                history = trained(frame, experts, seed, folder, options)
                histories[name].append(history)
                last = history.iloc[-1]
                print(f"seed {seed}, {name}: {bits(last.validation_loss):.4f} bits", flush=True)
    base = histories["dense"]
    harness.print_table(
        f"experts: {count:,} rows of {LENGTH} bytes, {options.epochs} epochs, {options.repeats} seeds",
        ["", "bits per byte, held out", "deviation", "below dense", "operations", "parameters", "seconds"],
        [
            [
                name,
                f"{mean(at_end(own, 'validation_loss', True)):.4f}",
                f"{deviation(at_end(own, 'validation_loss', True)):.4f}",
                f"{1 - mean(at_end(own, 'validation_loss')) / mean(at_end(base, 'validation_loss')):.2%}",
                f"{work_of(networks[name]) / work_of(None):.3f}",
                f"{sum(p.numel() for p in nets[name].parameters()):,}",
                f"{mean(at_end(own, 'seconds')) / mean(at_end(base, 'seconds')):.2f}",
            ]
            for name, own in histories.items()
        ],
    )
    mixtures = {name: own for name, own in histories.items() if name != "dense"}
    harness.print_table(
        f"experts, by epoch 1 to {options.epochs}, means over {options.repeats} seeds",
        ["", "dropped", "busiest expert", "balance loss"],
        [
            [name, *(by_epoch(own, column) for column in ("dropped_share", "expert_balance", "balance_loss"))]
            for name, own in mixtures.items()
        ],
    )
    if options.chart:
        draw(options.chart, histories)


def frame_of(spark: SparkSession, options: Namespace) -> tuple[DataFrame, int]:
    """Returns the rows as a DataFrame, and their number."""
    found = rows(options)
    schema = "bytes array<int>, next array<int>, held boolean"
    return spark.createDataFrame(found, schema).coalesce(harness.NUM_WORKERS).cache(), len(found)


def at_end(own: list[pd.DataFrame], column: str, as_bits: bool = False) -> list[float]:
    """Returns a column of the last epoch, by seed."""
    values = [float(history.iloc[-1][column]) for history in own]
    return [bits(value) for value in values] if as_bits else values


def bits(loss: float) -> float:
    return loss / math.log(2)


def deviation(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def by_epoch(own: list[pd.DataFrame], column: str) -> str:
    """Returns means of a training column over seeds, by epoch."""
    return "  ".join(
        f"{mean(values):.3f}" for values in zip(*(h[f"train_{column}"] for h in own), strict=True)
    )


def draw(path: str, histories: dict[str, list[pd.DataFrame]]) -> None:
    """Draws held-out bits, the dropped share and the busiest expert by epoch."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    columns = {
        "validation_loss": "bits per byte, held out",
        "train_dropped_share": "dropped share",
        "train_expert_balance": "busiest expert, 1 is even",
    }
    for axes, (column, label) in zip(panels, columns.items(), strict=True):
        for name, own in histories.items():
            if column not in own[0]:
                continue
            values = [mean(found) for found in zip(*(history[column] for history in own), strict=True)]
            shown = [bits(value) for value in values] if column == "validation_loss" else values
            axes.plot(range(1, len(shown) + 1), shown, "o-", label=name)
        axes.set(xlabel="epoch", ylabel=label)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=130)
    print(f"chart: {path}")


if __name__ == "__main__":
    main()
