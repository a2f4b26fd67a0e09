"""Files behind a URI, through fsspec: local disks, object stores, HDFS.

Nothing else in `pipelines` knows where a file lives. The invariant kept here:
a file written by `write_atomic` is either absent, or the old bytes, or the new
bytes, never a part of them. That is what lets a manifest be the commit.

Errors of a store's client arrive as OSError. Nothing here tries again, because
the clients already retry requests as small as these several times (see
`readers.retry` for the reads that are tried again).
"""

from __future__ import annotations

import asyncio
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from fsspec.core import url_to_fs

from ringspark.pipelines.rename_once import rename_once

# A single put is atomic on these, while their "move" is a copy followed by a delete.
_ATOMIC_PUT = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"}

# Client errors that no further attempt can cure.
_NO_ACCESS = {"NoCredentialsError", "PartialCredentialsError", "ClientAuthenticationError", "ProfileNotFound"}

# Hadoop's short form of a URI.
_HOSTLESS = re.compile(r"([a-zA-Z][\w+.-]*:)/(?!/)")
# user:password@, and query parameters that grant access to whoever knows them. A password may hold a slash or
# an "@", as keys of S3 do; ports, of one host or several, and the "::" of a chain of URIs begin none. Its end
# is certain, and captured, if there is only one "@", or if none follows the first slash.
_PASSWORD = re.compile(
    r"(?<=://)[^/:\[?#]*:(?!:|\d{1,5}(?:,[^/:]*:\d{1,5})*[/?#])(?:((?:[^/]*|[^@]*)@)(?!.*@)|.*@.*)", re.DOTALL
)
_SECRET = re.compile(
    r"([?&][^=&#]*(?:sig|signature|token|secret|passw(?:or)?d|pwd|credential|key|keyid)=)([^&#]+)",
    re.IGNORECASE,
)


def redact(uri: str) -> str:
    """Returns the URI without passwords and tokens, fit for a message or a file."""
    return _SECRET.sub(r"\1***", _PASSWORD.sub(lambda found: "***:***@" if found[1] else "***", uri))


def redact_text(text: str) -> str:
    """Returns the text with passwords and tokens of its URIs redacted, see `redact`."""
    return "".join(redact(word) if "://" in word else word for word in re.split(r"(\s+)", text))


def refuse_secrets(uri: str) -> None:
    """Refuses a URI that holds a password or token: it would end up in logs, run directories, saved stages.

    Raises:
        ValueError: The URI holds one; the message shows the URI without it.
    """
    if redact(uri) != uri:
        raise ValueError(
            f"a storage URI must not hold a password or token, got {redact(uri)!r}; give the credentials in "
            "the environment or in fsspec's configuration (~/.config/fsspec), on driver and workers"
        )


def normalize(uri: str | os.PathLike[str]) -> str:
    """Returns the one spelling of `uri` used everywhere: absolute, without a trailing slash.

    Local paths and `file://` URIs become absolute paths, in which a "%" stands for itself, as to Spark and
    fsspec; `dbfs:/` becomes the `/dbfs` mount where there is one. Other URIs keep their scheme. A path
    without a scheme is taken for this machine's disk: what a session means by it says `spark_paths.resolve`.

    Raises:
        ValueError: `uri` is empty, or holds a password or token (see `refuse_secrets`).
    """
    text = os.fspath(uri)
    refuse_secrets(text)
    if not text:
        raise ValueError(
            "a storage URI must not be empty; pass a folder such as '/data/shards' or 's3://bucket/shards'"
        )
    if text.startswith("dbfs:/") and os.path.isdir("/dbfs"):
        text = mount_of(text)
    if text.startswith("file:"):
        path = text[len("file:") :]
        if path.startswith("//"):
            # The authority is empty or localhost; file://host/path is not supported.
            path = path[2:].removeprefix("localhost")
        text = path
    if is_local(text):
        if scheme := _HOSTLESS.match(text):
            raise ValueError(
                f"{text!r} leaves the host of its store to Hadoop's configuration; give it, as in "
                f"{scheme[1] + '//host' + text[len(scheme[1]) :]!r}, or a folder that is mounted here"
            )
        return os.path.abspath(os.path.expanduser(text))
    return text.rstrip("/")


def mount_of(uri: str) -> str:
    """Returns the path at which Databricks mounts a `dbfs:/` URI."""
    inside = "/" + uri.removeprefix("dbfs:").lstrip("/")
    return inside if inside.startswith("/Volumes/") else f"/dbfs{inside}"


def is_local(uri: str) -> bool:
    """Whether `uri` is a path on this machine's file system."""
    return "://" not in uri and "::" not in uri


def join(uri: str, *parts: str) -> str:
    """Joins path parts below `uri` with forward slashes."""
    return "/".join([uri.rstrip("/") or "/", *parts]) if uri != "/" else "/" + "/".join(parts)


