"""Recorded cluster configurations: the resources that the gang's stage requests, and the number of slots."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from ringspark.estimators.launch import slots
from ringspark.estimators.launch.resources import plan_stage, slots_of_conf
from ringspark.estimators.launch.slots import (
    check_address_space,
    check_slots,
    may_grow,
    runs_as_tasks,
)

EXECUTOR_GPUS, TASK_GPUS = "spark.executor.resource.gpu.amount", "spark.task.resource.gpu.amount"


def _conf(
    master: str, cores: int = 0, gpus: int = 0, task_gpus: str = "", **settings: str | int
) -> dict[str, str]:
    """Builds a configuration; `task_cpus=2` sets `spark.task.cpus`."""
    conf = {"spark.master": master}
    if cores:
        conf["spark.executor.cores"] = str(cores)
    if gpus:
        conf[EXECUTOR_GPUS] = str(gpus)
    if task_gpus:
        conf[TASK_GPUS] = task_gpus
    return conf | {f"spark.{key.replace('_', '.')}": str(value) for key, value in settings.items()}


STANDALONE = "spark://host:7077"
K8S = "k8s://https://host:6443"

# Columns: configuration, Spark version, task cpus, slots when 32 cores are known.
PLANS: dict[str, tuple[dict[str, str], str, int | None, int | None]] = {
    "one GPU, a quarter for a task": (_conf(STANDALONE, 8, 1, "0.25"), "4.0.0", 8, 4),
    "four GPUs, a fraction for a task": (_conf(STANDALONE, 16, 4, "0.25"), "4.0.1", 4, 8),
    "GPUs that no task asks for": (_conf("yarn", 8, 2), "4.1.0", 4, 8),
    "kubernetes": (_conf(K8S, 8, 2, "0.1"), "4.3.0", 4, 8),
    "cores that do not divide evenly": (_conf(STANDALONE, 16, 3, "0.2"), "4.0.0", 5, 6),
    "more GPUs than cores": (_conf(STANDALONE, 2, 4, "0.5"), "4.0.0", 1, 32),
    "two GPUs for a task whose worker uses one": (_conf(STANDALONE, 8, 4, "2"), "4.0.0", 2, 16),
    "tasks of several cores": (_conf(STANDALONE, 8, 8, "0.5", task_cpus=2), "4.0.0", 2, 16),
    "cores left to the nodes": (_conf(STANDALONE, 0, 2, "0.25"), "4.0.0", 1, 32),
    "local-cluster": (_conf("local-cluster[2,4,1024]", 0, 2, "0.25"), "4.0.5", 2, 4),
    "each task has its GPU": (_conf(STANDALONE, 8, 2, "1"), "4.0.0", None, 8),
    "each task has its GPU, written as a fraction": (_conf(STANDALONE, 8, 2, "1.0"), "4.0.0", None, 8),
    "no GPUs in Spark's hands": (_conf(STANDALONE, 8), "4.0.0", None, 32),
    "local mode": (_conf("local[8]", 0, 2, "0.25"), "4.0.0", None, 8),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_worker_gets_its_share_of_cores_and_one_gpu(name):
    conf, version, task_cpus, slots = PLANS[name]
    plan = plan_stage(conf, version, use_gpu=True)
    assert plan.task_cpus == task_cpus
    assert not plan.problem
    assert slots_of_conf(conf, plan.task_cpus, 32) == slots
    assert plan.gives_gpus == (task_cpus is not None or conf.get(TASK_GPUS) in ("1", "1.0"))
    if task_cpus is not None:
        cores = int(conf.get("spark.executor.cores", "4"))
        gpus = int(conf[EXECUTOR_GPUS])
        # As many workers as GPUs fit into an executor, unless it has too few cores.
        assert min(cores // task_cpus, gpus) == min(cores // int(conf.get("spark.task.cpus", "1")), gpus)
        assert plan_stage(conf, version, use_gpu=False).task_cpus is None


@pytest.mark.parametrize(
    ("conf", "version", "reason"),
    [
        (_conf(STANDALONE, 8, 2, "0.25"), "3.5.9", "Spark 3.5.9 cannot .* is 0.25; set .*amount=1, or"),
        (_conf("yarn", 8, 2), "3.5.0", "Spark 3.5.0 cannot .* is not set; set .*amount=1, or"),
        (_conf("mesos://host", 8, 2, "0.25"), "4.0.0", "no stage-level scheduling on mesos://host"),
    ],
)
def test_where_spark_cannot_give_whole_gpus_the_plan_says_what_to_set(conf, version, reason):
    plan = plan_stage(conf, version, use_gpu=True)
    assert plan.task_cpus is None
    assert re.search(reason, plan.problem)
    assert f"set {TASK_GPUS}=1" in plan.problem


# Columns: configuration, total cores if known, slots for CPU workers.
SLOTS: list[tuple[dict[str, str], int | None, int | None]] = [
    (_conf("local"), None, 1),
    (_conf("local[3]"), None, 3),
    (_conf("local[ 2 , 4 ]"), None, 2),
    (_conf("local[4]", task_cpus=2), None, 2),
    (_conf("local[4]") | {"spark.task.cpus": "0.5"}, None, 8),  # since Spark 4.3
    (_conf("local-cluster[2,3,1024]") | {"spark.task.cpus": "1.5"}, None, 4),
    (_conf(STANDALONE, 1) | {"spark.task.cpus": "0.1"}, 3, 30),
    (_conf("local[*]"), None, None),
    (_conf("local[*]"), 16, 16),
    (_conf("local-cluster[2,3,1024]"), None, 6),
    (_conf("local-cluster[2,3,1024]", task_cpus=2), None, 2),
    (_conf(STANDALONE), None, None),
    (_conf(STANDALONE), 12, 12),
    # Each executor has three cores left, too few for a second worker.
    (_conf(STANDALONE, 5, task_cpus=2), 20, 8),
    (_conf(STANDALONE, 4, cores_max=10), None, 8),
    (_conf("yarn", executor_instances=6), None, 6),
    (_conf(K8S, 4, executor_instances=6), None, 24),
    (_conf(STANDALONE, 8, 2, "0.25"), 16, 16),
    (_conf(STANDALONE, 8, 2, "0.5"), 16, 8),
    # Five tasks share a GPU; floating-point division must not change this.
    (_conf(STANDALONE, 16, 1, "0.2"), 16, 5),
    (_conf(STANDALONE, 16, 3, "0.4"), 16, 6),
]


@pytest.mark.parametrize(("conf", "total_cores", "slots"), SLOTS)
def test_slots_follow_from_cores_gpus_and_the_size_of_a_task(conf, total_cores, slots):
    assert slots_of_conf(conf, None, total_cores) == slots


def test_the_workers_are_ordinary_tasks_where_spark_refuses_a_barrier_stage():
    found = [
        (master, enabled)
        for master in (STANDALONE, "yarn", K8S, "local-cluster[2,1,1024]", "local[4]", "local")
        for enabled in ("true", "false")
        if runs_as_tasks(_conf(master, dynamicAllocation_enabled=enabled), None)
    ]
    # A local master ignores the setting.
    assert found == [(master, "true") for master in (STANDALONE, "yarn", K8S, "local-cluster[2,1,1024]")]


def test_a_bound_on_the_address_space_of_gpu_workers_is_refused(monkeypatch):
    check_address_space(_conf(STANDALONE))
    bounded = _conf(STANDALONE, executor_pyspark_memory="4g")
    monkeypatch.setattr("ringspark.estimators.launch.slots.spark_conf", lambda spark: bounded)
    refusal = r"spark\.executor\.pyspark\.memory \(4g\), .* raise spark\.executor\.mem"
    with pytest.raises(ValueError, match=refusal):
        check_slots(None, 1, use_gpu=True)


@pytest.mark.parametrize(
    "key", ["spark.ssl.enabled", "spark.ssl.rpc.enabled", "spark.network.crypto.enabled"]
)
def test_a_session_that_encrypts_hears_that_gradients_do_not(key, monkeypatch):
    monkeypatch.setattr(slots, "_count", lambda *_: 2)

    def warn(value: str, workers: int, master: str = STANDALONE) -> list[str]:
        session: Any = SimpleNamespace(
            version="4.0",
            sparkContext=SimpleNamespace(startTime=0, _conf={"spark.master": master, key: value}),
        )
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            check_slots(session, workers)
        return [str(warning.message) for warning in found]

    (sentence,) = warn("true", 2)
    assert f"{key}=true encrypts Spark's own traffic" in sentence
    assert [warn("true", 1), warn("false", 2), warn("true", 2, "local[4]")] == [[], [], []]


@pytest.mark.parametrize(
    ("slots", "expected", "is_young", "waits"),
    [
        (0, None, False, True),
        (2, None, False, False),
        # On several hosts, executors register at different times.
        (2, None, True, True),
        (2, 4, False, True),
        (2, 3, True, False),
        (4, 4, True, False),
        (None, None, True, False),
    ],
)
def test_a_gang_of_four_waits_only_for_executors_that_are_promised(slots, expected, is_young, waits):
    assert may_grow(slots, 4, expected, is_young) == waits
