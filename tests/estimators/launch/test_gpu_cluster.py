"""Spark's GPU scheduling without a GPU: a discovery script reports two addresses.

Spark assigns addresses without looking at the hardware. So the stage's resource profile, the slots, the
assigned addresses and the device table are real; only PyTorch's own view is not. Each kind of session needs
its own process.
"""

from __future__ import annotations

import json
import os
import sys

import pyspark
import pytest
from programs import run_program

# An ETL cluster: four concurrent tasks share two GPUs.
CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.worker.resource.gpu.amount": "2",
    "spark.executor.resource.gpu.amount": "2",
    "spark.task.resource.gpu.amount": "0.25",
    "spark.sql.shuffle.partitions": "4",
    "spark.python.daemon.module": "ringspark.estimators.launch.python_daemon",
}
MASTER = "local-cluster[1,4,1024]"

DRIVER = """
import json, os, sys, threading
from concurrent.futures import ThreadPoolExecutor
import pyarrow as pa
from pyspark.sql import SparkSession
from ringspark.estimators import WorkerError
from ringspark.estimators.launch.devices import Claim, assign_devices
from ringspark.estimators.launch.resources import plan_stage, profile_of
from ringspark.estimators.launch.slots import check_slots, count_slots
from ringspark.estimators.launch.supervisor import Supervisor
from ringspark.estimators.stages.session import spark_conf
from ringspark.estimators.training.settings.config import TrainConfig

kind, master, conf = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
builder = SparkSession.builder
builder = builder.remote(master) if kind == "connect" else builder.master(master)
for key, value in conf.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()

def given(batches):
    from pyspark import BarrierTaskContext
    for _ in batches:
        pass
    context = BarrierTaskContext.get()
    resources = json.dumps([context.cpus(), context.resources()["gpu"].addresses])
    yield pa.RecordBatch.from_arrays([pa.array(context.allGather(resources))], names=["resources"])

def stage(num_workers, **profile):
    frame = spark.range(0, num_workers, 1, num_workers)
    rows = frame.mapInArrow(given, "resources string", barrier=True, **profile).collect()
    return [json.loads(row.resources) for row in rows[:num_workers]]

def devices(resources):
    cards = ("card-0", "card-1")
    claims = [Claim(host="h", addresses=tuple(addresses), visible=cards) for _, addresses in resources]
    try:
        return assign_devices(claims)
    except ValueError as error:
        return str(error)

# The session is younger than its executors.
check_slots(spark, 4)
report = {"slots": [count_slots(spark), count_slots(spark, use_gpu=True)]}
plan = plan_stage(spark_conf(spark), spark.version, True)
report["task_cpus"] = plan.task_cpus
report["etl"] = devices(stage(4))
# From a thread, as CrossValidator fits.
with ThreadPoolExecutor(1) as threads:
    resources = threads.submit(lambda: stage(2, profile=profile_of(spark, plan.task_cpus))).result()
report["gang"] = [resources, devices(resources)]
check_slots(spark, 2, use_gpu=True)
columns = {"input_columns": ("x",), "label_columns": ("y",)}
gang_settings = {"num_workers": 2, "collective": "torch", "use_gpu": True}
config = TrainConfig(shards_uri="", run_uri=os.getcwd() + "/run", **columns, **gang_settings)
gang = Supervisor(
    spark=spark, config=config, make_work=lambda _: lambda collective, device, status: device, token="test"
)
for call in (lambda: check_slots(spark, 3, use_gpu=True), gang.run):
    try:
        call()
        report.setdefault("errors", []).append("none")
    except (ValueError, WorkerError) as error:
        report.setdefault("errors", []).append(str(error).splitlines()[0])
print("REPORT" + json.dumps(report), flush=True)
spark.stop()
"""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classic", pytest.param("connect", marks=pytest.mark.slow)])
def test_on_a_cluster_that_shares_its_gpus_each_worker_gets_one_of_its_own(kind, tmp_path, connect_port):
    if int(pyspark.__version__.split(".")[0]) < 4:
        pytest.skip("the stages of a DataFrame take a resource profile from Spark 4.0 on")
    script = tmp_path / "gpus.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1"]}\'\n')
    script.chmod(0o755)
    conf = CONF | {"spark.worker.resource.gpu.discoveryScript": str(script)}
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable}
    done = run_program(DRIVER, kind, MASTER, json.dumps(conf), folder=tmp_path, env=environment)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REPORT")]
    report = json.loads(line.removeprefix("REPORT"))
    assert report["slots"] == [4, 2]
    assert report["task_cpus"] == 2
    # With four concurrent ETL tasks Spark assigns each address twice, which a gang must refuse.
    assert "useGpu=True needs a separate GPU for each worker, but Spark gave GPU " in report["etl"]
    resources, devices = report["gang"]
    assert [cpus for cpus, _ in resources] == [2, 2]
    assert sorted(addresses[0] for _, addresses in resources) == ["0", "1"]
    assert sorted(devices) == ["cuda:0", "cuda:1"]
    too_many, unseen = report["errors"]
    assert "must not exceed the 2 task slots" in too_many
    assert "each with 2 cores and a GPU" in too_many
    assert "failed in phase 'choosing the devices': ValueError: useGpu=True needs PyTorch to see" in unseen