def check_inside(folder: str, name: str) -> None:
    """Refuses a file that a link leads out of its local folder; other stores have no links.

    Raises:
        ValueError: The file is outside, or `name` cannot be the name of a file.
    """
    if not is_local(folder):
        return
    try:
        root = os.path.realpath(folder)
        target = os.path.realpath(os.path.join(folder, name))
    except ValueError as error:  # a NUL in the name
        raise ValueError(f"{name!r} is no name of a file: {error}") from error
    if os.path.commonpath([root, target]) != root or target == root:
        raise ValueError(
            f"{join(folder, name)!r} is a link out of its folder; put the file itself there, or give the "
            "folder that it is in"
        )


def filesystem(uri: str) -> tuple[Any, str]:
    """Returns the fsspec file system of `uri` and the path inside it.

    Raises:
        ValueError: fsspec knows no such store, or the package that serves it is not installed.
    """
    try:
        fs, path = url_to_fs(uri)
    except (ValueError, ImportError) as error:
        raise ValueError(
            f"storage URI {redact(uri)!r} cannot be reached ({error}); install the fsspec package of that "
            "store, or give another URI such as '/data/shards' or 's3://bucket/shards'"
        ) from error
    return fs, path


@contextmanager
def store_errors(subject: str) -> Iterator[None]:
    """Turns the errors of a store's client into an OSError that says what was asked for.

    s3fs translates S3's answers, but where no answer comes it passes on the errors of botocore and
    aiohttp: EndpointConnectionError and ClientPayloadError are no OSErrors, and a timeout has no text.
    """
    try:
        yield
    except (asyncio.TimeoutError, TimeoutError) as error:  # two classes before Python 3.11
        reason = str(error) or str(error.__cause__ or "") or "timed out"
        raise TimeoutError(f"{subject}: {reason}") from error
    except (OSError, ValueError, LookupError, TypeError, ImportError, RuntimeError, MemoryError):
        raise
    except Exception as error:
        kind = PermissionError if type(error).__name__ in _NO_ACCESS else ConnectionError
        raise kind(f"{subject}: {type(error).__name__}: {error}") from error


class UnclaimedError(FileNotFoundError):
    """The folder is gone into which this process writes; see `only_where`."""

    def __init__(self, folder: str) -> None:
        super().__init__(f"{folder!r} was removed, so nothing more is written into it")


# The file that must be in a folder, by folder.
_claims: dict[str, str] = {}


@contextmanager
def only_where(folder: str, name: str) -> Iterator[None]:
    """Has this process write below a folder only while the file `name` is in it, so that it stays removed.

    Writes of all threads raise UnclaimedError otherwise.
    """
    _claims[folder] = name
    try:
        yield
    finally:
        _claims.pop(folder, None)


def _check_claim(uri: str) -> None:
    for folder, name in list(_claims.items()):
        if uri.startswith(f"{folder}/") and not exists(join(folder, name)):
            raise UnclaimedError(folder)


def _make_local_dirs(path: str) -> None:
    """Makes a folder and its parents, but not the folders of `only_where`: a look is not enough for these."""
    if os.path.isdir(path):
        return
    if path in _claims:
        raise UnclaimedError(path)
    _make_local_dirs(os.path.dirname(path))
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def open_file(uri: str, mode: str = "rb") -> IO[Any]:
    """Opens `uri`; the caller closes it. Reads and writes raise the errors of the store's client."""
    if mode != "rb":
        _check_claim(uri)
    fs, path = filesystem(uri)
    with store_errors(uri):
        return cast("IO[Any]", fs.open(path, mode))


def read_bytes(uri: str) -> bytes:
    """Returns the whole content of a small file."""
    fs, path = filesystem(uri)
    # A listing that was cached before another process committed would hide the file or show an old one.
    fs.invalidate_cache()
    with store_errors(uri):
        return cast(bytes, fs.cat_file(path))


def exists(uri: str) -> bool:
    """Whether a file or folder is there now; no cached listing is asked."""
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    with store_errors(uri):
        if is_local(uri):
            return bool(fs.exists(path))
        try:
            # Some clients' own `exists` says no when the store does not answer.
            fs.info(path)
        except FileNotFoundError:
            return False
    return True


def size(uri: str) -> int:
    """Returns the size of a file in bytes; raises FileNotFoundError if it is missing."""
    fs, path = filesystem(uri)
    with store_errors(uri):
        return int(fs.info(path)["size"])


def make_dirs(uri: str) -> None:
    """Makes the folder and its parents; does nothing on object stores or if the folder exists."""
    _check_claim(uri)
    fs, path = filesystem(uri)
    with store_errors(uri):
        if is_local(uri):
            _make_local_dirs(path)
        else:
            fs.makedirs(path, exist_ok=True)


def list_names(uri: str) -> list[str]:
    """Returns the sorted names directly inside a folder; an empty list if there is no such folder."""
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    try:
        with store_errors(uri):
            entries = fs.ls(path, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in entries)


