"""Reads and writes files by URI, through fsspec: on local disks, object stores and HDFS.

A reader never sees a part of a file that `write_atomic` writes: there is no file, or the file has the old or
the new bytes. So the manifest can serve as the commit. Errors of a store's client become OSError. The client
itself repeats small requests; `readers.retry` repeats reads.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import IO, Any, cast

from fsspec.core import url_to_fs

from ringspark.pipelines.rename_once import rename_once

# On these stores a put is atomic, while "move" is a copy followed by a delete.
_ATOMIC_PUT = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "memory"}

# Scheme -> module that opens the store better than fsspec alone.
_CLIENTS = {"hdfs": "ringspark.extras.stores.hdfs"}

# Bytes of a file in memory at a time.
_BLOCK_BYTES = 4 << 20

# Client errors that a retry cannot cure.
_NO_ACCESS = {"NoCredentialsError", "PartialCredentialsError", "ClientAuthenticationError", "ProfileNotFound"}

# Characters of a path that clients of a store misread, as a pattern, as an object's version or as a slash.
_MISREAD = {"hdfs": "*?[:", **dict.fromkeys(("gs", "gcs"), "*?[#"), **dict.fromkeys(("http", "https"), "")}
_MISREAD |= dict.fromkeys(("abfs", "abfss", "az"), "*?[\\")

# Hadoop's short form of a URI.
_HOSTLESS = re.compile(r"([a-zA-Z][\w+.-]*:)/(?!/)")
# user:password@, and query parameters that grant access. A password may hold a slash or an "@", like keys of
# S3. Ports (of one host or several) and the "::" of chained URIs begin none. Its end is certain, and
# captured, if there is only one "@", or if none follows the first slash.
_PASSWORD = re.compile(
    r"(?<=://)[^/:\[?#]*:(?!:|\d{1,5}(?:,[^/:]*:\d{1,5})*[/?#])(?:((?:[^/]*|[^@]*)@)(?!.*@)|.*@.*)", re.DOTALL
)
_SECRET = re.compile(
    r"([?&][^=&#]*(?:sig|signature|token|secret|passw(?:or)?d|pwd|credential|key|keyid)=)([^&#]+)",
    re.IGNORECASE,
)


def redact(uri: str) -> str:
    return _SECRET.sub(r"\1***", _PASSWORD.sub(lambda found: "***:***@" if found[1] else "***", uri))


def redact_text(text: str) -> str:
    return "".join(redact(word) if "://" in word else word for word in re.split(r"(\s+)", text))


def refuse_secrets(uri: str) -> None:
    """Raises ValueError if a URI holds a password or token, which would end up in logs and saved stages."""
    if redact(uri) != uri:
        raise ValueError(
            f"a storage URI must not hold a password or token, got {redact(uri)!r}; give the credentials in "
            "the environment or in fsspec's configuration (~/.config/fsspec), on driver and workers"
        )


def normalize(uri: str | os.PathLike[str]) -> str:
    """Returns the canonical spelling of `uri`: absolute, without a trailing slash.

    Local paths and `file://` URIs become absolute paths, in which "%" is an ordinary character; `dbfs:/`
    becomes the mount `/dbfs` if it exists. Raises ValueError if `uri` is empty, or holds a password, a token
    or a character that the store's client misreads.
    """
    text = os.fspath(uri)
    refuse_secrets(text)
    if not text:
        raise ValueError("a storage URI must not be empty; pass '/data/shards' or 's3://bucket/shards'")
    if text.startswith("dbfs:/") and os.path.isdir("/dbfs"):
        text = mount_of(text)
    if text.startswith("file:"):
        # The authority is empty or localhost; file://host/path is not supported.
        path = text.removeprefix("file:")
        text = path[2:].removeprefix("localhost") if path.startswith("//") else path
    if is_local(text):
        if scheme := _HOSTLESS.match(text):
            raise ValueError(
                f"{text!r} does not name the host of its store, which only Hadoop knows; add the host: "
                f"{scheme[1] + '//host' + text[len(scheme[1]) :]!r}, or pass a folder that is mounted here"
            )
        return os.path.abspath(os.path.expanduser(text))
    store, _, path = text.partition("://")
    if "::" not in text and not path.strip("/"):
        raise ValueError(f"{text!r} names no folder; add the folder's path")
    misread = _MISREAD.get(store, "*?[") if "::" not in text else ""
    if found := next((one for one in misread if one in path.partition("/")[2]), None):
        raise ValueError(
            f"{text!r} holds {found!r}, which the store's client treats as a special character; "
            "rename the file or folder"
        )
    return text.rstrip("/")


def mount_of(uri: str) -> str:
    inside = "/" + uri.removeprefix("dbfs:").lstrip("/")
    return inside if inside.startswith("/Volumes/") else f"/dbfs{inside}"


def is_local(uri: str) -> bool:
    return "://" not in uri and "::" not in uri


def join(uri: str, *parts: str) -> str:
    return "/".join([uri.rstrip("/"), *parts]) or "/"


def check_inside(folder: str, name: str) -> None:
    """Raises ValueError if `name` cannot be a file name, or is a link that leads out of the local folder."""
    if not is_local(folder):
        return
    try:
        root = os.path.realpath(folder)
        target = os.path.realpath(os.path.join(folder, name))
    except ValueError as error:  # a NUL in the name
        raise ValueError(f"{name!r} is not a file name: {error}") from error
    if os.path.commonpath([root, target]) != root or target == root:
        raise ValueError(
            f"{join(folder, name)!r} is a link that leads out of its folder; put the file itself there, or "
            "pass the folder that holds it"
        )


def filesystem(uri: str) -> tuple[Any, str]:
    """Returns the fsspec file system of `uri` and the path inside it, or raises ValueError."""
    try:
        client = None
        with suppress(KeyError, ModuleNotFoundError):  # hdfs-native or ringspark.extras is not installed
            client = import_module(_CLIENTS[uri.partition("://")[0]])
        return cast("tuple[Any, str]", url_to_fs(uri) if client is None else client.connect(uri))
    except OSError as error:  # HDFS is connected to at once
        if "libjvm" not in str(error) and "libhdfs" not in str(error):
            raise
        raise ValueError(
            f"storage URI {redact(uri)!r} needs a client of HDFS on driver and workers; pip install "
            "'ringspark[hdfs]', or set JAVA_HOME, HADOOP_HOME and CLASSPATH for the client of pyarrow"
        ) from None
    except (ValueError, ImportError) as error:
        raise ValueError(
            f"storage URI {redact(uri)!r} cannot be reached ({error}); install the fsspec package of that "
            "store, or pass another URI such as '/data/shards' or 's3://bucket/shards'"
        ) from error


@contextmanager
def store_errors(subject: str) -> Iterator[None]:
    """Context that converts errors of a store's client into an OSError; its message names `subject`.

    s3fs passes on some errors of botocore and aiohttp, such as EndpointConnectionError, and a timeout has no
    message.
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
    """Another process has removed the folder into which this process writes; see `only_where`."""

    def __init__(self, folder: str) -> None:
        super().__init__(f"{folder!r} was removed, so nothing more is written into it")


