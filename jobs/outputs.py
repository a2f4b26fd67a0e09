"""Folders that jobs write and may replace: each has a file that names the job and what the job wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ringspark.pipelines import storage
from ringspark.pipelines.folder_removal import discard, list_paths, remove_folder
from ringspark.pipelines.typed_json import parse_object

# Spark ignores names that begin with an underscore.
MARK = "_ringspark.json"


def mark_output(uri: str, job: str) -> None:
    """Records which job has written the files of a folder."""
    known = {"job": job, "files": sorted(list_paths(uri))}
    storage.write_atomic(storage.join(uri, MARK), json.dumps(known).encode())


@contextmanager
def new_output(uri: str, job: str) -> Iterator[None]:
    """Context for writing a new folder of rows; marks the folder at the end.

    A failed write leaves no folder, because a later run of the job refuses to replace an unmarked folder.
    """
    is_there = storage.exists(uri)  # then it belongs to someone else, and Spark refuses to write
    try:
        yield
        mark_output(uri, job)
    except BaseException as error:
        if not is_there and "PATH_ALREADY_EXISTS" not in str(error):  # or was made since by another job
            discard(uri, r"(_temporary/.+|[^/]*part-[^/]*|[^/]*_SUCCESS[^/]*)")
        raise


def remove_output(uri: str, job: str, remove: Callable[..., None] = remove_folder) -> None:
    """Removes a folder that an earlier start of the same job has written; refuses any other folder."""
    files = [MARK, f".{MARK}.crc"]
    with suppress(OSError, ValueError, LookupError, TypeError):  # `remove_folder` then refuses the folder
        files += parse_object(storage.read_bytes(storage.join(uri, MARK)))["files"]
    paths = "|".join(re.escape(str(file)) for file in files)
    remove(uri, paths, MARK, lambda content: parse_object(content).get("job") == job)
