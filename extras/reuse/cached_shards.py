"""`cached_shards`: writes the shards of a DataFrame, or returns existing shards with the same rows.

The cache's key is a hash of the plan, the schema, the settings, the session's configuration and the state of
every source file. If Spark reports too little to be sure that the rows are the same, nothing is reused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ringspark.extras.reuse import cache_entries
from ringspark.extras.reuse.cache_entries import CacheEntry
from ringspark.pipelines import storage
from ringspark.pipelines.kinds import Kind
from ringspark.pipelines.manifest import FORMAT_VERSION, ShardManifest
from ringspark.pipelines.plan_fingerprint import PlanFingerprint, fingerprint
from ringspark.pipelines.source_files import FileState, file_states, total_bytes
from ringspark.pipelines.spark_paths import resolve, to_spark_uri
from ringspark.pipelines.writing.shards import write_shards

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Session settings that change the speed, not the rows.
_ONLY_SPEED = re.compile(
    r"spark\.sql\.(?:shuffle|adaptive|warehouse|artifact|autoBroadcast|broadcast|codegen|execution\.arrow"
    r"|execution\.pyspark|files\.(?:max|min|open)|inMemoryColumnarStorage|ui|debug\.maxToStringFields"
    r"|maxMetadataStringLength|catalogImplementation|statistics|join\.prefer|streaming|repl|event)"
)

# Increase it when equal rows become other bytes in a shard.
_BYTES_VERSION = 1

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Plan and source files of a DataFrame at one moment; either `key` or `refusal` is None."""

    plan: PlanFingerprint
    files: tuple[FileState, ...] = ()
    key: str | None = None
    refusal: str | None = None


def cached_shards(df: DataFrame, root: str | os.PathLike[str], **settings: Any) -> ShardManifest:
    """Returns shards of `df` from the cache in `root`; writes them if there are none. Runs on the driver.

    A plan over unchanged files, with the same settings, is written once per Spark application. If the rows
    could differ the next time, they are written on every call, and a logged line gives the reason. Examples
    are data in memory, random numbers, the clock, Python functions, and tables without files.

    Args:
        df: A DataFrame that `write_shards` accepts.
        root: Folder of the cache, which driver and executors can reach; Spark resolves a path without a
            scheme.
        settings: Keyword arguments of `write_shards`, except `overwrite`.

    Returns:
        The manifest of complete shards. Do not write to their folder.

    Raises:
        ValueError: `overwrite` is given, or `write_shards` refuses an argument.
    """
    if "overwrite" in settings:
        raise ValueError(
            "cached_shards takes no 'overwrite', because it writes changed data again; to remove old shards, "
            "call remove_cached"
        )
    if df.isStreaming:
        raise ValueError("cached_shards takes a batch DataFrame; call write_shards in foreachBatch")
    root = storage.normalize(resolve(df.sparkSession, root))
    source = _source(df, settings)
    if source.key is None:
        _logger.warning(
            "the DataFrame is written again, because its shards cannot be reused: %s", source.refusal
        )
    elif (found := _find(root, source.key)) is not None:
        _logger.info("the shards in %r are reused", found.uri)
        return replace(found, uri=to_spark_uri(df.sparkSession, found.uri))
    return _write(df, root, source, settings)


def rows_key(df: DataFrame, **settings: Any) -> str | None:
    """Returns a hash of everything that determines the rows of `df`; None if Spark does not report enough.

    Equal hashes mean equal rows. The hashes of two Spark applications always differ.
    """
    return _source(df, settings).key


def _find(root: str, key: str) -> ShardManifest | None:
    folder = cache_entries.folder_of(root, key)
    stored = cache_entries.load_entry(folder)
    if stored is None or stored.key != key or stored.refusal is not None:
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


def _write(df: DataFrame, root: str, source: _Source, settings: Mapping[str, Any]) -> ShardManifest:
    storage.check_writable(root)
    key, refusal = source.key or _digest(uuid.uuid4().hex), source.refusal
    run = cache_entries.begin(root, key)
    uri = storage.join(cache_entries.folder_of(root, key), run)
    try:
        manifest = write_shards(df, to_spark_uri(df.sparkSession, uri), **settings)
        if refusal is None:
            if _source(df, settings) != source:
                refusal = "its source changed during the write"
                _logger.warning("the source changed while the shards in %r were written; not reused", uri)
            elif (theirs := _find(root, key)) is not None:
                # Another writer of the same rows was faster, and one copy is enough.
                cache_entries.abandon(root, key, run)
                return replace(theirs, uri=to_spark_uri(df.sparkSession, theirs.uri))
        entry = CacheEntry(
            key=key,
            run=run,
            refusal=refusal,
            plan=source.plan.text,
            plan_summary=source.plan.summary,
            settings=_canonical(settings),
            sources=_summary(source.files),
        )
        cache_entries.publish(root, entry, manifest)
    except BaseException:
        cache_entries.abandon(root, key, run)
        raise
    return manifest


def _source(df: DataFrame, settings: Mapping[str, Any]) -> _Source:
    plan = fingerprint(df)
    if plan.refusal is not None:
        return _Source(plan=plan, refusal=plan.refusal)
    try:
        files = file_states(df.inputFiles())
    except (OSError, ValueError, ImportError) as error:
        return _Source(plan=plan, refusal=f"its source files cannot be checked ({error})")
    least, most = plan.size_range
    application = df.sparkSession.conf.get("spark.app.id", None)
    described = _canonical(settings)
    refusal = None
    if not least <= total_bytes(files) <= most:
        # Spark would read the files by the old listing, so a grown file only up to its old size.
        refusal = "its files have changed since it was created; create the DataFrame again"
    elif application is None:
        refusal = "the session has no application id, and a plan is only valid in one application"
    elif " at 0x" in described:
        refusal = "the text of a setting has a memory address instead of a value"
    if refusal is not None:
        return _Source(plan=plan, files=files, refusal=refusal)
    parts = {
        # Another ringspark in the same application may write other bytes.
        "version": [_BYTES_VERSION, FORMAT_VERSION],
        "application": application,
        "plan": [plan.semantic_hash, plan.text, plan.sources, plan.options],
        "schema": df.schema.json(),
        "settings": described,
        # Defaults belong to the application.
        "session": {
            row[0]: row[1]
            for row in df.sparkSession.sql("SET").collect()
            if row[0].startswith("spark.sql.") and not _ONLY_SPEED.match(row[0])
        },
        "files": files,
    }
    return _Source(plan=plan, files=files, key=_digest(parts))


def _canonical(value: Any) -> str:
    if isinstance(value, Kind):
        return f"{value!r} {_digest(value.to_json())[:20]}"
    if isinstance(value, Mapping):
        items = sorted((repr(key), _canonical(item)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in items) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(_canonical, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(_canonical, value)))})"
    return repr(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _summary(files: tuple[FileState, ...]) -> str:
    folders = sorted({path.rpartition("/")[0] for path, _, _ in files})
    shown = ", ".join(folders[:3]) + (f" and {len(folders) - 3} more folders" if len(folders) > 3 else "")
    return f"{len(files)} files, {total_bytes(files)} bytes" + (f" in {shown}" if shown else "")
