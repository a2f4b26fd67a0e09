"""`cached_shards`: write the shards of a DataFrame, or return those that hold the same rows already.

What makes the rows is hashed: the analysed plan, the schema, the settings, the session's
configuration, and the state of every source file. Never who the DataFrame is: `id(df)` of a new
DataFrame may be that of an old one. Where Spark does not tell enough to exclude other rows, nothing is
reused. The risk is one-sided: a write too many costs time, a reuse too many trains on the wrong data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringspark.pipelines import storage
from ringspark.pipelines.manifest import FORMAT_VERSION, ShardManifest
from ringspark.pipelines.reuse import cache_entries
from ringspark.pipelines.reuse.cache_entries import Entry
from ringspark.pipelines.reuse.plan_fingerprint import PlanFingerprint, fingerprint
from ringspark.pipelines.reuse.source_files import FileState, file_states, total_bytes
from ringspark.pipelines.writing.shards import write_shards

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Raise it when the same key would mean other shards.
KEY_VERSION = 1

# Settings of the session that change how fast rows come, not which. All others count.
_ONLY_SPEED = re.compile(
    r"spark\.sql\.(?:shuffle|adaptive|warehouse|artifact|autoBroadcast|broadcast|codegen|execution\.arrow"
    r"|execution\.pyspark|files\.(?:max|min|open)|inMemoryColumnarStorage|ui|debug\.maxToStringFields"
    r"|maxMetadataStringLength|catalogImplementation|statistics|join\.prefer|streaming|repl|event)"
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where the rows come from, at one moment."""

    plan: PlanFingerprint
    files: tuple[FileState, ...]
    refusal: str | None


def cached_shards(df: DataFrame, root: str | os.PathLike[str], **settings: Any) -> ShardManifest:
    """Returns shards of `df` from the cache in `root`; writes them where there are none. Runs on the driver.

    The same plan over unchanged files, with the same settings, is written once. Rows that could come
    out differently the next time (data in memory, random numbers, the clock, Python functions, tables
    without files) are written on every call, and one logged line says why.

    Args:
        df: As for `write_shards`.
        root: Folder of the cache, which driver and executors share. Other files in it are left alone.
        settings: Keywords of `write_shards`, without `overwrite`.

    Returns:
        The manifest of shards that are complete; do not write to its folder.

    Raises:
        ValueError: As for `write_shards`; also for `overwrite`.
    """
    if "overwrite" in settings:
        raise ValueError(
            "cached_shards takes no 'overwrite': changed data is written anew; remove_cached removes the old"
        )
    if df.isStreaming:
        raise ValueError("cached_shards takes a batch DataFrame; call write_shards in foreachBatch")
    root = storage.normalize(root)
    described = _canonical(settings)
    source = _source(df)
    refusal = source.refusal
    if " at 0x" in described:
        refusal = "a setting has no text that tells its value"
    entry = _entry(df, source, described, refusal)
    if entry.refusal is None:
        entry, found = _find(root, entry)
        if found is not None:
            _logger.info("the shards in %r are used again", found.uri)
            return found
    else:
        _logger.warning("the shards are written anew and not reused: %s", entry.refusal)
    return _write(df, root, entry, source, settings)


def rows_key(df: DataFrame, **settings: Any) -> str | None:
    """A digest of all that makes the rows of `df`, for comparison with an earlier one.

    Equal digests mean equal rows; different ones need not mean different rows. Runs on the driver.

    Args:
        settings: What else decides which rows are meant.

    Returns:
        None where Spark does not tell enough: see `cached_shards`.
    """
    source = _source(df)
    described = _canonical(settings)
    if source.refusal is not None or " at 0x" in described:
        return None
    entry = _entry(df, source, described, None)
    return entry.key if entry.refusal is None else None


def _find(root: str, entry: Entry) -> tuple[Entry, ShardManifest | None]:
    """Returns the entry, with its final key, and its shards if they are there and whole."""
    stored = cache_entries.load_entry(cache_entries.folder_of(root, entry.key))
    if (
        stored is not None
        and stored.application == entry.application is not None
        and stored.semantic_hash != entry.semantic_hash
    ):
        # Equal texts, yet Spark knows a difference, such as another option of the reader.
        entry = _scoped(entry)
        stored = cache_entries.load_entry(cache_entries.folder_of(root, entry.key))
    if stored is None or stored.key != entry.key or stored.refusal is not None:
        return entry, None
    uri = storage.join(cache_entries.folder_of(root, entry.key), stored.run)
    try:
        manifest = ShardManifest.load(uri)
        manifest.verify_files()
    except ValueError as error:
        # Not removed: the fault may be this machine's, and another process may be reading them.
        _logger.warning("the cached shards in %r are damaged and written anew: %s", uri, error)
        return entry, None
    return entry, manifest


