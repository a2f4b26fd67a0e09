"""Workers that are forked from a daemon which has imported torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHOOSER = """
import json, os, sys
from pyspark.sql import SparkSession
from ringspark.estimators.launch.python_daemon import choose_daemon

def look(rows):
    yield "torch" in sys.modules

builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
if sys.argv[1:]:
    builder.config("spark.python.daemon.module", sys.argv[1])
spark = builder.getOrCreate()
choose_daemon(spark)
print(json.dumps(spark.sparkContext.parallelize([0], 1).mapPartitions(look).collect()))
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("conf", "loaded"), [([], True), (["pyspark.daemon"], False)])
def test_a_local_session_gets_the_daemon_unless_the_user_chose_another(
    tmp_path: Path, conf: list[str], loaded: bool
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(CHOOSER)
    command = [sys.executable, str(script), *conf]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [loaded]


DRIVER = """
import json, os, sys
from pyspark.sql import SparkSession

def look(rows):
    import pyspark
    # What is in sys.modules before anybody here has asked for it.
    loaded = "torch" in sys.modules
    pyspark.BarrierTaskContext.get().barrier()
    import numpy
    yield loaded, os.getpid(), numpy.random.rand()

spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.python.daemon.module", "ringspark.estimators.launch.python_daemon")
    .getOrCreate()
)
print(json.dumps(spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(look).collect()))
spark.stop()
"""


@pytest.mark.slow
def test_workers_are_forks_of_a_process_that_has_torch(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (loaded, pid, number), (other_loaded, other_pid, other_number) = json.loads(done.stdout.splitlines()[-1])
    assert loaded
    assert other_loaded
    assert pid != other_pid
    # Forks of one process would draw the same numbers.
    assert number != other_number


def test_what_libraries_print_does_not_reach_spark() -> None:
    code = """
import os

from ringspark.estimators.launch.python_daemon import _quiet_stdout
with _quiet_stdout():
    print("a greeting")
    os.system("echo from below")
print("the port")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "the port\n"
    assert "a greeting\n" in done.stderr
    assert "from below\n" in done.stderr


def test_an_archive_is_listed_again_when_it_has_changed(tmp_path: Path) -> None:
    code = """
import importlib, sys, zipfile, zipimport
from ringspark.estimators.launch.python_daemon import _list_archives_once

archive = sys.argv[1]

def write(**modules):
    with zipfile.ZipFile(archive, "w") as target:
        for name, text in modules.items():
            target.writestr(f"shipped/{name}.py", text)

listings = []
read_directory = zipimport._read_directory
zipimport._read_directory = lambda path: listings.append(path) or read_directory(path)
_list_archives_once()
write(__init__="", one="value = 1")
sys.path.insert(0, archive)
from shipped import one
for _ in range(3):
    importlib.invalidate_caches()
first = listings.count(archive)
for _ in range(3):
    importlib.invalidate_caches()
assert listings.count(archive) == first, listings
write(__init__="", one="value = 1", two="value = 22")
importlib.invalidate_caches()
from shipped import two
assert (one.value, two.value) == (1, 22)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "shipped.zip")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
