"""Hyperparameter search: 40 trials on flights, against random search in Spark; and killed drivers.

All searches sample the same space of one network, and train on a sample of months 1 to 8. A trial's value is
the ROC AUC of month 9. "random" samples from the seed alone, so its trials with and without pruning differ
only in length. Spark's TrainValidationSplit fits the settings of "random". It holds out equally many rows,
but at random because it accepts no split column, and trains the best settings again on all rows. A
CrossValidator of k folds takes about k times as long. The last column is the best model's ROC AUC on a sample
of months 10 to 12, which no search has seen. Then a population, and random search with the same number of
epochs, change only learning rate and dropout of the estimator's network.

The last table is a smaller search whose driver is killed at `--kills` random moments and restarted, against
an undisturbed search. The trials must be the same, with no value lost and none counted twice.

    make bench ARGS="search"
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
from pyspark.ml import PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.tuning import TrainValidationSplit
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import flights
from ringspark.estimators import TorchClassifier
from ringspark.extras.search import Choice, OptunaSearch, PopulationSearch, Uniform
from ringspark.jobs import cli
from ringspark.models import ModelSpec

PARALLELISM = 2
SEED = 11
SPACE = {
    "learningRate": Uniform(1e-4, 1e-1, log=True),
    "weightDecay": Uniform(1e-4, 1e-1, log=True),
    "batchSize": Choice([256, 512, 1024]),
    "model.hidden": Choice([[32], [128, 64], [256, 128]]),
    "model.dropout": Uniform(0.0, 0.5),
}
# Settings that a training can change between two rounds.
CHANGEABLE = {name: SPACE[name] for name in ("learningRate", "model.dropout")}
VALUE = "validation_auroc"


def samples(spark: SparkSession, root: Path, rows: int, folder: Path) -> tuple[Path, Path]:
    """Writes a sample of months 1 to 9 and a sample of the later months, with the features of the demo."""
    raw = flights.unpack_raw_tables(folder / "raw")
    labelled = flights.label_rows(flights.join_tables(flights.read_tables(spark, raw)))
    features = PipelineModel.load(str(root / "features"))
    # A hash selects the rows, so they are the same in each run.
    drawn = labelled.withColumn("draw", F.pmod(F.xxhash64(*flights.KEYS), F.lit(300_000))).where(
        F.col("draw") < rows
    )
    encoded = features.transform(drawn).select(
        "categorical", "numeric", "label", (F.col("split") == "validation").alias("held"), "split"
    )
    encoded.write.parquet(str(folder / "all"))
    kept = spark.read.parquet(str(folder / "all"))
    for name, condition in (("train", "split != 'test'"), ("test", "split = 'test'")):
        kept.where(condition).drop("split").repartition(4, "label", "held").write.parquet(str(folder / name))
    return folder / "train", folder / "test"


def estimator(root: Path, folder: Path, epochs: int) -> TorchClassifier:
    """Returns the demo's estimator with one ensemble member, without the searched settings."""
    cardinalities, num_numeric = flights.feature_sizes(PipelineModel.load(str(root / "features")))
    spec = {
        "cardinalities": cardinalities,
        "num_numeric": num_numeric,
        "hidden": [128, 64],
        "out_features": 1,
        "dropout": 0.4,
    }
    return TorchClassifier(
        model=ModelSpec("tabular", spec),
        loss="bce_with_logits",
        metrics=["auroc"],
        inputCols=["categorical", "numeric"],
        optimizer="adamw",
        epochs=epochs,
        validationIndicatorCol="held",
        storageUri=str(folder / "store"),
        showProgress=False,
    )


def search(trainer: TorchClassifier, trials: int, **params: Any) -> OptunaSearch:
    """Returns a search of `SPACE`."""
    return OptunaSearch(
        **{
            "estimator": trainer,
            "space": SPACE,
            "monitor": VALUE,
            "numTrials": trials,
            "parallelism": PARALLELISM,
            "sampler": "random",
            "pruner": "none",
            "seed": SEED,
        }
        | params
    )


