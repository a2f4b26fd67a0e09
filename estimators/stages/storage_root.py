"""Finds the Spark session of a fit, and the folder for its shards and runs."""

from __future__ import annotations

import atexit
import tempfile
from contextlib import suppress
from functools import cache

from pyspark.sql import SparkSession

from ringspark.pipelines import storage
from ringspark.pipelines.spark_paths import resolve


def active_session() -> SparkSession:
    session = find_session()
    if session is None:
        raise ValueError("no Spark session is active; make one with SparkSession.builder.getOrCreate()")
    return session


def find_session() -> SparkSession | None:
    """Returns the session of this thread, or else of this process; None if there is none."""
    # Only the thread that made the session has it as its active one.
    found: SparkSession | None = SparkSession.getActiveSession() or getattr(
        SparkSession, "_instantiatedSession", None
    )
    return found


def storage_root(spark: SparkSession, storage_uri: str | None) -> str:
    """Returns the parent folder of all fits, after checking that it can be written."""
    if storage_uri:
        root = storage.normalize(resolve(spark, storage_uri))
    else:
        root = _session_folder(spark.conf.get("spark.master", "") or "")
    with suppress(OSError):
        # Made first and kept, because a fit must not remove it while another one uses it.
        storage.make_dirs(root)
    storage.check_writable(root)
    return root


def _session_folder(master: str) -> str:
    if not master.startswith("local"):
        raise ValueError(
            f"storageUri is not set; on master {master!r} give a folder that driver and executors share"
        )
    return _temporary_folder()


@cache
def _temporary_folder() -> str:
    folder = tempfile.TemporaryDirectory(prefix="ringspark-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return folder.name
