"""Opens HDFS by hdfs-native, which needs neither a JVM nor Hadoop on the machine.

The class adds four things to the client's own file system for fsspec:

- If no NameNode answers, opening fails within 30 s. The client alone tries for three minutes.
- "#", ";" and "%" in a path are ordinary characters. The client reads a path as a URL and cuts it there.
- A file gets its name when it is closed. The client replaces the old file at the first byte.
- Errors are OSErrors of one sentence. The client raises RuntimeError with Java's stack.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import fsspec
from hdfs_native import FileReader, FileWriter, WriteOptions
from hdfs_native.fsspec import HdfsFileSystem

ANSWER_SECONDS = 15.0
"""Timeout for a connection to a NameNode, and again for its first answer, in seconds."""
# A NameNode that has started refuses writes until its DataNodes have reported their blocks.
_SAFE_MODE_SECONDS = 60.0
_WAIT_SECONDS = 0.5

_DEFAULT_PORT = "8020"
_URI = re.compile(r"hdfs://([^/]*)(.*)", re.DOTALL)
# How hdfs-native shows a refusal: the class of Java's exception, its message and its stack.
_REFUSAL = re.compile(r'RPCError\("([^"]*)", "((?:[^"\\]|\\.)*)"\)', re.DOTALL)
_KINDS: dict[str, tuple[type[OSError], int]] = {
    "AccessControlException": (PermissionError, errno.EACCES),
    "InvalidPathException": (OSError, errno.EINVAL),
    "NSQuotaExceededException": (OSError, errno.EDQUOT),
    "DSQuotaExceededException": (OSError, errno.EDQUOT),
}


def connect(uri: str) -> tuple[Hdfs, str]:
    """Returns the file system of `uri` and the path inside it.

    Raises ConnectionError if no NameNode answers within `ANSWER_SECONDS`.
    """
    found = _URI.match(uri)
    assert found is not None
    authority, path = found.groups()
    return _open(authority, os.getpid()), path.rstrip("/") or "/"


@cache
def _open(authority: str, process: int) -> Hdfs:
    """Returns one file system per process, because a forked process cannot use the client of its parent."""
    user, _, host = authority.rpartition("@")
    if user:
        raise OSError(
            f"'hdfs://{authority}' names a user, which hdfs-native takes from HADOOP_USER_NAME; set that "
            f"variable on driver and executors, and pass 'hdfs://{host}'"
        )
    check_name_node(authority)
    host, port = _split(authority)
    return Hdfs(host or None, int(port) if port else None)


def _split(authority: str) -> tuple[str, str]:
    """Returns host and port; an IPv6 host keeps its brackets."""
    host, colon, port = authority.rpartition(":")
    return (host, port) if colon and not port.endswith("]") else (authority, "")


def check_name_node(authority: str) -> None:
    """Waits until a NameNode of `host:port` or of a name service accepts a connection.

    A NameNode that restarts accepts connections after some seconds.

    Raises ConnectionError after `ANSWER_SECONDS`, or at once if no host is known.
    """
    addresses = _name_nodes(authority)
    end = time.monotonic() + ANSWER_SECONDS
    while True:
        errors: dict[str, OSError] = {}
        for address in addresses:
            host, port = _split(address)
            try:
                socket.create_connection(
                    (host.strip("[]"), int(port or _DEFAULT_PORT)), ANSWER_SECONDS / len(addresses)
                ).close()
                return
            except OSError as error:
                errors[address] = error
        if time.monotonic() > end or all(isinstance(error, socket.gaierror) for error in errors.values()):
            break
        time.sleep(_WAIT_SECONDS)
    problems = ", ".join(f"{address} ({error})" for address, error in errors.items())
    raise ConnectionError(
        f"no NameNode of 'hdfs://{authority}' answers: {problems}; check the address, or set "
        "HADOOP_CONF_DIR if it is a name service, on driver and executors"
    )


def _name_nodes(authority: str) -> list[str]:
    """Returns the addresses behind an authority; Hadoop's conf resolves name services and an empty one."""
    conf = _hadoop_conf()
    if not authority:
        found = _URI.match(conf.get("fs.defaultFS", ""))
        if found is None or not found[1]:
            raise OSError(
                "'hdfs:///' leaves the NameNode to Hadoop's conf, but HADOOP_CONF_DIR has no fs.defaultFS on "
                "HDFS; pass 'hdfs://host:port/...' or set HADOOP_CONF_DIR on driver and executors"
            )
        authority = found[1]
    names = conf.get(f"dfs.ha.namenodes.{authority}", "").split(",")
    known = [conf.get(f"dfs.namenode.rpc-address.{authority}.{name.strip()}", "") for name in names]
    return [address for address in known if address] or [authority]


