"""`batch_that_fits`: finds by training the largest micro-batch that fits a worker's memory."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame

from ringspark.estimators.checked_fit import CheckedFit
from ringspark.estimators.failures import WorkerError
from ringspark.estimators.run.folder import RunFolder
from ringspark.estimators.stages.fit_data import SharedShards
from ringspark.estimators.training.batch_sizes import BatchSizes
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.settings.byte_sizes import parse_bytes, show_bytes
from ringspark.extras.planning.memory.columns import shard_columns
from ringspark.extras.planning.memory.plan import Planner
from ringspark.extras.tuning.short_training import check_estimator, plain_copy, prepare_training
from ringspark.pipelines import ShardManifest

# The optimizer's state exists from the second step on.
_STEPS = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BatchFit:
    """A division of the batch into micro-batches that fits.

    Attributes:
        estimator: Copy of the estimator with the `gradientAccumulation` that was found, and its `batchSize`.
        gradient_accumulation: Micro-batches per optimizer step.
        rows: Rows of a micro-batch, on the worker with the most rows.
        tries: One row per try: "gradient_accumulation", "rows", "planned_bytes" (None without a budget) and
            "outcome", which is "fits" or the reason why the micro-batch does not fit.
    """

    estimator: Any
    gradient_accumulation: int
    rows: int
    tries: pd.DataFrame

    def __str__(self) -> str:
        sizes = _sizes(self.estimator)
        later = "" if sizes.largest == sizes.size(0) else f", and up to {sizes.largest} by batchSizeSchedule,"
        return (
            f"micro-batches of {self.rows} rows per worker fit: batchSize={sizes.size(0)}{later} "
            f"with gradientAccumulation={self.gradient_accumulation}"
        )


def batch_that_fits(estimator: Any, df: DataFrame, budget: int | str | None = None) -> BatchFit:
    """Finds the fewest micro-batches for which the estimator's largest batch fits a worker's memory.

    A number of micro-batches whose planned memory exceeds the budget is not tried. Otherwise the estimator's
    workers train two steps on a sample of the rows. Each time memory runs out, the number of micro-batches
    doubles and a line is logged. The function leaves no folder behind and does not change the estimator.

    Splitting a batch into micro-batches keeps its gradient, except for layers that combine rows. Batch
    normalization, for example, sees one micro-batch at a time. The sample may lack the longest rows of a
    table, and other processes may take memory later. If the system kills a worker that uses too much memory,
    no error says so; set a budget on such hosts.

    Args:
        estimator: An estimator of ringspark. Its `gradientAccumulation` is tried first.
        budget: Bytes per worker, as an int or a Spark size ("4g"). None takes the estimator's `memoryBudget`;
            if that is unset too, no memory is planned.

    Raises:
        ValueError: An argument is invalid, or the smallest micro-batch does not fit.
        WorkerError: A worker failed for another reason.
    """
    check_estimator(estimator, "batch_that_fits")
    limit = estimator.getMemoryBudget() if budget is None else parse_bytes(budget)
    whole, rows, count = prepare_training(estimator, df, "batch_that_fits")
    batch, seed = _sizes(whole).largest, estimator.getOrDefault("seed")
    is_validated = whole.isSet("validationFraction") or whole.isSet("validationIndicatorCol")
    wanted = (_STEPS + is_validated) * batch
    # A tenth more, because the size of a sample is random.
    sample = rows.sample(1.1 * wanted / count, seed) if count > 1.2 * wanted else rows
    trial = plain_copy(whole).setParams(epochs=1, batchSize=batch, maxRestarts=0, lrSchedule="constant")
    trial.clear(trial.memoryBudget)
    if trial.getEmaDecay() is not None:
        # The average takes memory; two steps are too few for a slow one, which would cause a warning.
        trial.setParams(emaDecay=0.01)
    if is_validated:
        trial.setParams(validationFraction=1 / (_STEPS + 1))
    sample = sample.limit(wanted).persist()
    try:
        found = _search(whole, trial, sample, limit)
    finally:
        sample.unpersist()
    # The batch size too, because the recipe of a table may have set it.
    fitting = {"gradientAccumulation": found.gradient_accumulation, "batchSize": whole.getBatchSize()}
    return replace(found, estimator=estimator.copy().setParams(**fitting))


def _search(estimator: Any, trial: Any, sample: DataFrame, limit: int | None) -> BatchFit:
    fit = CheckedFit.of(trial, sample)
    tries: list[dict[str, Any]] = []
    with SharedShards({fit.data: sample}, [fit.data]).shards(fit.data) as manifest:
        # A worker's share of a step: at most the existing rows. Workers of one replica have the same rows.
        per_worker = math.ceil(
            min(fit.config.batch_size, manifest.select("train").num_rows) / fit.config.num_copies
        )
        # Every worker has a row in each micro-batch of a full batch, even of the smallest batch.
        most = min(per_worker, _sizes(estimator).smallest // fit.config.num_copies)
        parts = min(fit.config.gradient_accumulation, most)
        while True:
            needed = None if limit is None else _plan_bytes(fit, manifest, parts)
            if limit is not None and needed is not None and needed > limit:
                outcome = f"the plan needs {show_bytes(needed)}, the budget is {show_bytes(limit)}"
            else:
                outcome = _try_training(trial, sample, manifest, parts)
            found = {"gradient_accumulation": parts, "rows": math.ceil(per_worker / parts)}
            tries.append({**found, "planned_bytes": needed, "outcome": outcome or "fits"})
            if not outcome:
                return BatchFit(estimator=estimator, **found, tries=pd.DataFrame(tries))
            if parts >= most:
                raise ValueError(
                    f"the smallest micro-batch, of {found['rows']} rows on a worker, does not fit its memory "
                    f"({outcome}); set gradientCheckpointing or sharding, or use a smaller network: see "
                    "plan_memory"
                )
            parts = min(2 * parts, most)
            _log.warning(
                "micro-batches of %d rows per worker do not fit (%s); "
                "trying %d rows, gradientAccumulation=%d",
                found["rows"], outcome, math.ceil(per_worker / parts), parts,
            )  # fmt: skip


def _sizes(estimator: Any) -> BatchSizes:
    return BatchSizes.of(estimator.getBatchSize(), estimator.getBatchSizeSchedule(), estimator.getEpochs())


def _plan_bytes(fit: CheckedFit, manifest: ShardManifest, parts: int) -> int | None:
    config = replace(fit.config, shards_uri=manifest.uri, gradient_accumulation=parts)
    config = check_training(config, fit.objects, manifest, fit.heads).config
    columns = shard_columns(config, manifest, config.most_rows)
    try:
        return Planner(config, fit.objects, *columns).plan().peak
    except Exception:  # a failure without data does not concern the memory
        return None


def _try_training(trial: Any, sample: DataFrame, manifest: ShardManifest, parts: int) -> str:
    """Trains with `parts` micro-batches; returns how memory ran out, or "" if it sufficed."""
    fit = CheckedFit.of(trial.copy({trial.gradientAccumulation: parts}), sample)
    run = RunFolder.new(fit.data.root)
    try:
        with run.guarded():
            trial._train_on(sample.sparkSession, run, fit, manifest)
    except WorkerError as error:
        lost = [failure for failure in error.failures if failure.is_out_of_memory]
        if not lost:
            raise
        return lost[0].sentence
    finally:
        run.discard()
    return ""
