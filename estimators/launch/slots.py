"""Counts how many gang members the cluster can run at the same time."""

from __future__ import annotations

import logging
import socket
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from pyspark.sql import SparkSession

from ringspark.estimators.collectives.horovod_collective import check_nccl
from ringspark.estimators.launch.devices import check_enough
from ringspark.estimators.launch.resources import most_slots, plan_stage, profile_of, slots_of_conf
from ringspark.estimators.stages.session import ENCRYPTION, spark_conf
from ringspark.pipelines import spark_plans
from ringspark.pipelines.spark_paths import is_local, is_remote

_logger = logging.getLogger(__name__)

# Time that Spark's schedulers wait for executors (spark.scheduler.maxRegisteredResourcesWaitingTime).
REGISTRATION_SECONDS = 30.0
# Wait after which a warning says what a fit waits for.
_SAY_SECONDS = 5.0


def count_slots(spark: SparkSession, use_gpu: bool = False) -> int | None:
    """Returns how many workers can run at the same time now; None if Spark and its conf do not say."""
    conf = spark_conf(spark)
    return _count(spark, conf, plan_stage(conf, str(spark.version), use_gpu).task_cpus)


def check_slots(
    spark: SparkSession,
    num_workers: int,
    use_gpu: bool = False,
    collective: str = "torch",
    launch: str | None = None,
    patience: float = REGISTRATION_SECONDS,
) -> int | None:
    """Returns `count_slots`; raises ValueError for a gang that Spark would only retry and never start.

    Waits `patience` seconds for executors that the conf promises, such as pods that wait for a node.
    """
    conf = spark_conf(spark)
    if is_dynamic(conf) and launch == "barrier":
        raise ValueError(
            "launch='barrier' starts all workers at the same time, which Spark refuses on a cluster with "
            "spark.dynamicAllocation.enabled=true; leave launch unset"
        )
    encrypted = [f"{key}=true" for key in ENCRYPTION if conf.get(key, "").lower() == "true"]
    if encrypted and num_workers > 1 and not is_local(conf):
        warnings.warn(
            f"{encrypted[0]} encrypts Spark's own traffic, but gradients and weights travel between workers "
            "in clear text; use an encrypted or a private network",
            UserWarning,
            stacklevel=4,
        )
    if use_gpu:
        check_address_space(conf)
    task_cpus = plan_stage(conf, str(spark.version), use_gpu).task_cpus
    expected = most_slots(conf, task_cpus)
    if use_gpu and is_local(conf) and not is_remote(spark):
        # The workers have the GPUs and libraries of this process, so they are checked here.
        if collective == "horovod":
            check_nccl()
        check_enough(num_workers, socket.gethostname(), torch.cuda.device_count())
    if is_dynamic(conf):
        if expected is not None and num_workers > expected:
            raise ValueError(
                f"numWorkers ({num_workers}) must not exceed the {expected} task slots of the executors that "
                "spark.dynamicAllocation.maxExecutors allows; lower numWorkers or raise maxExecutors"
            )
        return None  # executors come when the workers wait for them
    # A session exists before its executors do.
    begun, is_promised = time.monotonic(), expected is not None and expected >= num_workers
    deadline = begun + (max(patience, REGISTRATION_SECONDS) if is_promised else REGISTRATION_SECONDS)
    slots, said = _count(spark, conf, task_cpus), False
    while may_grow(slots, num_workers, expected, _is_young(spark)) and time.monotonic() < deadline:
        if not said and time.monotonic() - begun > _SAY_SECONDS:
            said = True
            _logger.warning(
                "found %d task slots for %d workers; waiting up to %.0f s for executors, of which the conf "
                "promises %s slots",
                slots,
                num_workers,
                deadline - begun,
                "an unknown number of" if expected is None else expected,
            )
        time.sleep(0.1)
        slots = _count(spark, conf, task_cpus)
    if slots is not None and num_workers > slots:
        worker = f", each with {task_cpus} cores and a GPU" if task_cpus else ""
        advice = "lower numWorkers or add executor cores" + (" and GPUs" if task_cpus else "")
        if is_promised:
            advice = (
                f"the conf promises {expected} slots, but the cluster did not provide them within "
                f"{deadline - begun:.0f} s; lower numWorkers, or free resources of the cluster or its queue"
            )
        raise ValueError(
            f"numWorkers ({num_workers}) must not exceed the {slots} task slots of the cluster "
            f"({conf.get('spark.master', 'unknown master')}{worker}), since all workers run at the same "
            f"time; {advice}"
        )
    if slots is not None and slots >= 2 * num_workers:
        _logger.info(
            "the training uses %d of %d task slots, each with spark.task.cpus=%s threads; raise numWorkers "
            "or, in a new session, spark.task.cpus to use the idle slots",
            num_workers,
            slots,
            task_cpus or conf.get("spark.task.cpus", "1"),
        )
    return slots


def may_grow(slots: int | None, num_workers: int, expected: int | None, is_young: bool) -> bool:
    """Whether more executors may still register, so that the workers fit.

    `expected`: slots that the conf promises; if None, executors may register while the session `is_young`.
    """
    if slots is None or slots >= num_workers:
        return False
    return slots == 0 or is_young if expected is None else expected >= num_workers


def _is_young(spark: SparkSession) -> bool:
    if is_remote(spark):  # unknown
        return False
    return time.time() - spark.sparkContext.startTime / 1000 < REGISTRATION_SECONDS


def is_dynamic(conf: Mapping[str, str]) -> bool:
    """Whether Spark adds and removes executors, with which it refuses barrier stages (SPARK-24942)."""
    enabled = conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true"
    return enabled and not is_local(conf)  # a local master ignores it


def runs_as_tasks(conf: Mapping[str, str], launch: str | None) -> bool:
    """Whether the workers are ordinary tasks, by the setting `launch` or, if unset, by the cluster."""
    return is_dynamic(conf) if launch is None else launch == "tasks"


def check_address_space(conf: Mapping[str, str]) -> None:
    """Refuses a limit on the address space of Python workers: CUDA reserves far more than it uses."""
    if limit := conf.get("spark.executor.pyspark.memory"):
        raise ValueError(
            f"useGpu=True does not work with spark.executor.pyspark.memory ({limit}), which limits the "
            "address space of Python workers, and CUDA reserves more than that; start the session without "
            "it, and raise spark.executor.memoryOverhead instead"
        )


def _count(spark: SparkSession, conf: Mapping[str, str], task_cpus: int | None) -> int | None:
    if is_remote(spark):
        slots = slots_of_conf(conf, task_cpus)
        return slots_of_conf(conf, task_cpus, default_parallelism(spark, conf)) if slots is None else slots
    context: Any = spark.sparkContext._jsc.sc()
    if task_cpus is None:
        profile = context.resourceProfileManager().resourceProfileFromId(0)
    else:
        profile = profile_of(spark, task_cpus)._java_resource_profile
    return int(context.maxNumConcurrentTasks(profile))


def default_parallelism(spark: SparkSession, conf: Mapping[str, str]) -> int | None:
    """Returns the cores of all executors, read as Spark's default parallelism; None if the conf sets one."""
    if {"spark.default.parallelism", "spark.sql.leafNodeDefaultParallelism"} & conf.keys():
        return None
    return spark_plans.default_parallelism(spark)
