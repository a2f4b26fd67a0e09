"""Reads the limits that Linux and Spark set on the host memory of a worker; None means no known limit.

Every figure is an upper bound: it includes free swap and memory that the kernel can reclaim.
"""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ringspark.estimators.training.settings.byte_sizes import parse_bytes, show_bytes

PYSPARK_MEMORY = "spark.executor.pyspark.memory"

# Without a limit, cgroup v1 writes a larger number.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Available:
    """Bytes for one worker.

    Attributes:
        source: Origin of the figure, for a message.
        workers: Number of workers that share one host's memory.
        how: Remedy for too little memory, as the end of a sentence.
    """

    num_bytes: int
    source: str
    workers: int = 1
    how: str = ""


def find_spark_limit(conf: Mapping[str, str]) -> Available | None:
    """Returns the memory limit of a Python worker: Spark divides the executor's limit by its cores."""
    text = conf.get(PYSPARK_MEMORY)
    if text is None:
        return None
    # A bare number is in MiB.
    amount = parse_bytes(f"{text}m" if text.strip().isdigit() else text, PYSPARK_MEMORY)
    cores = max(1, int(conf.get("spark.executor.cores", "1")))
    shared = f" for {cores} cores" if cores > 1 else ""
    return Available(
        num_bytes=amount // cores,
        source=f"{PYSPARK_MEMORY} is {show_bytes(amount)}{shared}",
        how=f" by {PYSPARK_MEMORY}",
    )


def find_process_limit() -> Available | None:
    """Returns the unused address space, which `spark.executor.pyspark.memory` limits."""
    try:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return None
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
    return Available(
        num_bytes=max(0, limit - used),
        source=f"of the {show_bytes(limit)} that this process is limited to",
        how=f" by {PYSPARK_MEMORY}",
    )


def find_host_limit(workers: int, *, same_cgroup: bool = False, root: str = "/") -> Available | None:
    """Returns a worker's share of the memory that this host has available now.

    Args:
        same_cgroup: Whether all workers share this process's control groups; else each has its own limit.
        root: Folder that holds `proc` and `sys`.
    """
    found = []

    def add(num_bytes: int, sharing: int, limited: str) -> None:
        shared = f" for {sharing} workers" if sharing > 1 else ""
        source = f"{show_bytes(num_bytes)}{limited} on host {socket.gethostname()}{shared}"
        found.append(Available(num_bytes=num_bytes // sharing, source=source, workers=sharing))

    with suppress(OSError, KeyError, ValueError):
        values = _fields(Path(root, "proc/meminfo"))
        add(1024 * (values["MemAvailable"] + values.get("SwapFree", 0)), workers, "")
    group = find_cgroup_limit(root)
    if group is not None:
        sharing = workers if same_cgroup else 1
        add(group, sharing, " under the container's limit")
    return min(found, key=lambda limit: limit.num_bytes, default=None)


def find_cgroup_limit(root: str = "/") -> int | None:
    """Returns the bytes that are free in this process's control groups (v1 or v2)."""
    try:
        lines = Path(root, "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = Path(root, "sys/fs/cgroup", *(["memory"] if controllers else []))
        names = _V1 if controllers else _V2
        # A container often sees its own group as the root, whatever its path. Any parent may have the limit.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == base.parent:
                break
            with suppress(OSError, KeyError, ValueError):
                left.append(_left_in(folder, *names))
    return max(0, min(left)) if left else None


# Files of limit and usage; fields of memory.stat for the page cache and the shared memory in it.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
_V2 = ("memory.max", "memory.current", "file", "shmem")


def _left_in(folder: Path, limit_name: str, usage_name: str, cache: str, shmem: str) -> int:
    """Returns the bytes left in a control group; raises ValueError without a limit."""
    limit = int((folder / limit_name).read_text())  # "max" is no number
    if limit >= _NO_LIMIT:
        raise ValueError(limit)
    stat = _fields(folder / "memory.stat")
    usage = int((folder / usage_name).read_text()) - stat[cache] + stat.get(shmem, 0)
    return limit - usage + _swap_left(folder)


def _swap_left(folder: Path) -> int:
    """Returns the free swap of a group in cgroup v2; 0 in v1, where the memory limit includes swap."""
    try:
        used = int((folder / "memory.swap.current").read_text())
        text = (folder / "memory.swap.max").read_text().strip()
        free = 1024 * _fields(Path("/proc/meminfo")).get("SwapFree", 0)
        return free if text == "max" else max(0, min(free, int(text) - used))
    except (OSError, ValueError):
        return 0


def _fields(path: Path) -> dict[str, int]:
    """Parses lines such as "MemAvailable:  123 kB" or "file 123"."""
    return {name: int(count) for name, count in re.findall(r"^([\w()]+):?\s+(\d+)", path.read_text(), re.M)}