def remove(uri: str, *, recursive: bool = False) -> None:
    """Removes a file, or a folder with all it holds; a missing one is fine."""
    fs, path = filesystem(uri)
    # An old listing would hide files of other processes from a recursive removal.
    fs.invalidate_cache()
    try:
        with store_errors(uri):
            fs.rm(path, recursive=recursive)
    except FileNotFoundError:
        return


def remove_if_empty(uri: str) -> None:
    """Removes a folder if it is empty. Object stores have no folders."""
    fs, path = filesystem(uri)
    if "/" not in path.strip("/") and not is_local(uri):
        return  # a bucket, which this package never makes
    if not list_names(uri):
        try:
            with store_errors(uri):
                fs.rmdir(path)
        except (OSError, NotImplementedError):
            return


def newest_change(uri: str) -> float | None:
    """Returns the time of a folder's latest write, in seconds since 1970; None if it holds no files.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    with store_errors(uri):
        names = [str(entry) for entry in fs.ls(path, detail=False)]
        if not names and is_local(uri):
            names = [path]
        return max((fs.modified(name).timestamp() for name in names), default=None)


def write_atomic(uri: str, data: bytes, *, overwrite: bool = True, durable: bool = True) -> None:
    """Writes a small file so that no reader ever sees a part of it.

    On a local disk, a temporary file beside it is flushed to disk and then renamed.
    On object stores a put is atomic already. Elsewhere (HDFS), a temporary file is moved;
    to overwrite, the old file has to be removed first, so for a moment there is none.

    Args:
        durable: Whether the file outlives a crash of the machine; false saves the local disk a flush.

    Raises:
        FileExistsError: There is a file and `overwrite` is false. If several write at once, exactly one
            succeeds; on an object store whose fsspec module lacks conditional puts, the last one wins.
            A writer that finds exactly its own bytes has succeeded: it may have put them there.
    """
    fs, path = filesystem(uri)
    parent, _, name = path.rpartition("/")
    _check_claim(uri)
    if not overwrite and exists(uri):
        raise FileExistsError(f"{uri!r} exists")
    if is_local(uri):
        _make_local_dirs(parent or "/")
    if _protocols(fs) & _ATOMIC_PUT:
        with store_errors(uri):
            _put(fs, path, data, overwrite)
        return
    temporary = f"{parent}/.{name}.{uuid.uuid4().hex}"
    try:
        if is_local(uri):
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            if overwrite:
                os.replace(temporary, path)
            else:
                rename_once(temporary, path)
            return
        fs.makedirs(parent, exist_ok=True)
        fs.pipe_file(temporary, data)
        if overwrite and fs.exists(path):
            # HDFS refuses to rename onto a file.
            fs.rm(path)
            _move_into_gap(fs, temporary, path)
        else:
            fs.mv(temporary, path)
    except BrokenOffError:
        raise
    except BaseException as error:
        if fs.exists(temporary):
            fs.rm(temporary)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = path  # the error of a full disk does not name the file
        raise


class BrokenOffError(OSError):
    """The old file is gone, and the new one does not have its name."""


def _move_into_gap(fs: Any, temporary: str, path: str) -> None:
    """Gives the new file the name of the old one, which was removed: the new bytes must not get lost now."""
    try:
        fs.mv(temporary, path)
    except Exception as error:
        raise BrokenOffError(
            f"{path!r} was being replaced, and its new content is in {temporary!r}; rename that file "
            f"({error})"
        ) from error


def _put(fs: Any, path: str, data: bytes, overwrite: bool) -> None:
    if not overwrite:
        try:
            with store_errors(path):
                fs.pipe_file(path, data, mode="create")
            return
        except (NotImplementedError, TypeError):
            pass  # this store has no conditional put; the caller looked for the file a moment ago
        except OSError:
            # The answer to a put may get lost; the client's next attempt then finds its own file.
            fs.invalidate_cache()
            if not fs.exists(path):
                raise
            if fs.cat_file(path) == data:
                return
            raise FileExistsError(f"{path!r} exists") from None
    fs.pipe_file(path, data)


def check_writable(uri: str) -> None:
    """Writes, reads back and removes a probe file in the folder `uri`.

    Raises:
        ValueError: The folder cannot be written, with the cause in the message.
    """
    probe = join(uri, f".ringspark-probe-{uuid.uuid4().hex}")
    try:
        existed = exists(uri)
        make_dirs(uri)
        # write_atomic would wait for the disk, which a probe does not need.
        with open_file(probe, "wb") as file:
            file.write(b"ringspark")
        if read_bytes(probe) != b"ringspark":
            raise OSError("the probe file read back differently")
        remove(probe)
        if not existed and is_local(uri):
            # Another writer may have put something there meanwhile.
            remove_if_empty(uri)
    except Exception as error:  # a store's client may raise anything when an upload fails
        raise ValueError(
            f"storage URI {uri!r} cannot be written ({type(error).__name__}: {error}); "
            "choose a folder that this process may write to"
        ) from error


def _protocols(fs: Any) -> set[str]:
    protocol = fs.protocol
    return {protocol} if isinstance(protocol, str) else set(protocol)
