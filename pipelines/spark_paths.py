"""Resolves a user's path in the same way as Spark, so that every writer and reader means the same place.

A path without a scheme is in Hadoop's default file system (`fs.defaultFS`); without a Spark session it is on
the local disk. With Spark Classic, the JVM's Hadoop is queried. A Spark Connect server shows its default file
system in an error message about a missing file.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ringspark.pipelines import storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_logger = logging.getLogger(__name__)
# Cached answers of Spark Connect servers, because each question is a round trip.
_DEFAULTS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def is_remote(spark: SparkSession) -> bool:
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_local(conf: Mapping[str, str]) -> bool:
    """Returns whether driver and executor are one process, judged by the application's configuration."""
    master = conf.get("spark.master", "")
    return master == "local" or master.startswith("local[")


def resolve(spark: SparkSession, path: str | os.PathLike[str]) -> str:
    """Returns the URI of the place that Spark means by `path`; the URI is valid for Spark and for fsspec.

    Runs on the driver. On Databricks, "/dbfs/x" is the mount of "dbfs:/x". Raises ValueError if this process
    cannot reach the place.
    """
    text = os.fspath(path)
    storage.refuse_secrets(text)
    is_whole = "::" in text or ("://" in text and not text.startswith(("viewfs:", "file:", "hdfs:///")))
    on_databricks = "DATABRICKS_RUNTIME_VERSION" in os.environ
    if not text or is_whole or (on_databricks and text.startswith("/Volumes/")):
        return storage.normalize(text)
    if text.startswith("file:") or (on_databricks and text.startswith("/dbfs/")):
        return to_spark_uri(spark, storage.normalize(text))
    default = _default_file_system(spark)
    if default.startswith("file:") and text.startswith(("/", "~")):
        return storage.normalize(text)
    if not default:
        raise ValueError(
            f"the Spark Connect server does not report the store of {text!r}; pass a complete URI"
        )
    if text.startswith("~"):
        raise ValueError(
            f"to Spark, {text!r} is in a folder named '~' in {default}; pass the whole path, or "
            f"{'file:' + os.path.expanduser(text)!r} for the local disk"
        )
    found = _reachable(text, _by_hadoop(spark, text) if not is_remote(spark) else _below(default, text))
    if text.startswith("/") and os.path.isdir(text) and not _may_be_there(found):
        _logger.warning(
            "Spark resolves %r to %r, which does not exist; pass %r to use the local folder",
            text, found, f"file:{text}",
        )  # fmt: skip
    return to_spark_uri(spark, found)


def to_spark_uri(spark: SparkSession, uri: str) -> str:
    """Converts a URI of `storage.normalize` to the spelling that means the same place to Spark."""
    is_volume = uri.startswith("/Volumes/") and "DATABRICKS_RUNTIME_VERSION" in os.environ
    if not storage.is_local(uri) or is_volume or _default_file_system(spark).startswith("file:"):
        return uri
    return f"file://{uri}"


def _reachable(path: str, found: str) -> str:
    if found.startswith("dbfs:"):
        mounted = storage.mount_of(found)
        if not os.path.isdir("/" + mounted.split("/")[1]):
            raise ValueError(
                f"Spark resolves {path!r} to {found}, which is not mounted on this machine; pass a folder in "
                "/Volumes, or a URI of the cloud's store"
            )
        return storage.normalize(mounted)
    if found.startswith("viewfs:"):
        raise ValueError(
            f"Spark resolves {path!r} to {found!r}, a mount that only Hadoop knows; pass the URI of the "
            "mounted store"
        )
    return storage.normalize(found)


def _may_be_there(uri: str) -> bool:
    with suppress(OSError, ValueError):
        return storage.exists(uri)
    return True


def _default_file_system(spark: Any) -> str:
    """Returns the root URI of Hadoop's default file system; "" if Spark Connect does not report it."""
    if not is_remote(spark):
        conf = spark._jsc.hadoopConfiguration()
        return str(spark._jvm.org.apache.hadoop.fs.FileSystem.getDefaultUri(conf).toString())
    missing = f"/ringspark-{uuid.uuid4().hex}"
    try:
        if spark not in _DEFAULTS:
            spark.read.text(missing).schema  # noqa: B018  sends the request
    except Exception as error:
        if found := re.search(rf"(\w+:\S*?){missing}", str(error)):
            _DEFAULTS[spark] = found[1]
    return _DEFAULTS.get(spark, "")


def _below(default: str, path: str) -> str:
    if default.startswith("file:") or re.match(r"[a-zA-Z][\w+.-]*:", path):
        return path
    if not path.startswith("/"):
        raise ValueError(
            f"{path!r} is below a folder that only the Spark Connect server knows; pass the whole path"
        )
    return f"{default}/{path.lstrip('/')}"


def _by_hadoop(spark: Any, path: str) -> str:
    hadoop = spark._jvm.org.apache.hadoop.fs
    try:
        place = hadoop.Path(path)
        files = place.getFileSystem(spark._jsc.hadoopConfiguration())
        place = files.makeQualified(place)
        if place.toUri().getScheme() == "viewfs":
            # Only existing folders can be resolved: the nearest parent, then the rest of the path.
            rest: list[str] = []
            while not files.exists(place):
                rest.insert(0, place.getName())
                place = place.getParent()
            return storage.join(str(files.resolvePath(place).toString()), *rest)
        return str(place.toString())
    except Exception as error:  # from Hadoop, through py4j
        # The first line names a variable of py4j, the second line has the cause.
        reason = str(error).strip().splitlines()[:2][-1].strip(": ")
        raise ValueError(f"Spark cannot resolve {path!r} ({reason}); pass a complete URI") from error