def _write(
    df: DataFrame, root: str, entry: Entry, source: _Source, settings: Mapping[str, Any]
) -> ShardManifest:
    storage.check_writable(root)
    run = cache_entries.begin(root, entry.key)
    uri = storage.join(cache_entries.folder_of(root, entry.key), run)
    try:
        manifest = write_shards(df, uri, **settings)
        entry = dataclasses.replace(entry, run=run)
        if entry.refusal is None:
            after = _source(df)
            if after != source:
                entry = dataclasses.replace(entry, refusal="its source files changed during the write")
                _logger.warning("source files changed while the shards in %r were written; not reused", uri)
            else:
                _, theirs = _find(root, entry)
                if theirs is not None:
                    # Another writer of the same rows was faster: one copy is enough.
                    cache_entries.abandon(root, entry.key, run)
                    return theirs
        cache_entries.publish(root, entry, manifest)
    except BaseException:
        cache_entries.abandon(root, entry.key, run)
        raise
    return manifest


def _source(df: DataFrame) -> _Source:
    """Asks Spark for the plan and its files, and the storage for the files' state."""
    plan = fingerprint(df)
    if plan.refusal is not None:
        return _Source(plan=plan, files=(), refusal=plan.refusal)
    try:
        files = file_states(df.inputFiles())
    except (OSError, ValueError, ImportError) as error:
        return _Source(plan=plan, files=(), refusal=f"its source files cannot be checked ({error})")
    least, most = plan.size_range
    refusal = None
    if not least <= total_bytes(files) <= most:
        # Spark would read the files by the old listing: a file that grew, only up to its old size.
        refusal = "its files are not those it was made from; build the DataFrame again"
    return _Source(plan=plan, files=files, refusal=refusal)


def _entry(df: DataFrame, source: _Source, settings: str, refusal: str | None) -> Entry:
    """The entry of these rows, before it is written."""
    application = df.sparkSession.conf.get("spark.app.id", None)
    plan = source.plan
    parts = {
        "version": [KEY_VERSION, FORMAT_VERSION],
        "plan": plan.text,
        "read_schemas": plan.read_schemas,
        "schema": df.schema.json(),
        "settings": settings,
        "session": _session(df.sparkSession),
        "files": source.files,
    }
    if refusal is None and not plan.is_portable and application is None:
        refusal = "its plan's text is ambiguous and the session has no application id"
    entry = Entry(
        key=_digest(parts) if refusal is None else _digest(uuid.uuid4().hex),
        run="",
        refusal=refusal,
        application=application,
        semantic_hash=df.semanticHash() if refusal is None else None,
        plan=plan.text,
        plan_summary=plan.summary,
        settings=settings,
        sources=_summary(source.files),
    )
    return entry if plan.is_portable or refusal is not None else _scoped(entry)


def _scoped(entry: Entry) -> Entry:
    """The same entry, recognised within its Spark application only: the hash means nothing outside."""
    return dataclasses.replace(entry, key=_digest([entry.key, entry.application, entry.semantic_hash]))


def _session(spark: SparkSession) -> dict[str, str | None]:
    """What the session is set to, as far as it may change the rows."""
    settings = {str(row[0]): str(row[1]) for row in spark.sql("SET").collect()}
    kept: dict[str, str | None] = {
        name: value
        for name, value in settings.items()
        if name.startswith("spark.sql.") and not _ONLY_SPEED.match(name)
    }
    # Their defaults come from the machine and the release, so they count also where nobody set them.
    for name in ("spark.sql.session.timeZone", "spark.sql.ansi.enabled", "spark.sql.caseSensitive"):
        kept[name] = spark.conf.get(name)
    kept["spark.version"] = spark.version
    return kept


def _canonical(value: Any) -> str:
    """The repr of a value, with the keys of dictionaries and the members of sets in order."""
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
