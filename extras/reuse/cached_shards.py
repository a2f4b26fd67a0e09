"""`cached_shards`: writes the shards of a DataFrame, or returns the shards with the same key."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringspark.extras.reuse import cache_entries
from ringspark.pipelines import storage
from ringspark.pipelines.kinds import Kind
from ringspark.pipelines.manifest import FORMAT_VERSION, MANIFEST_NAME, ShardManifest
from ringspark.pipelines.spark_paths import resolve, to_spark_uri
from ringspark.pipelines.writing.shards import write_shards

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Increase it when equal rows become other bytes in a shard.
_BYTES_VERSION = 1

_logger = logging.getLogger(__name__)


def cached_shards(df: DataFrame, root: str | os.PathLike[str], *, key: str, **settings: Any) -> ShardManifest:
    """Returns shards from the cache in `root`; writes the rows of `df` if there are none. Runs on the driver.

    Shards are reused if the key, the columns with their types, and the settings are equal, also by another
    Spark application. The rows are not compared: give another key when they change.

    Args:
        df: A DataFrame that `write_shards` accepts.
        root: Folder of the cache, which driver and executors can reach; Spark resolves a path without a
            scheme.
        key: Version of the rows, such as the query's name with a table version or a date.
        settings: Keyword arguments of `write_shards`, except `overwrite`.

    Returns:
        The manifest of complete shards. Do not write to their folder.

    Raises:
        ValueError: `key` is empty, `overwrite` is given, or `write_shards` refuses an argument.
    """
    if not isinstance(key, str) or not key:
        raise ValueError(f"key must be a text that names the version of the rows, got {key!r}")
    if "overwrite" in settings:
        raise ValueError(
            "cached_shards takes no 'overwrite', because it writes changed data again; to remove old shards, "
            "call remove_cached"
        )
    if df.isStreaming:
        raise ValueError("cached_shards takes a batch DataFrame; call write_shards in foreachBatch")
    root = storage.normalize(resolve(df.sparkSession, root))
    folder = cache_entries.folder_of(root, _digest(df, key, settings))
    found = _find(folder)
    if found is None:
        return _write(df, folder, key, settings)
    _logger.info("the shards in %r are reused", found.uri)
    return replace(found, uri=to_spark_uri(df.sparkSession, found.uri))


def _find(folder: str) -> ShardManifest | None:
    if not storage.exists(storage.join(folder, MANIFEST_NAME)):
        return None
    try:
        manifest = ShardManifest.load(folder)
        manifest.verify_files()
    except ValueError as error:
        _logger.warning("the cached shards in %r are damaged and written again: %s", folder, error)
        return None
    return manifest


def _write(df: DataFrame, folder: str, key: str, settings: Mapping[str, Any]) -> ShardManifest:
    is_damaged = storage.exists(storage.join(folder, MANIFEST_NAME))
    storage.check_writable(folder)
    cache_entries.mark(folder, key)
    uri = to_spark_uri(df.sparkSession, folder)
    try:
        manifest = write_shards(df, uri, overwrite=is_damaged, **settings)
    except BaseException as error:
        cache_entries.abandon(folder)
        if isinstance(error, ValueError) and (theirs := _find(folder)) is not None:
            # Another writer with the same key was faster, and one copy is enough.
            return replace(theirs, uri=uri)
        raise
    # Again, because a concurrent writer that failed may have removed the marker.
    cache_entries.mark(folder, key)
    return manifest


def _digest(df: DataFrame, key: str, settings: Mapping[str, Any]) -> str:
    versions = [_BYTES_VERSION, FORMAT_VERSION]
    text = json.dumps([versions, key, df.schema.json(), settings], sort_keys=True, default=_to_json)
    return hashlib.sha256(text.encode()).hexdigest()


def _to_json(value: Any) -> Any:
    return value.to_json() if isinstance(value, Kind) else repr(value)
