"""Removes folders. No other code of this package does, so that it removes only what this package wrote.

A stage, a job file or a manifest from somebody else may name any folder, and people keep their own files in
folders of ours. So a caller says which paths the maker of the folder writes, and which file in the folder
shows who made it.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ringspark.pipelines import storage

FOLDER_PREFIX = "_shards-"
FILES = r"part-[^/]+\.parquet"
SHARDS = rf"manifest\.json|{FOLDER_PREFIX}[0-9a-f]+/{FILES}"
"""Regular expression of the paths below a folder that `write_shards` writes."""

# Temporary files of `storage.write_atomic` and `storage.check_writable` whose process was killed.
TEMPORARY = r"(?:.+/)?\.[^/]+[.-][0-9a-f]{8,}"

_logger = logging.getLogger(__name__)


def find_foreign(uri: str, paths: str) -> str | None:
    """Returns a path below a folder that neither matches the regular expression nor is temporary."""
    made = re.compile(f"{paths}|{TEMPORARY}")
    return next((path for path in list_paths(uri) if path and not made.fullmatch(path)), None)


def list_paths(uri: str) -> Iterator[str]:
    """Yields the paths of all files and links below a folder; "" if `uri` is a file itself."""
    fs, root = storage.filesystem(uri)
    if storage.is_local(uri):
        for folder, folders, files in os.walk(root):
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            yield from (os.path.relpath(os.path.join(folder, name), root) for name in files + links)
        return
    fs.invalidate_cache()
    with storage.store_errors(uri), suppress(FileNotFoundError):
        root = str(fs._strip_protocol(root)).rstrip("/")
        yield from (str(path)[len(root) :].lstrip("/") for path in fs.find(root))


def remove_folder(
    uri: str, paths: str, mark: str | None = None, is_mine: Callable[[bytes], bool] | None = None
) -> None:
    """Removes a folder that this package made, or a file of it. Does nothing if there is none.

    Args:
        paths: Regular expression of the paths below the folder that its maker writes.
        mark: Name of the file in the folder that shows who made it; None if nobody else can have made it.
        is_mine: Whether the content of `mark` names the caller, such as this run.

    Raises:
        ValueError: The folder is a link, lacks the mark, belongs to somebody else, or holds another file.
            Nothing is removed.
    """
    if not storage.exists(uri):
        return
    check_removal(uri, paths, mark, is_mine)
    if mark is not None:  # first: without it the folder counts as removed, and no rank writes into a run
        storage.remove(storage.join(uri, mark))
    storage.remove(uri, recursive=True)


def check_removal(
    uri: str, paths: str, mark: str | None = None, is_mine: Callable[[bytes], bool] | None = None
) -> None:
    """Raises ValueError if `remove_folder` would refuse the folder, which exists."""
    if storage.is_local(uri) and os.path.islink(uri):
        raise ValueError(f"{uri!r} is a link, so the folder behind it is kept; remove the link yourself")
    if mark is not None:
        try:
            known = storage.read_bytes(storage.join(uri, mark))
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(
                f"{uri!r} is kept, because it has no {mark!r} that shows who made it; remove it yourself"
            ) from None
        if is_mine is not None and not is_mine(known):
            raise ValueError(
                f"{uri!r} is kept, because its {mark!r} is of another run or job than this one; remove it "
                "yourself"
            )
    if (other := find_foreign(uri, paths)) is not None:
        raise ValueError(
            f"{uri!r} is kept, because it holds {other!r}, which ringspark did not write there; move that "
            "file elsewhere"
        )


def discard(
    uri: str, paths: str, mark: str | None = None, is_mine: Callable[[bytes], bool] | None = None
) -> None:
    """Calls `remove_folder`, and only logs a failure, which must replace neither a result nor an error."""
    try:
        remove_folder(uri, paths, mark, is_mine)
    except (OSError, ValueError) as error:
        _logger.warning("could not remove %s: %s", uri, error)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """Yields the URI of a new folder, `prefix` and random digits, and removes it with all its files."""
    uri = f"{prefix}{uuid.uuid4().hex}"
    try:
        yield uri
    finally:
        remove_folder(uri, ".+")