# Folder -> file that must be in it.
_claims: dict[str, str] = {}


@contextmanager
def only_where(folder: str, name: str) -> Iterator[None]:
    """Context in which this process can write below a folder only while the folder has the file `name`.

    Without the file, writes raise UnclaimedError. If another process removes the folder, it stays removed.
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
    if os.path.isdir(path):
        return
    # os.makedirs would create a folder of `only_where` again that was removed after the check.
    if path in _claims:
        raise UnclaimedError(path)
    _make_local_dirs(os.path.dirname(path))
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def open_file(uri: str, mode: str = "rb") -> IO[Any]:
    if mode != "rb":
        _check_claim(uri)
    fs, path = filesystem(uri)
    with store_errors(uri):
        return cast("IO[Any]", fs.open(path, mode))


def read_bytes(uri: str) -> bytes:
    fs, path = filesystem(uri)
    # A listing cached before another process committed would hide the file or show an old one.
    fs.invalidate_cache()
    with store_errors(uri):
        return cast(bytes, fs.cat_file(path))


def sha256(uri: str, tick: Callable[[], None] = lambda: None) -> str:
    """Returns the SHA-256 of a file in hexadecimal; calls `tick` after each block."""
    digest = hashlib.sha256()
    with store_errors(uri), open_file(uri) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            tick()
    return digest.hexdigest()


def exists(uri: str) -> bool:
    """Returns whether a file or folder exists now; does not use cached listings."""
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    with store_errors(uri), suppress(FileNotFoundError):
        # The `exists` of some clients returns False if the store does not answer.
        return bool(fs.exists(path) if is_local(uri) else fs.info(path))
    return False


def size(uri: str) -> int:
    fs, path = filesystem(uri)
    with store_errors(uri):
        return int(fs.info(path)["size"])


def make_dirs(uri: str) -> None:
    _check_claim(uri)
    fs, path = filesystem(uri)
    with store_errors(uri):
        if is_local(uri):
            _make_local_dirs(path)
        else:
            fs.makedirs(path, exist_ok=True)


def list_names(uri: str) -> list[str]:
    """Returns the sorted names of a folder's entries; an empty list if the folder is missing."""
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    with suppress(FileNotFoundError, NotADirectoryError), store_errors(uri):
        return sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(path, detail=False))
    return []


