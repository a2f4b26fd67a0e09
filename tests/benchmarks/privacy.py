"""Private training: epsilon, noise, an audit by canaries, time against the plain training, and quality.

The flights' inputs are encoded by public numbers only: schedule, carrier, airport, and the weather, which is
public too. Nothing is fitted on the rows. The training rows are a random share of months 1 to 8, and the test
rows are month 9.

    OMP_NUM_THREADS=1 python tests/benchmarks/privacy.py --chart docs/privacy.png
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import harness
import numpy as np
import torch

from ringspark.estimators import Privacy
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.checkpoint.weights import load_checkpoint
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
DELTA = 1e-6
BATCH = 1024
HIDDEN, BUCKETS = 64, 64


def main() -> None:
    sizes = {"rows": (20_000, 3000), "epochs": (8, 2), "audits": (2, 1), "steps": (10, 2)}
    parser = harness.parser(__doc__, **sizes)
    parts = ("accountants", "noise", "audit", "time", "quality")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="parts to run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        calls = (
            compare_accountants,
            partial(measure_noise, folder),
            partial(audit, folder, options.audits),
            partial(compare_time, folder, options.repeats, options.steps),
            partial(measure_quality, folder, options.rows, options.epochs, options.chart),
        )
        for part, call in zip(parts, calls, strict=True):
            if part in options.only:
                call()


def compare_accountants() -> None:
    """Prints the largest difference of epsilon from opacus and dp-accounting over 30 settings."""
    from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant
    from opacus.accountants import RDPAccountant

    from ringspark.extras.privacy.ledger import compute_epsilon

    whole = tuple(range(2, 64))
    settings = [(s, q, n) for s in (0.8, 1.0, 1.5, 2.5, 4.0) for q in (0.001, 0.01, 0.1) for n in (10, 1000)]
    found: dict[str, list[float]] = {"opacus": [], "dp-accounting, whole orders": []}
    for sigma, rate, steps in settings:
        opacus = RDPAccountant()
        opacus.history = [(sigma, rate, steps)]
        own = compute_epsilon(((sigma, rate, steps),), DELTA, "rdp")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the best order may be the largest
            found["opacus"].append(abs(own - opacus.get_epsilon(DELTA)))
        google = RdpAccountant(orders=whole)
        google.compose(SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps))
        own = compute_epsilon(((sigma, rate, steps),), DELTA, "rdp", orders=whole)
        found["dp-accounting, whole orders"].append(abs(own - google.get_epsilon(DELTA)))
    one = compute_epsilon(((4.0, 1.0, 1),), 1e-5, "rdp")
    lines = [[name, str(len(values)), f"{max(values):.1e}"] for name, values in found.items()]
    title = f"Epsilon (q = 1, sigma = 4, one step, delta 1e-5: {one:.5f})"
    harness.print_table(title, ["compared with", "settings", "largest difference"], lines)


def measure_noise(folder: Path) -> None:
    """Prints the variance of the noise on the summed gradient, with 1, 2 and 3 ranks."""
    from private_shards import columns, noise_of_steps, privacy
    from written_shards import written

    noisy, lines = privacy(noise_multiplier=1.3, max_grad_norm=0.5), []
    manifest = written(folder / "noise", columns())
    for workers in (1, 2, 3):
        place = folder / f"noise-{workers}"
        place.mkdir()
        moves = noise_of_steps(manifest, place, noisy, workers, "torch" if workers > 1 else "local")
        lines.append([str(workers), f"{moves.numel():,}", f"{float(moves.var()):.4f}", f"{0.65**2:.4f}"])
    harness.print_table(
        "Noise on the summed gradient, sigma 1.3, C 0.5",
        ["ranks", "numbers", "variance", "(sigma C)^2"],
        lines,
    )


def audit(folder: Path, trainings: int) -> None:
    """Prints the lower bound of epsilon that canaries give, with noise and without."""
    from canaries import attack, bound_epsilon

    from ringspark.extras.privacy import passes

    def silence(shape: Sequence[int], deviation: float, generator: Any) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=torch.float64)

    lines = []
    for epsilon in (1.0, 2.0, 4.0):
        promise = Privacy(epsilon=epsilon, delta=1e-5, max_grad_norm=1.0)
        bounds = []
        for name in ("noisy", "silent"):
            place = folder / f"audit-{epsilon}-{name}"
            with patch.object(passes, "normal_noise", silence if name == "silent" else passes.normal_noise):
                inside, outside = attack(place, promise, trainings)
            bounds.append(bound_epsilon(inside, outside, promise.delta))
        lines.append([f"{epsilon:g}", str(len(inside) + len(outside)), *(f"{bound:.2f}" for bound in bounds)])
    harness.print_table(
        "Audit: lower bound of epsilon at 95 % confidence",
        ["promised epsilon", "canaries", "with noise", "noise switched off"],
        lines,
    )


def compare_time(folder: Path, repeats: int, steps: int) -> None:
    """Prints rows per second of private and plain trainings on one rank, in interleaved rounds."""
    from written_shards import written

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


def measure_quality(folder: Path, rows: int, epochs: int, chart: str | None) -> None:
    """Prints, and draws, the ROC AUC of month 9 by epsilon."""
    from sklearn.metrics import roc_auc_score
    from written_shards import written

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
        load_checkpoint(result.checkpoint_uri, network)
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
    if chart is not None:
        draw(chart, {epsilon: auc for epsilon, (_, auc) in found.items()})


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


def draw(path: str, scores: dict[float, float]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    private = {epsilon: auc for epsilon, auc in scores.items() if math.isfinite(epsilon)}
    axes.plot(list(private), list(private.values()), "o-", color="tab:blue", label="private")
    axes.axhline(scores[math.inf], color="0.35", linestyle=":", label="without privacy")
    axes.set(xscale="log", xlabel="epsilon", ylabel="ROC AUC of month 9")
    axes.set_xticks(list(private), [f"{epsilon:g}" for epsilon in private])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    print(f"chart: {path}")


if __name__ == "__main__":
    main()
