"""PySpark's daemon, with torch imported: the workers of a gang start seconds sooner.

    spark-submit --conf spark.python.daemon.module=ringspark.estimators.python_daemon ...

Spark forks the Python workers of an executor from one daemon, so what the daemon has imported costs a worker
nothing. Otherwise every rank imports torch again whenever a gang is started anew: 3 to 5 s of CPU each.

ringspark must be installed where the executors run: the daemon starts before Spark ships any file.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator

# What a rank imports and what takes long; those that are not installed are left out.
_PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "horovod.torch",
    "petastorm",
    "ringspark.estimators.launch.gang_task",
    "ringspark.estimators.training.worker",
)


def main() -> None:
    """Imports, then serves Spark until it ends."""
    with _quiet_stdout():
        _preload()
    from pyspark.daemon import manager

    # The collector would write into every object, and so copy the memory that the forks share.
    gc.freeze()
    manager()  # type: ignore[no-untyped-call]


def _preload() -> None:
    # Asked for GPUs, torch would start CUDA in this process, and no fork could use it any more.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "numpy" in sys.modules:
        # Forks would draw the same numbers.
        os.register_at_fork(after_in_child=importlib.import_module("numpy").random.seed)


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Sends what libraries print to standard error: Spark reads the daemon's port from standard output."""
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
