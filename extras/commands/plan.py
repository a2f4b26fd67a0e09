"""The command `ringspark plan`: shows the memory that a training step of a job file needs.

For shards, the columns come from the manifest, and Spark does not start. For other rows, Spark reads a
sample. Without params.model, it reads all rows, as `fit` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringspark.jobs import cli, train_job

if TYPE_CHECKING:
    from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
    from ringspark.pipelines import ShardManifest

DESCRIPTION = "Show the memory that a training step of a job file needs on a worker."
# Enough rows for the columns' shapes and the mean of varying lengths.
_SAMPLED_ROWS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    train_job.add_job(parser)
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="memory of a worker, such as 4g, to show what would fit; default: params.memoryBudget",
    )
    cli.add_master(parser)


def run(args: argparse.Namespace) -> None:
    from ringspark.estimators.training.check.driver import check_training
    from ringspark.estimators.training.settings.byte_sizes import parse_bytes
    from ringspark.extras.planning.memory.columns import shard_columns
    from ringspark.extras.planning.memory.plan import Planner

    file, job = train_job.read_job(args.file, args.set)
    estimator = train_job.find_estimator(train_job.make_estimator(file, job))
    budget = parse_bytes(args.budget) if args.budget else estimator.getMemoryBudget()
    with _open_data(job, estimator, args.master) as (given, objects, manifest):
        config = check_training(replace(given, shards_uri=manifest.uri), objects, manifest).config
        columns = shard_columns(config, manifest, config.most_rows)
        plan = Planner(config, objects, *columns).plan(budget, "--budget")
    print(f"plan: {plan.rows:,} rows per step on each of {given.num_workers} workers")
    print(plan.table())


@contextmanager
def _open_data(
    job: train_job.TrainJob, estimator: Any, master: str | None
) -> Iterator[tuple[TrainConfig, UserObjects, ShardManifest]]:
    from ringspark.pipelines import ShardManifest, storage

    if job.data.shards is not None:
        config, objects = train_job.config_of(estimator)
        yield config, objects, ShardManifest.load(storage.normalize(job.data.shards))
        return
    from ringspark.estimators.checked_fit import prepare_checked
    from ringspark.estimators.stages.fit_data import SharedShards

    with cli.spark("ringspark plan", master) as spark:
        # Without runUri, because a plan must not touch the run folder.
        alone = estimator.copy().setRunUri(None)
        # All rows decide how large a table's network is.
        prepared, fit = prepare_checked(alone, train_job.read_rows(spark, job))
        rows = prepared.dataset.limit(_SAMPLED_ROWS)
        with SharedShards({fit.data: rows}, [fit.data]).shards(fit.data) as manifest:
            yield fit.config, fit.objects, manifest
