"""Distillation: the table network of eight members teaches a network of one small member.

The rows are flights: a sample of the training months, and a sample of the test months. Each seed trains the
teacher, a student without a teacher, and the same student with the teacher. The cost of a network is the
number of floating-point operations per row, counted in evaluation mode.

    make bench ARGS="distillation"
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import harness
import torch
from pyspark.sql import functions as F
from sklearn.metrics import roc_auc_score
from torch.utils.flop_counter import FlopCounterMode

import flights
from ringspark.estimators import TorchClassifier
from ringspark.jobs import cli
from ringspark.models import ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SAMPLE = 1_000


def count_operations(model: Any) -> float:
    """Returns the floating-point operations per row of a table network."""
    network = model.module().eval()
    kwargs = model.getModel().kwargs
    numbers = torch.zeros(SAMPLE, len(kwargs["edges"]))
    ids = torch.zeros(SAMPLE, len(kwargs["cardinalities"]), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(numbers, ids)
    return float(counter.get_total_flops()) / SAMPLE


def sample(rows: DataFrame, size: int) -> DataFrame:
    """Returns about `size` of the rows, by a hash."""
    bucket = F.pmod(F.xxhash64(*flights.KEYS), F.lit(1_000_000))
    return rows.where(bucket < size * 1_000_000 // rows.count()).repartition(2).cache()


def main() -> None:
    """Trains three networks per seed, and prints their ROC AUC on the test months."""
    args = harness.parse(__doc__, repeats=(3, 1), rows=(12_000, 2_000), width=(192, 16), epochs=(8, 1))
    root = harness.flights_root(args)
    small = ModelSpec("tabpack", {"rates": [1.0], "dropouts": [0.1], "width": args.width})
    with cli.spark("distillation", harness.MASTER) as spark, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # columns that are left out
        train, test = (sample(spark.read.parquet(str(root / part)), args.rows) for part in ("train", "test"))
        estimator = TorchClassifier(
            labelCol="label",
            inputCols=[*flights.CATEGORICAL, *flights.NUMERIC],
            validationIndicatorCol="is_validation",
            epochs=args.epochs,
            alpha=0.9,
            showProgress=False,
        )

        def fit_all(maps: list[dict[str, Any]]) -> list[Any]:
            """Fits one model per map; the fits share one plan of the table."""
            params = [{estimator.getParam(name): value for name, value in one.items()} for one in maps]
            return [model for _, model in sorted(estimator.fitMultiple(train, params))]

        def judge(model: Any) -> float:
            found = model.transform(test).select("label", "probability").toPandas()
            return float(roc_auc_score(found["label"], [p[1] for p in found["probability"]]))

        seeds = range(args.repeats)
        first = [{"seed": seed} for seed in seeds]
        models = fit_all([*first, *({**one, "model": small} for one in first)])
        teachers, alone = models[: len(seeds)], models[len(seeds) :]
        students = fit_all(
            [{"seed": n, "model": small, "teacher": model} for n, model in enumerate(teachers)]
        )
        share = count_operations(students[0]) / count_operations(teachers[0])
        lines = [
            [str(seed), *(f"{judge(model):.4f}" for model in trio), f"{share:.3f}"]
            for seed, trio in enumerate(zip(teachers, alone, students, strict=True))
        ]
    title = "Distillation: ROC AUC on the test months, and the student's operations per row"
    header = ["seed", "teacher", "student alone", "student with teacher", "of the teacher's cost"]
    harness.print_table(title, header, lines)


if __name__ == "__main__":
    main()
