"""Removes folders. No other code of this package does, so that it removes only what this package wrote.

A stage, a job or a manifest of somebody else may name any folder, and people keep own files in our folders.
So a caller says which paths the folder's maker writes, and which file in it shows who made it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from ringspark.pipelines import storage

FOLDER_PREFIX = "_shards-"
FILES = r"part[^/]*\.parquet"
SHARD_PATHS = rf"{FILES}|manifest\.json|{FOLDER_PREFIX}\w+/{FILES}"
"""Regular expression of the paths below a folder of shards."""
# Temporary files of `storage.write_atomic` and `storage.check_writable` whose process was killed.
TEMPORARY = r"\.[^/]+[.-][0-9a-f]{8,}"

_logger = logging.getLogger(__name__)


def list_paths(uri: str) -> Iterator[str]:
    """Yields the paths of all files and links below a folder; nothing if `uri` is a file."""
    fs, root = storage.filesystem(uri)
    if storage.is_local(uri):
        for folder, folders, files in os.walk(root):
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            yield from (os.path.relpath(os.path.join(folder, name), root) for name in files + links)
        return
    fs.invalidate_cache()
    with storage.store_errors(uri):
        root = str(fs._strip_protocol(root)).rstrip("/")
        yield from filter(None, (str(path)[len(root) :].lstrip("/") for path in fs.find(root)))


def check_removal(
    uri: str, paths: str, mark: str | None = None, is_mine: Callable[[bytes], bool] | None = None
) -> None:
    """Raises ValueError if `remove_folder` would refuse a folder, which exists."""
    if storage.is_local(uri) and os.path.islink(uri):
        raise ValueError(f"{uri!r} is kept, because it is a link; remove the link yourself")
    if mark is not None:
        at = storage.join(uri, mark)
        if not storage.exists(at) or (is_mine is not None and not is_mine(storage.read_bytes(at))):
            raise ValueError(
                f"{uri!r} is kept, because no {mark!r} in it shows that this run or job made it; remove it "
                "yourself"
            )
    made = re.compile(rf"{paths}|(?:.+/)?{TEMPORARY}")
    if other := next((path for path in list_paths(uri) if not made.fullmatch(path)), None):
        raise ValueError(
            f"{uri!r} is kept, because it holds {other!r}, which ringspark did not write there; move that "
            "file elsewhere"
        )


def remove_folder(
    uri: str,
    paths: str,
    mark: str | None = None,
    is_mine: Callable[[bytes], bool] | None = None,
    *,
    keep_folder: bool = False,
) -> None:
    """Removes a folder or file that this package made, if it exists; raises ValueError if it must stay.

    `paths` is a regular expression of the paths below the folder that its maker writes. `mark` is the file
    that shows who made it; `is_mine` takes its content. Without a mark, only the caller can have made it.
    With `keep_folder`, only its content goes.
    """
    if storage.exists(uri):
        check_removal(uri, paths, mark, is_mine)
        if mark is not None:  # first: without it the folder counts as removed, and no rank writes into a run
            storage.remove(storage.join(uri, mark))
        for name in storage.list_names(uri) if keep_folder else [""]:
            storage.remove(storage.join(uri, name) if name else uri, recursive=True)


def discard(uri: str, *made: Any, keep_folder: bool = False) -> bool:
    """Calls `remove_folder`. Logs a failure, which must replace neither a result nor an error."""
    try:
        remove_folder(uri, *made, keep_folder=keep_folder)
    except (OSError, ValueError) as error:
        _logger.warning("could not remove %s: %s", uri, error)
        return False
    return True
