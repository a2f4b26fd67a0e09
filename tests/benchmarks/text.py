"""Text classification of docstrings by package: two networks against TF-IDF with logistic regression.

The texts are the docstrings of Python's standard library, from the 20 packages with the most. Metrics are
accuracy and macro-F1 on a held-out fifth of each split. The networks get byte pairs that `train_tokenizer`
learned from the training texts, the first 128 per text: a linear head on the mean of their embeddings, and a
transformer of one block. Scikit-learn's regression gets all words, and cross-validation over the training
texts chooses the best of three penalties; the networks' settings are fixed. Seconds include training, scoring
and tokenizing.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from statistics import mean
from typing import TYPE_CHECKING, Any

import harness

import docstrings
from ringspark.estimators import TorchClassifier
from ringspark.jobs import cli
from ringspark.models import ModelSpec
from ringspark.pipelines import Tokens, train_tokenizer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = list[tuple[str, str]]

LENGTH = 128
PENALTIES = [1.0, 10.0, 100.0]
# Network -> its sizes (without sizes of the data), learning rate, weight decay.
NETWORKS: dict[str, tuple[dict[str, Any], float, float]] = {
    "embedding_mean": ({"dim": 128, "dropout": 0.5}, 1e-2, 0.1),
    "transformer_classifier": (
        {"dim": 64, "depth": 1, "num_heads": 4, "max_seq_len": LENGTH, "dropout": 0.3},
        3e-3,
        0.1,
    ),
}


def ours(
    name: str, train: Rows, test: Rows, spark: SparkSession, folder: str, options: Namespace
) -> list[str]:
    """Returns the packages of the test rows that a network predicts."""
    schema = "package string, text string"
    rows = spark.createDataFrame(train, schema).coalesce(harness.NUM_WORKERS)
    tokens = Tokens.of(train_tokenizer(rows, "text"), max_length=LENGTH)
    sizes, rate, decay = NETWORKS[name]
    classes = len({package for package, _ in train})
    model = TorchClassifier(
        model=ModelSpec(name, sizes | {"vocab_size": tokens.num_ids, "out_features": classes}),
        featuresCol="text",
        labelCol="package",
        columns={"text": tokens},
        epochs=options.epochs,
        batchSize=64,
        lrSchedule="one_cycle",
        learningRate=rate,
        weightDecay=decay,
        numWorkers=harness.NUM_WORKERS,
        inferenceBatchSize=256,
        storageUri=folder,
        showProgress=False,
    ).fit(rows)
    # One partition keeps the order.
    scored = model.transform(spark.createDataFrame(test, schema).coalesce(1))
    return [row.predictedLabel for row in scored.select("predictedLabel").collect()]


def theirs(train: Rows, test: Rows, options: Namespace) -> list[str]:
    """Returns the packages of the test rows that scikit-learn predicts."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline

    search = GridSearchCV(
        make_pipeline(TfidfVectorizer(sublinear_tf=True), LogisticRegression(max_iter=1000)),
        {"logisticregression__C": PENALTIES[: options.penalties]},
        cv=3,
        n_jobs=harness.NUM_WORKERS,
    )
    search.fit([text for _, text in train], [package for package, _ in train])
    return [str(found) for found in search.predict([text for _, text in test])]


def main() -> None:
    """Trains all models on every split, then prints the means."""
    from sklearn.metrics import f1_score
    from sklearn.model_selection import train_test_split

    options = harness.parse(__doc__, repeats=(3, 1), packages=(20, 3), epochs=(12, 1), penalties=(3, 1))
    rows = docstrings.rows(options.packages)
    results: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, cli.spark("ringspark text", harness.MASTER) as spark:
        contenders = {
            "TF-IDF, logistic regression": lambda train, test: theirs(train, test, options),
            **{
                name: lambda train, test, name=name: ours(name, train, test, spark, folder, options)
                for name in NETWORKS
            },
        }
        for seed in range(1, options.repeats + 1):
            packages = [package for package, _ in rows]
            train, test = train_test_split(rows, test_size=0.2, stratify=packages, random_state=seed)
            wanted = [package for package, _ in test]
            for name, contender in contenders.items():
                start = time.perf_counter()
                found = contender(train, test)
                seconds = time.perf_counter() - start
                accuracy = mean(a == b for a, b in zip(found, wanted, strict=True))
                scores = accuracy, float(f1_score(wanted, found, average="macro")), seconds
                results.setdefault(name, []).append(scores)
                print(f"split {seed}, {name}: {accuracy:.4f}, {scores[1]:.4f}, {seconds:.1f} s", flush=True)
    means = {name: [mean(values) for values in zip(*scores, strict=True)] for name, scores in results.items()}
    reference = next(iter(means.values()))
    harness.print_table(
        f"{len(rows):,} docstrings of {options.packages} packages, {options.repeats} splits, "
        f"{options.epochs} epochs: means",
        ["", "accuracy", "macro-F1", "seconds", "errors / regression", "seconds / regression"],
        [
            [
                name,
                *(f"{value:.4f}" for value in values[:2]),
                f"{values[2]:.1f}",
                f"{(1 - values[0]) / (1 - reference[0]):.2f}",
                f"{values[2] / reference[2]:.1f}",
            ]
            for name, values in means.items()
        ],
    )


if __name__ == "__main__":
    main()
