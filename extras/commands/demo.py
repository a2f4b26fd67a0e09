"""The command `ringspark demo`: trains on a generated table, saves, loads and predicts."""

from __future__ import annotations

import argparse
import time

from ringspark.jobs import cli

DESCRIPTION = "Train on a generated table, save the model, load it and predict."
_ROWS = 10_000


def add_arguments(parser: cli.JobParser) -> None:
    cli.add_master(parser)
    parser.add_argument(
        "--workers", type=cli.positive_int, default=2, metavar="N", help="workers to train with"
    )
    parser.add_argument(
        "--output",
        default="ringspark-demo",
        metavar="URI",
        help="folder for the demo; its subfolder `model` is overwritten",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rows, to try an installation")


def run(args: argparse.Namespace) -> None:
    started, rows = time.perf_counter(), _ROWS // 5 if args.quick else _ROWS
    with cli.spark("ringspark demo", args.master, is_short=True) as spark:
        from pyspark.ml.evaluation import BinaryClassificationEvaluator
        from pyspark.ml.functions import vector_to_array
        from pyspark.sql import functions as F

        from ringspark.estimators import TorchClassificationModel, TorchClassifier
        from ringspark.estimators.stages.session import spark_conf
        from ringspark.pipelines import storage
        from ringspark.pipelines.spark_paths import is_local, resolve

        trips = spark.range(rows).selectExpr(
            "int(rand(3) * 24) AS hour",
            "IF(id % 7 = 0, NULL, rand(1) * 900) AS distance",
            "concat('airport ', int(rand(4) * 40)) AS origin",
            "date_add(DATE'2024-01-01', CAST(id % 700 AS INT)) AS day",
            "IF(rand(2) * 30 < hour, 1, 0) AS late",
        )
        train, test = trips.randomSplit([0.8, 0.2], seed=1)
        print(f"Three of {rows:,} trips; some distances are missing:")
        test.orderBy("day").show(3)
        settings = f"labelCol='late', numWorkers={args.workers}, epochs=4, seed=1"
        print(f"model = TorchClassifier({settings}).fit(train)")
        root = resolve(spark, args.output)
        storage.check_writable(root)  # before the training, which takes longer
        # Executors of a cluster cannot read a temporary folder of the driver.
        shared = None if is_local(spark_conf(spark)) else root
        estimator = TorchClassifier(
            labelCol="late", numWorkers=args.workers, epochs=4, seed=1, storageUri=shared
        )
        model = estimator.fit(train)
        folder = storage.join(root, "model")
        model.write().overwrite().save(folder)
        print(f"\nThe model is saved in {folder}. Loaded, it predicts trips that it has not seen:")
        predicted = TorchClassificationModel.load(folder).transform(test)
        late = F.round(vector_to_array(F.col("probability"))[1], 3).alias("probability late")
        predicted.orderBy("day").select("hour", "origin", "late", "prediction", late).show(3)
        auc = BinaryClassificationEvaluator(labelCol="late").evaluate(predicted)
        seconds = time.perf_counter() - started
        print(f"ROC AUC on all {test.count():,} held-out trips: {auc:.3f}; done in {seconds:.0f} s")
    print("\nWhat to do next:")
    print("  ringspark check --master URL      is your cluster ready to train?")
    print("  ringspark train job.yaml          train on your table (docs/jobs.md)")
    print("  TorchClassifier(labelCol=...)     the same in Python, on any DataFrame (docs/quickstart.md)")