def _hadoop_conf() -> dict[str, str]:
    """Returns the properties that hdfs-native reads from Hadoop's files and fsspec's configuration."""
    home = os.environ.get("HADOOP_HOME")
    folder = os.environ.get("HADOOP_CONF_DIR") or (home and os.path.join(home, "etc", "hadoop"))
    found = {}
    for name in ("core-site.xml", "hdfs-site.xml") if folder else ():
        with suppress(FileNotFoundError):
            for item in ElementTree.fromstring(Path(str(folder), name).read_bytes()).iter("property"):
                found[item.findtext("name", "").strip()] = item.findtext("value", "").strip()
    return {**found, **fsspec.config.conf.get("hdfs", {})}


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Context that turns errors of the client into an OSError without Java's stack.

    A lost connection gets EIO, so that a reader or a restart tries again.
    """
    try:
        yield
    except RuntimeError as error:
        if (found := _REFUSAL.search(str(error))) is None:
            raise OSError(errno.EIO, _first_line(str(error))) from error
        kind, number = _KINDS.get(found[1].rpartition(".")[2], (OSError, errno.EIO))
        raise kind(number, _first_line(_unescape(found[2]))) from None
    except OSError as error:
        text = _first_line(str(error))
        if type(error) is OSError and error.errno is None:
            raise OSError(errno.EIO, text) from error
        if text == str(error):
            raise
        raise type(error)(text) from None


def _unescape(text: str) -> str:
    """Undoes the escapes of Rust's debug format."""
    return re.sub(r"\\(.)", lambda found: {"n": "\n", "t": "\t"}.get(found[1], found[1]), text)


def _first_line(text: str) -> str:
    return " ".join(text.partition("\n\tat ")[0].split())


def _call(method: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """Calls a method of the client; retries for up to a minute while the NameNode is leaving safe mode."""
    end = time.monotonic() + _SAFE_MODE_SECONDS
    while True:
        try:
            with _one_sentence():
                return method(*arguments, **more)
        except OSError as error:
            if "Safe mode will be turned off automatically" not in str(error) or time.monotonic() > end:
                raise
        time.sleep(_WAIT_SECONDS)


class _Client:
    """A client of hdfs-native whose calls fail with an OSError of one sentence."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def list_status(self, *arguments: Any) -> Iterator[Any]:
        with _one_sentence():
            yield from self._client.list_status(*arguments)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_call, getattr(self._client, name))


class _Reader(FileReader):  # type: ignore[misc]
    def read(self, size: int = -1) -> bytes:
        with _one_sentence():
            return bytes(super().read(size))


class _Writer(FileWriter):  # type: ignore[misc]
    """A file that gets its name when it is closed. A `with` that ends in an error discards it."""

    def __init__(self, store: Hdfs, path: str, *, overwrite: bool = True) -> None:
        folder, _, name = path.rpartition("/")
        self._store, self._path, self._overwrites = store, path, overwrite
        self._temporary = f"{folder}/.{name}.{uuid.uuid4().hex}"
        self._is_open = False
        super().__init__(_call(store.raw.create, self._temporary, WriteOptions()))
        self._is_open = True

    def write(self, data: Any) -> int:
        with _one_sentence():
            return int(super().write(data))

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                with _one_sentence():
                    super().close()
                self._store.mv(self._temporary, self._path, overwrite=self._overwrites)
            except BaseException:
                self._remove()
                raise

    def __del__(self) -> None:
        self._is_open = False  # the garbage collector closes files, and this one may be incomplete

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        elif self._is_open:
            self._is_open = False
            self._remove()

    def _remove(self) -> None:
        with suppress(OSError):  # the caller has an error already
            self._store.client.delete(self._temporary, False)


class Hdfs(HdfsFileSystem):  # type: ignore[misc]
    """The file system of hdfs-native with exact paths, short errors and atomic writes."""

    puts_are_atomic = True
    client: Any
    raw: Any

    def __init__(self, host: str | None = None, port: int | None = None, **options: Any) -> None:
        super().__init__(host, port, **options)
        self.raw = self.client.inner
        self.client = _Client(self.client)
        self._check_answer()

    def _check_answer(self) -> None:
        """Raises ConnectionError if the NameNode accepts connections and answers no request."""
        # The client cannot be interrupted.
        ask = threading.Thread(target=self._ask, name="hdfs-first-answer", daemon=True)
        ask.start()
        ask.join(ANSWER_SECONDS)
        if ask.is_alive():
            raise ConnectionError(
                f"the NameNode {self.unstrip_protocol('/')!r} accepted a connection, but did not answer "
                f"within {ANSWER_SECONDS:g} s; check its log"
            )

    def _ask(self) -> None:
        with suppress(OSError, RuntimeError):  # the caller's request meets the same error
            self.client.get_file_info("/")

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        found = _URI.match(str(path))
        return (found[2] if found else str(path)).rstrip("/") or cls.root_marker

    def walk(self, path: str, maxdepth: int | None = None, **options: Any) -> Iterator[Any]:
        """Like fsspec's, but a folder that cannot be listed is an error, and not an empty folder."""

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        return iter(super().walk(path, maxdepth, **{"on_error": refuse, **options}))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Writes a file in one step; with the mode "create", raises FileExistsError if there is one."""
        with _Writer(self, self._strip_protocol(path), overwrite=mode != "create") as file:
            file.write(value)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        with self.open(path1) as old, self.open(path2, "wb") as new:
            while data := old.read(1 << 22):
                new.write(data)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        path = self._strip_protocol(path)
        if mode == "rb":
            return _Reader(_call(self.raw.read, path))
        return _Writer(self, path) if mode == "wb" else super()._open(path, mode, **options)
