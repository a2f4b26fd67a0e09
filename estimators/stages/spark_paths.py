"""The place at which a stage is saved, so that a Pipeline's stages of Spark and of ours lie together."""

from __future__ import annotations

import os

from ringspark.estimators.stages.storage_root import find_session
from ringspark.pipelines import storage
from ringspark.pipelines.spark_paths import resolve


def meaning_of(path: str) -> str:
    """Returns the URI, as `storage.normalize` spells it, of what Spark means by `path`. Runs on the driver.

    Raises:
        ValueError: It lies where this process cannot reach it; the message says what to give instead.
    """
    session = find_session()
    if session is None:
        return storage.normalize(path)
    if path.startswith("~"):
        # Spark would write its part of a Pipeline there, and ours would lie in the home folder.
        raise ValueError(
            f"{path!r} is a folder named '~' to Spark; give the whole path, {os.path.expanduser(path)!r}"
        )
    found = resolve(session, path)
    if path.startswith("/dbfs/") and found.startswith("file://"):
        raise ValueError(
            f"{path!r} is {'dbfs:' + path!r} to Spark, and to Python the mount of {'dbfs:' + path[5:]!r}; "
            "give one of these two"
        )
    return storage.normalize(found)
