"""Private training: quality by epsilon, and time against the plain training.

The flights' inputs are encoded by public numbers only: schedule, carrier, airport, and the weather, which is
public too. Nothing is fitted on the rows. The training rows are a random share of months 1 to 8, and the test
rows are month 9.

    OMP_NUM_THREADS=1 python tests/benchmarks/privacy.py
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import harness
import numpy as np
import torch
from written_shards import written

from ringspark.estimators import Privacy
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.checkpoint.weights import map_checkpoint
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
DELTA = 1e-6
BATCH = 1024
HIDDEN, BUCKETS = 64, 64


def main() -> None:
    """Prints both tables."""
    parser = harness.parser(__doc__, rows=(20_000, 3000), epochs=(8, 2), steps=(40, 2))
    parser.add_argument("--only", choices=("quality", "time"), help="one of the tables")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if options.only != "time":
            measure_quality(Path(place), options.rows, options.epochs)
        if options.only != "quality":
            compare_time(Path(place), options.repeats, options.steps)


def compare_time(folder: Path, repeats: int, steps: int) -> None:
    """Prints rows per second of private and plain trainings on one rank, in interleaved rounds."""
    rng = np.random.default_rng(0)
    rows = steps * 1024
    label = rng.normal(size=rows).astype("f4")
    text = ModelSpec(
        "transformer_classifier",
        {"vocab_size": 100, "max_seq_len": 32, "dim": 64, "depth": 2, "num_heads": 4, "out_features": 1},
    )
    cases = {
        "MLP 32-128-128-1": (harness.MLP, rng.normal(size=(rows, 32)).astype("f4"), 1024),
        "transformer, 2 x 64, 32 tokens": (text, rng.integers(0, 100, (rows // 32, 32)), 256),
    }
    lines = []
    for number, (title, (spec, x, batch)) in enumerate(cases.items()):
        manifest = written(folder / f"time-{number}", {"x": x, "y": label[: len(x)]}, row_group_rows=4096)
        config = make_config(manifest, spec, min(batch, len(x)), 1, folder / f"time-run-{number}")
        config = replace(config, task="regression", losses=("mse",))
        private = replace(config, privacy=Privacy(noise_multiplier=1.0, delta=DELTA, max_grad_norm=1.0))
        rates = harness.measure_in_turns(
            {"plain": partial(rate_of, config), "private": partial(rate_of, private)}, repeats
        )
        lines += [[title, *line] for line in harness.rate_rows(rates, "plain")]
    header = ["network", "training", "rows/s", "lowest", "highest", "ratio"]
    harness.print_table("Time on one rank, one thread", header, lines)


def make_config(manifest: ShardManifest, spec: ModelSpec, batch: int, epochs: int, run: Path) -> TrainConfig:
    return TrainConfig(
        shards_uri=manifest.uri,
        run_uri=str(run),
        model=spec.to_json(),
        input_columns=("x",),
        label_columns=("y",),
        task="classification",
        losses=("bce_with_logits",),
        batch_size=batch,
        learning_rate=2e-3,
        epochs=epochs,
        reader="arrow",
        log_every_steps=0,
    )


def rate_of(config: TrainConfig) -> float:
    with tempfile.TemporaryDirectory() as run:
        (epoch,) = train_here(replace(config, run_uri=run)).history
    return epoch.rows / epoch.seconds


def measure_quality(folder: Path, rows: int, epochs: int) -> None:
    """Prints the ROC AUC of month 9 by epsilon."""
    from sklearn.metrics import roc_auc_score

    x, y, month = encode_flights()
    train = np.random.default_rng(0).permutation(np.flatnonzero(month <= 8))[:rows]
    test = np.flatnonzero(month == 9)
    manifest = written(folder / "flights", {"x": x[train], "y": y[train]}, row_group_rows=4096)
    spec = ModelSpec("mlp", {"in_features": x.shape[1], "hidden": [HIDDEN], "out_features": 1})
    found: dict[float, tuple[float, float]] = {}
    for epsilon in (*EPSILONS, math.inf):
        batch = min(BATCH, len(train) // 4)
        config = make_config(manifest, spec, batch, epochs, folder / f"flights-{epsilon}")
        if math.isfinite(epsilon):
            config = replace(config, privacy=Privacy(epsilon=epsilon, delta=DELTA, max_grad_norm=1.0))
        result = train_here(config)
        network = spec.build().eval()
        map_checkpoint(result.checkpoint_uri, network)
        with torch.no_grad():
            logits = network(torch.from_numpy(x[test])).squeeze(1).numpy()
        sigma = result.privacy.charged[0][0] if result.privacy else 0.0
        found[epsilon] = sigma, float(roc_auc_score(y[test], logits))
    lines = [[f"{epsilon:g}", f"{sigma:.3f}", f"{auc:.4f}"] for epsilon, (sigma, auc) in found.items()]
    harness.print_table(
        f"Flights: {len(train):,} training rows, {epochs} epochs, delta {DELTA:g}",
        ["epsilon", "sigma", "AUC of month 9"],
        lines,
    )


def encode_flights() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns inputs (rows, columns) in fp32, labels and months, by public numbers only."""
    import pandas as pd

    import flights

    tables = flights.find_raw_tables()
    rows = pd.read_csv(tables["flights"]).dropna(subset=["arr_delay"])
    weather = pd.read_csv(tables["weather"]).drop_duplicates(["origin", "time_hour"])
    names = ["temp", "humid", "wind_speed", "precip", "visib", "pressure"]
    rows = rows.merge(weather[["origin", "time_hour", *names]], on=["origin", "time_hour"], how="left")
    rows[names] = rows[names].fillna({"temp": 55, "pressure": 1015, "visib": 10}).fillna(0)
    carriers = sorted(pd.read_csv(tables["airlines"])["carrier"])
    airports = sorted(pd.read_csv(tables["airports"])["faa"])
    day = pd.to_datetime(rows[["year", "month", "day"]]).dt.day_of_week
    groups = [
        (rows["carrier"].map({name: i for i, name in enumerate(carriers)}), len(carriers)),
        (rows["origin"].map({"EWR": 0, "JFK": 1, "LGA": 2}), 3),
        (rows["dest"].map({name: i % BUCKETS for i, name in enumerate(airports)}).fillna(0), BUCKETS),
        (rows["hour"], 24),
        (day, 7),
    ]
    parts = [np.eye(size, dtype="f4")[codes.to_numpy("i8")] for codes, size in groups]
    scaled = pd.DataFrame(
        {
            "distance": rows["distance"] / 2500,
            "temp": (rows["temp"] - 55) / 20,
            "humid": (rows["humid"] - 60) / 20,
            "wind": rows["wind_speed"] / 20 - 0.5,
            "rain": 10 * rows["precip"],
            "fog": 1 - rows["visib"] / 10,
            "pressure": (rows["pressure"] - 1015) / 10,
        }
    )
    x = np.concatenate([*parts, scaled.to_numpy("f4").clip(-3, 3)], axis=1)
    label = (rows["arr_delay"] > flights.LATE_MINUTES).to_numpy("f4")
    return x, label, rows["month"].to_numpy()


if __name__ == "__main__":
    main()