def settings_of(trial: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a line of `trials`, which has lists as JSON."""
    values = {name: trial[name] for name in SPACE}
    return {name: json.loads(value) if isinstance(value, str) else value for name, value in values.items()}


def by_spark(trainer: TorchClassifier, rows: DataFrame, drawn: list[dict[str, Any]]) -> Any:
    """Runs Spark's search over the same settings. Returns its result."""
    trainer = trainer.copy()
    trainer.clear(trainer.validationIndicatorCol)
    trainer.clear(trainer.metrics)
    maps = []
    for params in drawn:
        spec = {
            name.removeprefix("model."): value for name, value in params.items() if name.startswith("model.")
        }
        model = trainer.getModel()
        maps.append(
            {trainer.getParam(name): value for name, value in params.items() if not name.startswith("model.")}
            | {trainer.model: ModelSpec(model.target, model.kwargs | spec)}
        )
    evaluator = BinaryClassificationEvaluator(rawPredictionCol="probability")
    return TrainValidationSplit(
        estimator=trainer,
        estimatorParamMaps=maps,
        evaluator=evaluator,
        trainRatio=8 / 9,
        parallelism=PARALLELISM,
        seed=SEED,
    ).fit(rows)


def in_an_own_driver(root: Path, folder: Path, options: list[str]) -> subprocess.Popen[bytes]:
    """Starts the search to be killed in a new process."""
    return subprocess.Popen([sys.executable, __file__, "--driver", str(root), str(folder), *options])


def driver(root: Path, folder: Path, epochs: int, trials: int) -> None:
    """Runs the search to be killed, in a driver process."""
    with cli.spark("search", harness.MASTER) as spark:
        trainer = estimator(root, folder, epochs)
        model = search(trainer, trials, runUri=str(folder / "search")).fit(
            spark.read.parquet(str(folder / "train"))
        )
        (folder / "trials.json").write_text(model.trials.to_json(orient="records", double_precision=15))


def killed(root: Path, folder: Path, options: Any, undisturbed: Any) -> list[str]:
    """Kills the driver at random moments of one search. Returns a line of the table."""
    moments = random.Random(SEED)
    began = time.perf_counter()
    arguments = [str(options.short_epochs), str(options.short_trials)]
    trials = folder / "search" / "trials"
    for _ in range(options.kills):
        process = in_an_own_driver(root, folder, arguments)
        try:
            known = set(trials.glob("*"))
            # The session has started, and trials of this driver train.
            while not set(trials.glob("*")) - known and process.poll() is None:
                time.sleep(0.05)
            time.sleep(moments.uniform(0.0, 6.0))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    if in_an_own_driver(root, folder, arguments).wait():
        raise SystemExit("the search that was begun again failed")
    seconds = time.perf_counter() - began
    found = {row["number"]: row for row in json.loads((folder / "trials.json").read_text())}
    wanted = undisturbed.trials.set_index("number")
    if sorted(found) != list(wanted.index) or {row["state"] for row in found.values()} != {"complete"}:
        raise SystemExit(f"trials were lost or not complete: {sorted(found)}")
    largest = max(abs(found[number]["value"] - wanted["value"][number]) for number in found)
    return [
        f"driver killed {options.kills} times, {options.short_epochs} epochs",
        f"{len(found)} of {options.short_trials}",
        f"{largest:.1e}",
        f"{seconds:.0f}",
    ]


def main() -> None:
    """Runs the searches one after another, and prints two tables."""
    if sys.argv[1:2] == ["--driver"]:
        root, folder, epochs, trials = sys.argv[2:]
        driver(Path(root), Path(folder), int(epochs), int(trials))
        return
    options = harness.parse(
        __doc__,
        rows=(12_000, 3_000),
        epochs=(9, 3),
        trials=(40, 3),
        members=(8, 2),
        kills=(2, 1),
        short_epochs=(3, 2),
        short_trials=(8, 3),
    )
    root = harness.flights_root(options)
    lines: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with cli.spark("search", harness.MASTER) as spark:
            train, test = samples(spark, root, options.rows, folder)
            rows, later = spark.read.parquet(str(train)), spark.read.parquet(str(test))
            trainer = estimator(root, folder, options.epochs)
            judge = BinaryClassificationEvaluator(rawPredictionCol="probability")
            # Not measured, because the first fit of a session starts its processes.
            search(estimator(root, folder, 1), 2).fit(rows)
            first = 0.0

            def line(title: str, fit: Callable[[], Any], epochs_of: Callable[[Any], str]) -> Any:
                nonlocal first
                start = time.perf_counter()
                found = fit()
                seconds = time.perf_counter() - start
                first = first or seconds
                values = found.trials["value"] if hasattr(found, "trials") else found.validationMetrics
                lines.append(
                    [
                        title,
                        epochs_of(found),
                        f"{seconds:.0f}",
                        f"{seconds / first:.2f}",
                        f"{max(value for value in values if value == value):.4f}",
                        f"{judge.evaluate(found.transform(later)):.4f}",
                    ]
                )
                print(lines[-1], flush=True)
                return found

            def epochs_of(found: Any) -> str:
                return f"{int(found.trials['epochs'].sum())}"

            plain = line("random, none", partial(search(trainer, options.trials).fit, rows), epochs_of)
            drawn = [settings_of(trial) for trial in plain.trials.to_dict(orient="records")]
            for sampler, pruner in (("random", "median"), ("random", "halving"), ("tpe", "median")):
                made = search(trainer, options.trials, sampler=sampler, pruner=pruner)
                line(f"{sampler}, {pruner}", partial(made.fit, rows), epochs_of)
            epochs = f"{(options.trials + 1) * options.epochs}"
            line("TrainValidationSplit", lambda: by_spark(trainer, rows, drawn), lambda _: epochs)
            few = search(trainer, options.members, space=CHANGEABLE)
            line(f"random, {options.members} trials of 2 settings", partial(few.fit, rows), epochs_of)
            grown = PopulationSearch(
                estimator=trainer,
                space=CHANGEABLE,
                monitor=VALUE,
                population=options.members,
                parallelism=PARALLELISM,
                seed=SEED,
            )
            line(
                f"population of {options.members}, the same settings",
                partial(grown.fit, rows),
                lambda found: f"{int(found.trials.groupby('member')['epochs'].max().sum())}",
            )
            short = estimator(root, folder, options.short_epochs)
            undisturbed = search(short, options.short_trials).fit(rows)
        harness.print_table(
            f"search: {options.trials} trials of {options.epochs} epochs, {PARALLELISM} in parallel",
            [
                "search",
                "epochs trained",
                "seconds",
                "ratio",
                "best ROC AUC, held out",
                "ROC AUC, later months",
            ],
            lines,
        )
        harness.print_table(
            "search: killed drivers",
            ["search", "trials complete", "largest value difference", "seconds"],
            [killed(root, folder, options, undisturbed)],
        )


if __name__ == "__main__":
    main()
