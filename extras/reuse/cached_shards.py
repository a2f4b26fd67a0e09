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
from ringspark.extras.reuse.cache_entries import CacheEntry
from ringspark.pipelines import storage
from ringspark.pipelines.kinds import Kind
from ringspark.pipelines.manifest import FORMAT_VERSION, ShardManifest
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
    digest = _digest(df, key, settings)
    found = _find(root, digest)
    if found is None:
        return _write(df, root, key, digest, settings)
    _logger.info("the shards in %r are reused", found.uri)
    return replace(found, uri=to_spark_uri(df.sparkSession, found.uri))


def _find(root: str, digest: str) -> ShardManifest | None:
    folder = cache_entries.folder_of(root, digest)
    stored = cache_entries.load_entry(folder)
    if stored is None or stored.digest != digest:
        return None
    uri = storage.join(folder, stored.run)
    try:
        manifest = ShardManifest.load(uri)
        manifest.verify_files()
    except ValueError as error:
        # The shards stay, because this machine may be at fault, and another process may be reading them.
        _logger.warning("the cached shards in %r are damaged and written again: %s", uri, error)
        return None
    return manifest


def _write(df: DataFrame, root: str, key: str, digest: str, settings: Mapping[str, Any]) -> ShardManifest:
    storage.check_writable(root)
    run = cache_entries.begin(root, key, digest)
    uri = storage.join(cache_entries.folder_of(root, digest), run)
    try:
        manifest = write_shards(df, to_spark_uri(df.sparkSession, uri), **settings)
        if (theirs := _find(root, digest)) is not None:
            # Another writer with the same key was faster, and one copy is enough.
            cache_entries.abandon(root, digest, run)
            return replace(theirs, uri=to_spark_uri(df.sparkSession, theirs.uri))
        cache_entries.publish(root, CacheEntry(key=key, digest=digest, run=run), manifest)
    except BaseException:
        cache_entries.abandon(root, digest, run)
        raise
    return manifest


def _digest(df: DataFrame, key: str, settings: Mapping[str, Any]) -> str:
    versions = [_BYTES_VERSION, FORMAT_VERSION]
    text = json.dumps([versions, key, df.schema.json(), settings], sort_keys=True, default=_to_json)
    return hashlib.sha256(text.encode()).hexdigest()


def _to_json(value: Any) -> Any:
    return value.to_json() if isinstance(value, Kind) else repr(value)
