"""The Spark session of a fit, and the folder that its shards and runs go to."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from contextlib import suppress
from functools import cache

from pyspark.sql import SparkSession

from ringspark.pipelines import storage


def active_session() -> SparkSession:
    """The session of this thread, or else of this process.

    Raises:
        ValueError: There is none.
    """
    # A thread that did not make the session has none of its own.
    session = SparkSession.getActiveSession() or getattr(SparkSession, "_instantiatedSession", None)
    if session is None:
        raise ValueError("no Spark session is active; make one with SparkSession.builder.getOrCreate()")
    return session


def storage_root(spark: SparkSession, storage_uri: str | None) -> str:
    """The folder that fits make theirs in, checked to be writable.

    Raises:
        ValueError: None was given and the master is not local, or it cannot be written.
    """
    root = storage_uri or _session_folder(spark.conf.get("spark.master", "") or "")
    with suppress(OSError):
        # Made first, and kept: fits that run side by side must not remove it under each other.
        storage.make_dirs(storage.normalize(root))
    storage.check_writable(root)
    return storage.normalize(root)


def _session_folder(master: str) -> str:
    if not master.startswith("local"):
        raise ValueError(
            f"storageUri is not set; on master {master!r} give a folder that driver and executors share"
        )
    return _temporary_folder()


@cache
def _temporary_folder() -> str:
    """One folder a process, removed when it ends; models of a session without storageUri live there."""
    folder = tempfile.mkdtemp(prefix="ringspark-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
