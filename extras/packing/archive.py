"""Writes an archive, and trains one rank in the unpacked archive.

The archive depends only on the packed files: names are sorted, and times and owners are constant.
"""

from __future__ import annotations

import gzip
import json
import mmap
import os
import posixpath
import re
import subprocess
import sys
import tarfile
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa

from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import Array, Scalar
from ringspark.pipelines.manifest import ShardFile
from ringspark.pipelines.typed_json import record
from ringspark.pipelines.writing.shard_writer import WritePlan, write_partition
from ringspark.pipelines.writing.task_reports import join_reports

# 1980-01-01, the first time that every archiver can store.
_TIME = 315532800
# Level 6, gzip's default, takes twice as long and saves 6 percent.
_LEVEL = 4
# Uncompressed bytes of one gzip member.
_CHUNK_BYTES = 8 << 20
_ERROR = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception): .*", re.MULTILINE)
_ROWS = 64


def newest_glibc(files: Iterable[Path]) -> str:
    """Returns the newest glibc version that a library in `files` needs, at least 2.17."""
    found = {(2, 17)}
    for file in (file for file in files if ".so" in file.name and file.stat().st_size):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found |= {(int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", data)}
    return ".".join(map(str, max(found)))


class _ParallelGzip:
    """A file that compresses chunks on all cores, each to one member of the gzip format."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._chunk, self._waiting = raw, bytearray(), deque[Future[bytes]]()
        self._cores = min(16, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(self._cores)

    def write(self, data: bytes) -> int:
        self._chunk += data
        if len(self._chunk) >= _CHUNK_BYTES:
            self._compress()
        return len(data)

    def _compress(self) -> None:
        compress = partial(gzip.compress, compresslevel=_LEVEL, mtime=0)
        self._waiting.append(self._threads.submit(compress, bytes(self._chunk)))
        self._chunk.clear()
        while len(self._waiting) > 2 * self._cores:
            self._raw.write(self._waiting.popleft().result())

    def __enter__(self) -> _ParallelGzip:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._threads:
            if kind is None:
                self._compress()
                for chunk in self._waiting:
                    self._raw.write(chunk.result())


def write_archive(output: Path, files: dict[str, Path]) -> None:
    with (
        output.open("wb") as raw,
        _ParallelGzip(raw) as packed,
        tarfile.open(fileobj=cast("IO[bytes]", packed), mode="w|", format=tarfile.GNU_FORMAT) as archive,
    ):
        for name, file in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.mtime = _TIME
            # A link stays a link only if it leads to another file of the archive.
            if file.is_symlink() and posixpath.join(posixpath.dirname(name), os.readlink(file)) in files:
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(file)
                archive.addfile(entry)
                continue
            entry.size = file.stat().st_size
            entry.mode = 0o755 if file.stat().st_mode & 0o100 else 0o644
            with file.open("rb") as content:
                archive.addfile(entry, content)


def try_archive(archive: Path, folder: Path) -> dict[str, Any]:
    """Unpacks the archive and trains one rank in it, without this process's environment variables.

    Returns the JSON that `trial` prints.
    """
    root, work = folder / "unpacked", folder / "work"
    root.mkdir()
    _write_rows(work / "shards")
    # Spark unpacks by the same command.
    subprocess.run(["tar", "-xzf", str(archive), "-C", str(root)], check=True)
    done = subprocess.run(
        [str(root / "bin" / "python"), "-I", "-m", "ringspark.extras.packing.trial", str(work)],
        cwd=work,
        env={"PATH": "/usr/bin:/bin", "HOME": str(work), "TMPDIR": str(work), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        errors = _ERROR.findall(done.stderr) or done.stderr.strip().splitlines() or ["no output"]
        raise ValueError(f"the archive was removed, because a training in it fails: {errors[-1]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    here = tuple(f"{prefix}/" for prefix in (sys.prefix, sys.base_prefix) if prefix != "/usr")
    if escaped := [file for file in told["outside"] if file.startswith(here)]:
        raise ValueError(f"the archive was removed, because it loads {escaped[0]} from this environment")
    return told


def _write_rows(folder: Path) -> None:
    (folder / "_shards").mkdir(parents=True)
    columns = (Column(name="x", kind=Array("float32")), Column(name="y", kind=Scalar("float32")))
    plan = WritePlan(uri=str(folder), folder="_shards", columns=columns, handle_invalid=("error",) * 2)
    rows = [{"x": [row / _ROWS, 1.0], "y": row / _ROWS} for row in range(_ROWS)]
    schema = pa.schema([("x", pa.list_(pa.float32())), ("y", pa.float32())])
    batches = pa.Table.from_pylist(rows, schema).to_batches()
    reports = [json.loads(report.to_pydict()["report"][0]) for report in write_partition(plan, iter(batches))]
    join_reports(plan, reports, [record(ShardFile, file) for file in reports[0]["files"]]).save()
