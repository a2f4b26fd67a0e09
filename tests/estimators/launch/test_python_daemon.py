"""Workers forked from a daemon that has already imported torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pyspark
import pytest
from programs import run_program

ROOT = Path(__file__).parent.parent.parent.parent

# Starts the drivers below.
HEAD = """
import json, os, sys, time
from pyspark.sql import SparkSession
from ringspark.estimators.launch.python_daemon import choose_daemon

NAME = "spark.python.daemon.module"

def session(cores=1, daemon=None):
    builder = SparkSession.builder.master(f"local[{cores}]").config("spark.ui.enabled", "false")
    return (builder.config(NAME, daemon) if daemon else builder).getOrCreate()
"""

CHOOSER = """
def look(rows):
    yield "torch" in sys.modules

spark = session(daemon=sys.argv[1] if sys.argv[1:] else None)
choose_daemon(spark)
print(json.dumps(spark.sparkContext.parallelize([0], 1).mapPartitions(look).collect()))
print(choose_daemon.__globals__["__file__"])
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("conf", "loaded"), [([], True), (["pyspark.daemon"], False)])
def test_a_local_session_gets_the_daemon_unless_the_user_chose_another(tmp_path, conf, loaded):
    done = run_program(HEAD + CHOOSER, *conf, folder=tmp_path)
    assert json.loads(done.stdout.splitlines()[-2]) == [loaded]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The .zip for --py-files."""
    dist = tmp_path_factory.mktemp("dist")
    build = ROOT / "scripts" / "build_package.py"
    subprocess.run([sys.executable, str(build), "--output", str(dist)], check=True)
    (package,) = dist.glob("*.zip")
    return package


@pytest.mark.slow
@pytest.mark.parametrize("installed", [False, True], ids=["not_installed", "another_version_installed"])
def test_a_driver_that_has_ringspark_from_py_files_keeps_the_daemon_of_spark(package, tmp_path, installed):
    # Spark's JVM starts the daemon without the --py-files on PYTHONPATH.
    python = Path(sys.executable)
    if not installed:
        venv.create(tmp_path / "venv", symlinks=True)
        python = tmp_path / "venv" / "bin" / "python"
        # All packages except those installed through their own .pth file, such as ringspark.
        (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
        (site / "others.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")))
    script = tmp_path / "driver.py"
    script.write_text(HEAD + CHOOSER)
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    command = [str(submit), "--master", "local[1]", "--py-files", str(package), str(script)]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYSPARK_GATEWAY_PORT")}
    environment |= {"PYSPARK_PYTHON": str(python), "SPARK_HOME": str(submit.parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded, driver_file = done.stdout.splitlines()[-2:]
    assert ".zip" in driver_file
    assert json.loads(loaded) == [False]


UNCHANGED = """
import torch
from ringspark.estimators import TorchRegressor

spark = session()
conf = spark.sparkContext._conf
frame = spark.sql("SELECT array(1.0F) AS features, 1.0F AS label")
for workers, column in ((2, "label"), (1, "not_there")):
    try:
        TorchRegressor(model=torch.nn.Linear(1, 1), numWorkers=workers, labelCol=column).fit(frame)
    except ValueError as error:
        print("refused", conf.get(NAME), error)
choose_daemon(spark, use_gpu=True)
print(conf.get(NAME))
spark.stop()
"""


@pytest.mark.slow
def test_neither_a_refused_fit_nor_one_on_gpus_chooses_a_daemon(tmp_path):
    done = run_program(HEAD + UNCHANGED, folder=tmp_path)
    crowded, unnamed, on_gpus = done.stdout.splitlines()[-3:]
    assert crowded.startswith("refused None numWorkers (2)")
    assert unnamed.startswith("refused None labelCol 'not_there'")
    assert on_gpus == "None"


DYING = """
spark = session()
choose_daemon(spark)
conf = spark.sparkContext._conf
print(conf.get(NAME))
deadline = time.monotonic() + 100
while conf.get(NAME) != "pyspark.daemon" and time.monotonic() < deadline:
    time.sleep(0.1)
print(spark.sparkContext.parallelize([7], 1).map(lambda row: row + 1).collect())
spark.stop()
"""


@pytest.mark.slow
def test_spark_has_its_own_daemon_back_when_this_one_dies(tmp_path):
    # Imitates a crash in native code.
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("")
    (tmp_path / "horovod" / "torch.py").write_text("import os; os._exit(3)")
    done = run_program(HEAD + DYING, folder=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.stdout.splitlines()[-2:] == ["ringspark.estimators.launch.python_daemon", "[8]"]


DRIVER = """
def look(rows):
    import pyspark
    # What is in sys.modules before anybody here has asked for it.
    loaded = "torch" in sys.modules
    pyspark.BarrierTaskContext.get().barrier()
    import numpy
    yield loaded, os.getpid(), numpy.random.rand()

spark = session(cores=2, daemon="ringspark.estimators.launch.python_daemon")
print(json.dumps(spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(look).collect()))
spark.stop()
"""


@pytest.mark.slow
def test_workers_are_forks_of_a_process_that_has_torch(tmp_path):
    done = run_program(HEAD + DRIVER, folder=tmp_path)
    (loaded, pid, number), (other_loaded, other_pid, other_number) = json.loads(done.stdout.splitlines()[-1])
    assert loaded
    assert other_loaded
    assert pid != other_pid
    # Forked processes must not share the state of the random number generator.
    assert number != other_number


def test_a_broken_library_does_not_end_the_daemon(tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('built for\\nanother version')")
    (tmp_path / "sound.py").write_text("")
    code = """
import sys
from ringspark.estimators.launch import python_daemon
sys.path.insert(0, sys.argv[1])
python_daemon.PRELOADED = ("not_installed_here", "broken", "sound")
python_daemon._preload()
assert "sound" in sys.modules
"""
    done = run_program(code, tmp_path)
    (line,) = done.stderr.splitlines()
    assert line.startswith("broken could not be imported: RuntimeError(")


def test_what_libraries_print_does_not_reach_spark():
    code = """
import os

from ringspark.estimators.launch.python_daemon import _quiet_stdout
with _quiet_stdout():
    print("a greeting")
    os.system("echo from below")
print("the port")
"""
    done = run_program(code)
    assert done.stdout == "the port\n"
    assert "a greeting\n" in done.stderr
    assert "from below\n" in done.stderr


def test_an_archive_is_listed_again_when_it_has_changed(tmp_path):
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
    run_program(code, tmp_path / "shipped.zip")
