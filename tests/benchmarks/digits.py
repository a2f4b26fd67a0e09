"""Digits with Pipeline and CrossValidator: accuracy against scikit-learn's MLPClassifier.

Five random splits of scikit-learn's 1,797 digits into 1,437 and 360 rows. Both networks have two hidden
layers of 64. Our network has dropout 0.2, and cross-validation over the training rows chooses the best of
three learning rates. MLPClassifier gets the best of the same rates and of three L2 penalties, with the same
number of folds, and trains until its loss stops falling.
"""

from __future__ import annotations

import tempfile
import warnings
from argparse import Namespace
from statistics import mean
from typing import TYPE_CHECKING, Any

import harness
import numpy as np

from ringspark.estimators import TorchClassifier
from ringspark.jobs import cli
from ringspark.models import ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HIDDEN = [64, 64]
RATES = [1e-3, 3e-3, 1e-2]
PENALTIES = [1e-4, 1e-2, 1.0]  # the first is MLPClassifier's default


def frame(spark: SparkSession, x: Any, y: Any) -> DataFrame:
    """Returns a DataFrame with one column per pixel."""
    rows = [(*map(float, pixels), float(label)) for pixels, label in zip(x, y, strict=True)]
    names = [f"p{i}" for i in range(x.shape[1])]
    return spark.createDataFrame(rows, ", ".join(f"{name} double" for name in (*names, "label")))


def ours(
    train: DataFrame, test: DataFrame, folder: str, seed: int, options: Namespace
) -> tuple[float, float]:
    """Returns the test accuracy, and the learning rate that cross-validation chose."""
    from pyspark.ml import Pipeline
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.feature import VectorAssembler
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    pixels = [name for name in train.columns if name != "label"]
    network = TorchClassifier(
        model=ModelSpec(
            "mlp", {"in_features": len(pixels), "hidden": HIDDEN, "out_features": 10, "dropout": 0.2}
        ),
        epochs=options.epochs,
        batchSize=64,
        lrSchedule="one_cycle",
        weightDecay=1e-2,
        numWorkers=2,
        seed=seed,
        storageUri=folder,
        showProgress=False,
    )
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy")
    search = CrossValidator(
        estimator=network,
        estimatorParamMaps=ParamGridBuilder().addGrid(network.learningRate, RATES[: options.rates]).build(),
        evaluator=accuracy,
        numFolds=options.folds,
        seed=seed,
    )
    fitted = Pipeline(stages=[VectorAssembler(inputCols=pixels, outputCol="features"), search]).fit(train)
    best = int(np.argmax(fitted.stages[-1].avgMetrics))
    return accuracy.evaluate(fitted.transform(test)), RATES[best]


def theirs(train: tuple[Any, Any], test: tuple[Any, Any], seed: int, options: Namespace) -> tuple[float, str]:
    """Returns the test accuracy of an MLPClassifier of the same size, and the chosen parameters."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import GridSearchCV
    from sklearn.neural_network import MLPClassifier

    search = GridSearchCV(
        MLPClassifier(HIDDEN, max_iter=500, random_state=seed),
        {"learning_rate_init": RATES[: options.rates], "alpha": PENALTIES[: options.rates]},
        cv=options.folds,
    )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        accuracy = float(search.fit(*train).score(*test))
    return accuracy, "rate {learning_rate_init:g}, penalty {alpha:g}".format(**search.best_params_)


def main() -> None:
    """Trains both networks on every split, then prints the accuracies."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    options = harness.parse(__doc__, epochs=(40, 1), rates=(len(RATES), 1), folds=(3, 2))
    x, y = load_digits(return_X_y=True)
    lines = []
    with tempfile.TemporaryDirectory() as folder, cli.spark("ringspark digits", harness.MASTER) as spark:
        for seed in range(options.repeats):
            parts = train_test_split(x / 16, y, test_size=0.2, stratify=y, random_state=seed)
            train, test = (parts[0], parts[2]), (parts[1], parts[3])
            accuracy, rate = ours(frame(spark, *train).cache(), frame(spark, *test), folder, seed, options)
            other, chosen = theirs(train, test, seed, options)
            lines.append((f"split {seed}", accuracy, other, f"rate {rate:g}", chosen))
            print(f"split {seed}: {accuracy:.4f} against {other:.4f}", flush=True)
    means = [mean(values) for values in zip(*(line[1:3] for line in lines), strict=True)]
    harness.print_table(
        f"digits: accuracy on 360 held-out digits, hidden layers {HIDDEN}, {options.epochs} epochs",
        ["", "ringspark", "MLPClassifier", "chosen by ringspark", "by MLPClassifier"],
        [[name, f"{a:.4f}", f"{b:.4f}", *chosen] for name, a, b, *chosen in lines]
        + [["mean", f"{means[0]:.4f}", f"{means[1]:.4f}", "", ""]],
    )


if __name__ == "__main__":
    main()
