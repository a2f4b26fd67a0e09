"""PySpark's daemon with torch imported, so that the workers of a gang start seconds sooner.

    spark-submit --conf spark.python.daemon.module=ringspark.estimators.launch.python_daemon ...

Spark forks the Python workers of an executor from one daemon, so modules that the daemon has imported cost a
worker nothing. Without this daemon every rank imports torch again whenever a gang is started anew, at 3 to
5 s of CPU each. It also saves Python tasks of any library from listing Spark's archives again, at 0.2 s of
CPU each up to Python 3.12.

ringspark must be installed where the executors run: the daemon starts before Spark ships any file.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import zipimport
from collections.abc import Iterator
from weakref import WeakKeyDictionary

# Modules that a rank imports and that take long to import; those not installed are left out.
_PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "horovod.torch",
    "ringspark.pipelines.readers.petastorm_reader",
    "ringspark.estimators.launch.gang_task",
    "ringspark.estimators.training.worker",
)


def main() -> None:
    """Imports the modules, then serves Spark until the daemon ends."""
    with _quiet_stdout():
        _preload()
    _list_archives_once()
    from pyspark.daemon import manager

    # Otherwise the garbage collector would write into every object and so copy memory that the forks share.
    gc.freeze()
    manager()


def _preload() -> None:
    # A question for GPUs would otherwise start CUDA in this process, and then no fork could use CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "numpy" in sys.modules:
        # Without a new seed, all forks would draw the same numbers.
        os.register_at_fork(after_in_child=importlib.import_module("numpy").random.seed)


def _list_archives_once() -> None:
    """Keeps the listing of an archive on sys.path until its file changes.

    Every task of PySpark invalidates the caches of importlib. Then Python lists an archive again for each
    package in it: Spark's pyspark.zip and its spark-core.jar, which has 5000 entries.
    """
    list_anew = zipimport.zipimporter.invalidate_caches
    listed: WeakKeyDictionary[zipimport.zipimporter, tuple[int, int, int]] = WeakKeyDictionary()

    def invalidate_caches(importer: zipimport.zipimporter) -> None:
        try:
            status = os.stat(importer.archive)
        except OSError:
            listed.pop(importer, None)
            list_anew(importer)
            return
        state = (status.st_ino, status.st_mtime_ns, status.st_size)
        if listed.get(importer) != state:
            list_anew(importer)
            listed[importer] = state

    zipimport.zipimporter.invalidate_caches = invalidate_caches  # type: ignore[assignment, method-assign]


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Sends output of libraries to standard error: Spark reads the daemon's port from standard output."""
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
