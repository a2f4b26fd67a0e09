"""The place that a path means to Spark, so that a Pipeline's stages of Spark and of ours are saved together.

A path without a scheme lies in Hadoop's default file system (`fs.defaultFS`), which on YARN, HDFS and
Databricks is not the local disk. Spark Classic asks Hadoop in the driver's JVM, mount tables of `viewfs`
included. Through Spark Connect the server is asked, in its words about a file that is not there.
"""

from __future__ import annotations

import os
import re
import uuid
from typing import Any

from pyspark.sql import SparkSession

from ringspark.estimators.stages.session import is_remote
from ringspark.estimators.stages.storage_root import find_session
from ringspark.pipelines import storage


def meaning_of(path: str) -> str:
    """Returns the URI, as `storage.normalize` spells it, of what Spark means by `path`. Runs on the driver.

    Raises:
        ValueError: It lies where this process cannot reach it; the message says what to give instead.
    """
    storage.refuse_secrets(path)
    if path.startswith("~"):
        # Spark would write its part of a Pipeline there, and ours would lie in the home folder.
        raise ValueError(
            f"{path!r} is a folder named '~' to Spark; give the whole path, {os.path.expanduser(path)!r}"
        )
    session = find_session()
    # A whole URI means the same to fsspec. "hdfs:/x" is none: it leaves the host to Hadoop's conf.
    is_whole = "::" in path or path.startswith("file:") or ("://" in path and not path.startswith("viewfs:"))
    if not path or is_whole or session is None:
        return storage.normalize(path)
    found = _by_server(session, path) if is_remote(session) else _by_hadoop(session, path)
    if found.startswith("dbfs:"):
        inside = "/" + found.removeprefix("dbfs:").lstrip("/")
        found = inside if inside.startswith("/Volumes/") else f"/dbfs{inside}"
        if not os.path.isdir("/" + found.split("/")[1]):
            raise ValueError(
                f"{path!r} is dbfs:{inside} to Spark, and this machine has no mount of it; give a folder in "
                "/Volumes, or a URI of the cloud's store"
            )
    if found.startswith("viewfs:"):
        raise ValueError(
            f"{path!r} is {found!r} to Spark, a mount that only Hadoop knows; give the URI of the store "
            "behind it"
        )
    # Hadoop writes a path as it is; only in a URI that a user gives may a "%" stand for something else.
    if found.startswith("file:"):
        found = "/" + found.removeprefix("file:").lstrip("/")
    return storage.normalize(found)


def _by_hadoop(session: Any, path: str) -> str:
    hadoop = session._jvm.org.apache.hadoop.fs
    conf = session._jsc.hadoopConfiguration()
    place = hadoop.Path(path)
    files = place.getFileSystem(conf)
    place = files.makeQualified(place)
    if place.toUri().getScheme() == "viewfs":
        # Only what is there can be resolved: the nearest folder above, then the rest of the way.
        rest: list[str] = []
        while not files.exists(place):
            rest.insert(0, place.getName())
            place = place.getParent()
        return storage.join(str(files.resolvePath(place).toString()), *rest)
    return str(place.toString())


def _by_server(session: SparkSession, path: str) -> str:
    """Asks the Connect server for its default file system, which stands in its error about a missing file."""
    missing = f"/ringspark-{uuid.uuid4().hex}"
    try:
        session.read.text(missing).schema  # noqa: B018  it asks the server
    except Exception as error:
        if found := re.search(rf"(\w+:\S*?){missing}", str(error)):
            root = found[1]
            is_local = root.startswith("file:") or re.match(r"[a-zA-Z][\w+.-]*:", path)
            return path if is_local else f"{root}/{path.lstrip('/')}"
    raise ValueError(f"the Spark Connect server does not say where {path!r} is; give a URI with its store")