def remove(uri: str, *, recursive: bool = False) -> None:
    fs, path = filesystem(uri)
    # An old listing would hide files of other processes from a recursive removal.
    fs.invalidate_cache()
    with suppress(FileNotFoundError), store_errors(uri):
        fs.rm(path, recursive=recursive)


def remove_if_empty(uri: str) -> None:
    fs, path = filesystem(uri)
    if "/" not in path.strip("/") and not is_local(uri):
        return  # a bucket, which this package never creates
    if not list_names(uri):
        with suppress(OSError, NotImplementedError), store_errors(uri):
            fs.rmdir(path)


def newest_change(uri: str) -> float | None:
    """Returns the time of the last write in a folder, in seconds since 1970; None if it has no files."""
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    with store_errors(uri):
        names = [str(entry) for entry in fs.ls(path, detail=False)] or [path] * is_local(uri)
        return max((fs.modified(name).timestamp() for name in names), default=None)


def write_atomic(uri: str, data: bytes, *, overwrite: bool = True, durable: bool = True) -> None:
    """Writes a small file so that no reader ever sees a part of it.

    A local file is written under a temporary name, flushed and renamed. On object stores a put is atomic. On
    other stores, such as HDFS through pyarrow, the old file is removed before the new one is renamed.

    Args:
        durable: Whether the file must survive a crash of the machine. False skips the flush to the local
            disk.

    Raises:
        FileExistsError: The file exists and `overwrite` is false. If several processes write at the same
            time, the first one succeeds, and on object stores also others with equal bytes. On an object
            store without conditional puts, all of them succeed, and the file has the bytes of the last one.
    """
    fs, path = filesystem(uri)
    parent, _, name = path.rpartition("/")
    _check_claim(uri)
    if not overwrite and exists(uri):
        raise FileExistsError(f"{uri!r} exists")
    if is_local(uri):
        _make_local_dirs(parent or "/")
    protocols = [fs.protocol] if isinstance(fs.protocol, str) else fs.protocol
    if getattr(fs, "puts_are_atomic", False) or _ATOMIC_PUT.intersection(protocols):
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
            # HDFS refuses to rename onto a file. Once it is removed, the new bytes must not get lost.
            fs.rm(path)
            try:
                fs.mv(temporary, path)
            except Exception as error:
                raise BrokenOffError(
                    f"the old {path!r} is removed, but the new file could not be renamed ({error}); rename "
                    f"{temporary!r} to {path!r}"
                ) from error
        else:
            fs.mv(temporary, path)
    except BaseException as error:
        if not isinstance(error, BrokenOffError) and fs.exists(temporary):
            fs.rm(temporary)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = path  # the error of a full disk does not name the file
        raise


class BrokenOffError(OSError):
    """The old file is removed, but the new file could not be renamed and has a temporary name."""


def _put(fs: Any, path: str, data: bytes, overwrite: bool) -> None:
    if not overwrite:
        try:
            with store_errors(path):
                fs.pipe_file(path, data, mode="create")
            return
        except (NotImplementedError, TypeError):
            pass  # this store has no conditional put; the caller has just looked for the file
        except OSError:
            # The response to a put may get lost; the client's retry then finds its own file.
            fs.invalidate_cache()
            if not fs.exists(path):
                raise
            if fs.cat_file(path) == data:
                return
            raise FileExistsError(f"{path!r} exists") from None
    fs.pipe_file(path, data)


def check_writable(uri: str) -> None:
    """Writes, reads and removes a small test file. Raises ValueError if this fails."""
    probe = join(uri, f".ringspark-probe-{uuid.uuid4().hex}")
    try:
        existed = exists(uri)
        for attempt in range(4):
            make_dirs(uri)
            try:
                # write_atomic would wait for the disk, which a probe does not need.
                with open_file(probe, "wb") as file:
                    file.write(b"ringspark")
                break
            except FileNotFoundError:  # another writer's check has removed the empty folder
                if attempt == 3:
                    raise
        if read_bytes(probe) != b"ringspark":
            raise OSError("the test file had other content when it was read")
        remove(probe)
        if not existed and is_local(uri):
            remove_if_empty(uri)  # unless another writer has written there meanwhile
    except Exception as error:  # a store's client may raise anything when an upload fails
        if "needs a client" in str(error):
            raise
        raise ValueError(
            f"storage URI {uri!r} cannot be written ({type(error).__name__}: {error}); "
            "choose a folder that this process may write to"
        ) from error
