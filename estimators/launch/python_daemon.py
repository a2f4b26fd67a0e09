"""PySpark's daemon with torch imported, so that the workers of a gang start seconds sooner.

    spark-submit --conf spark.python.daemon.module=ringspark.estimators.launch.python_daemon ...

Spark forks the Python workers of an executor from one daemon, so they share its imports. The executors must
have ringspark installed. On a local master, `fit` sets this conf.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import zipimport
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

MODULE = "ringspark.estimators.launch.python_daemon"

_CONF = "spark.python.daemon.module"
_SPARKS_OWN = "pyspark.daemon"
# A user who set one of these chose a daemon, or limited the address space that torch needs.
_CHOICES = {_CONF, "spark.executor.pyspark.memory", "spark.python.use.daemon"}
_CHECK_SECONDS = 30

# Slow imports of a rank; modules that are not installed are skipped.
PRELOADED = (
    "pyspark.worker",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "horovod.torch",
    "ringspark.pipelines.readers.petastorm_reader",
    "ringspark.estimators.launch.gang_task",
    "ringspark.estimators.launch.train_task",
    "ringspark.estimators.collectives.torch_collective",
    "ringspark.estimators.collectives.horovod_collective",
)

_logger = logging.getLogger(__name__)


def choose_daemon(spark: Any, use_gpu: bool = False) -> None:
    """Makes Spark fork its next Python workers from this daemon if that is safe. Runs on the driver.

    It is safe if driver and executor are one process, no fork needs CUDA, and the user has not set a daemon.
    """
    from pyspark import InheritableThread

    from ringspark.estimators.stages.session import spark_conf
    from ringspark.pipelines.local_python import choose_python
    from ringspark.pipelines.spark_paths import is_local, is_remote

    choose_python(spark)
    conf = spark_conf(spark)
    if use_gpu or is_remote(spark) or not is_local(conf) or _CHOICES & conf.keys():
        return
    context = spark.sparkContext
    is_found = _finds_module(context)
    context._conf.set(_CONF, MODULE if is_found else _SPARKS_OWN)
    if is_found:
        _logger.info("Spark now forks its Python workers from %s; set %s to choose another", MODULE, _CONF)
        # The daemon imports for seconds; meanwhile Spark can plan and compile the first job of the fit.
        # The thread inherits the caller's job group and tags, which a notebook uses to cancel.
        InheritableThread(target=_start_daemon, args=(spark, context), daemon=True).start()


def _start_daemon(spark: Any, context: Any) -> None:
    from ringspark.pipelines.job_names import name_jobs

    try:
        with name_jobs(spark, "start the Python workers"):
            spark.range(0, 1, 1, 1).mapInArrow(lambda batches: batches, "id long").collect()
    except Exception:
        # The daemon may not work here; then it must not fail every later Python task too.
        _logger.info("Python workers could not be forked from %s; using Spark's own daemon again", MODULE)
        # The session may be gone.
        with contextlib.suppress(Exception):
            context._conf.set(_CONF, _SPARKS_OWN)


def _finds_module(context: Any) -> bool:
    """Whether a Python process that Spark's JVM starts would find this file as the module `MODULE`."""
    code = (
        f"import importlib.util, os, sys; spec = importlib.util.find_spec({MODULE!r}); "
        "sys.exit(spec is None or os.path.realpath(spec.origin) != sys.argv[1])"
    )
    try:
        java, spark = context._jvm.java, context._jvm.org.apache.spark
        builder = java.lang.ProcessBuilder([context.pythonExec, "-c", code, os.path.realpath(__file__)])
        environment = builder.environment()
        paths = [spark.api.python.PythonUtils.sparkPythonPath(), context.environment.get("PYTHONPATH")]
        paths.append(environment.get("PYTHONPATH"))
        environment.putAll(context.environment)
        environment.put("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        process = builder.start()
        if process.waitFor(_CHECK_SECONDS, java.util.concurrent.TimeUnit.SECONDS):
            return bool(process.exitValue() == 0)
        process.destroyForcibly()
    except Exception as error:
        _logger.info("Spark's JVM could not start its Python: %s", error)
    return False


def main() -> None:
    # Garbage collection would take a quarter of the import time and find nothing.
    gc.disable()
    with _quiet_stdout():
        _preload()
    _list_archives_once()
    from pyspark.daemon import manager

    # Otherwise the garbage collector writes into every object, which copies memory that the forks share.
    gc.freeze()
    gc.enable()
    manager()


def _preload() -> None:
    # Otherwise a check for GPUs would start CUDA in this process, and then no fork could use CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in PRELOADED:
        # A broken library must not end the daemon: the code that needs it will raise the error.
        try:
            importlib.import_module(name)
        except ImportError:
            pass
        except Exception as error:
            _logger.warning("%s could not be imported: %r", name, error)
    if "numpy" in sys.modules:
        # Without a new seed, all forks would draw the same numbers.
        os.register_at_fork(after_in_child=importlib.import_module("numpy").random.seed)


def _list_archives_once() -> None:
    """Caches the listing of each archive on sys.path until its file changes.

    Every task of PySpark invalidates importlib's caches. Up to Python 3.12, Python would then list
    pyspark.zip and spark-core.jar again, for 0.2 s.
    """
    list_again = zipimport.zipimporter.invalidate_caches
    listed: WeakKeyDictionary[zipimport.zipimporter, tuple[int, int, int]] = WeakKeyDictionary()

    def invalidate_caches(importer: zipimport.zipimporter) -> None:
        try:
            status = os.stat(importer.archive)
        except OSError:
            listed.pop(importer, None)
            list_again(importer)
            return
        state = (status.st_ino, status.st_mtime_ns, status.st_size)
        if listed.get(importer) != state:
            list_again(importer)
            listed[importer] = state

    zipimport.zipimporter.invalidate_caches = invalidate_caches  # type: ignore[assignment, method-assign]


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    # To stderr, because Spark reads the daemon's port from stdout.
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    main()
