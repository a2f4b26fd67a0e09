"""Decides what a gang requests from Spark: cores and one GPU per worker, and how many workers fit.

If the cluster gives each task a fraction of a GPU, Spark's stage-level scheduling grants whole GPUs to the
gang's stage, as in xgboost.spark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from ringspark.estimators.stages.session import application_of
from ringspark.pipelines.spark_paths import is_local, is_remote

EXECUTOR_GPUS = "spark.executor.resource.gpu.amount"
TASK_GPUS = "spark.task.resource.gpu.amount"


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The scheduling of the gang's stage.

    With `task_cpus`, each task gets that many cores and a whole GPU; otherwise it gets the same resources as
    any task of the application. `gives_gpus`: whether each task has a GPU to itself. `problem` says why Spark
    gives no GPU, if the user can change that.
    """

    task_cpus: int | None = None
    gives_gpus: bool = False
    problem: str = ""


def plan_stage(conf: Mapping[str, str], version: str, use_gpu: bool) -> StagePlan:
    """Decides whether the gang's stage needs tasks of a special size, for a Spark of `version`."""
    master = conf.get("spark.master", "")
    gpus = int(float(conf.get(EXECUTOR_GPUS, "0")))
    # Local mode has no resources to schedule.
    if not use_gpu or is_local(conf) or gpus < 1:
        return StagePlan()
    given = conf.get(TASK_GPUS)
    if given is not None and float(given) == 1.0:
        return StagePlan(gives_gpus=True)
    if not master.startswith(("spark://", "local-cluster[", "k8s://")) and master != "yarn":
        return StagePlan(
            problem=f"Spark has no stage-level scheduling on {master or 'this master'}, and {TASK_GPUS} "
            f"is {given or 'not set'}; set {TASK_GPUS}=1"
        )
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < (4, 0):
        # Stages of a DataFrame accept a profile since Spark 4.0.
        return StagePlan(
            problem=f"Spark {version} cannot give the workers' stage whole GPUs while {TASK_GPUS} "
            f"is {given or 'not set'}; set {TASK_GPUS}=1, or use Spark 4.0 or later"
        )
    cores, task_cpus = executor_cores(conf), math.ceil(cores_per_task(conf))
    # If the number of cores is unknown, a worker takes the cores of any task, but still a whole GPU.
    cpus = min(max(task_cpus, cores // gpus), cores) if cores else task_cpus
    return StagePlan(task_cpus=cpus, gives_gpus=True)


def slots_of_conf(
    conf: Mapping[str, str], task_cpus: int | None, total_cores: int | None = None
) -> int | None:
    """Returns how many workers can run at the same time according to the conf; None if the conf does not say.

    With `task_cpus`, each task also needs a whole GPU; otherwise `spark.task.*` says what a task needs.
    """
    master = conf.get("spark.master", "")
    cpus = task_cpus or cores_per_task(conf)
    if is_local(conf):
        match = re.fullmatch(r"local\[\s*(\d+)\s*(?:,.*)?\]", master)
        cores: int | None = int(match[1]) if match else 1 if master == "local" else total_cores
        return None if cores is None else int(cores / cpus + 1e-9)
    cores = executor_cores(conf)
    executors: int | None = None
    if match := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,.*\]", master):
        executors = int(match[1])
    elif total_cores is not None and cores:
        executors = total_cores // cores
    elif "spark.executor.instances" in conf:
        executors = int(conf["spark.executor.instances"])
    elif "spark.cores.max" in conf and cores:
        executors = int(conf["spark.cores.max"]) // cores
    if executors is None or not cores:
        return None if total_cores is None else int(total_cores / cpus + 1e-9)
    slots = int(cores / cpus + 1e-9)
    gpus = float(conf.get(EXECUTOR_GPUS, "0"))
    amount = 1.0 if task_cpus else float(conf.get(TASK_GPUS, "0"))
    if gpus and amount:
        # An amount below 1 shares a GPU between as many tasks as fit; otherwise tasks get whole GPUs.
        slots = min(slots, int(gpus // amount) if amount >= 1 else int(gpus) * int(1 / amount + 1e-9))
    return executors * slots


def most_slots(conf: Mapping[str, str], task_cpus: int | None) -> int | None:
    """Returns how many workers the conf promises room for, with dynamic allocation too; None if unknown."""
    if conf.get("spark.dynamicAllocation.enabled", "false").lower() != "true" or is_local(conf):
        return slots_of_conf(conf, task_cpus)
    most = conf.get("spark.dynamicAllocation.maxExecutors", str(2**31 - 1))
    if int(most) == 2**31 - 1:
        return None
    return slots_of_conf({**conf, "spark.executor.instances": most}, task_cpus)


def cores_per_task(conf: Mapping[str, str]) -> float:
    """Returns the cores of a task; since Spark 4.3, it may be a part of one."""
    return float(conf.get("spark.task.cpus", "1"))


def executor_cores(conf: Mapping[str, str]) -> int | None:
    """Returns the cores of one executor; None if the conf leaves the number to the worker nodes."""
    master = conf.get("spark.master", "")
    if match := re.fullmatch(r"local-cluster\[\s*\d+\s*,\s*(\d+)\s*,.*\]", master):
        return int(conf.get("spark.executor.cores", match[1]))
    if "spark.executor.cores" in conf:
        return int(conf["spark.executor.cores"])
    return 1 if master == "yarn" or master.startswith("k8s://") else None


# Spark never drops a profile, so each size is made once per application.
_PROFILES: dict[tuple[str, int], Any] = {}


def profile_of(spark: SparkSession, task_cpus: int) -> Any:
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    key = (application_of(spark), task_cpus)
    if key not in _PROFILES:
        tasks = TaskResourceRequests().cpus(task_cpus).resource("gpu", 1.0)
        profile = ResourceProfileBuilder().require(tasks).build
        if is_remote(spark):
            # The server numbers the profile through the thread's active session. Only the thread that made
            # the session has one, but CrossValidator fits in another thread.
            session_class: Any = type(spark)
            session_class._set_default_and_active_session(spark)
            assert profile.id
        else:
            context: Any = spark.sparkContext._jsc.sc()
            context.resourceProfileManager().addResourceProfile(profile._java_resource_profile)
        _PROFILES[key] = profile
    return _PROFILES[key]
