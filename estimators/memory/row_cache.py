"""Decides what `cache='auto'` means for a rank: where it keeps the rows that it will read again."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from ringspark.estimators.training.row_caching import find_cached_rows
from ringspark.estimators.training.settings.choices import Cache
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.pipelines import ShardManifest
from ringspark.pipelines.manifest import SPLITS


def choose_cache(num_bytes: int, memory: int | None, disk: int) -> Cache:
    """Returns the place for rows of `num_bytes`: whichever has twice the room, memory before disk.

    The other half of the memory is for activations and whatever else no lower bound knows.

    Args:
        memory: Bytes that the training is known to leave; None if no limit is known.
        disk: Free bytes where temporary files lie.
    """
    if not num_bytes:
        return "none"
    if memory is not None and 2 * num_bytes <= memory:
        return "memory"
    return "disk" if 2 * num_bytes <= disk else "none"


def settle_cache(
    config: TrainConfig, manifest: ShardManifest, rank: int, size: int, local_size: int, memory: int | None
) -> TrainConfig:
    """Returns the config with what "auto" means for this rank. Runs on every rank.

    Args:
        rank: Which share of a global batch this rank reads.
        size: How many shares there are.
        local_size: Number of ranks on this host, which share its disk.
        memory: As for `choose_cache`.
    """
    if config.cache != "auto":
        return config
    num_bytes = sum(find_cached_rows(config, manifest, split, rank, size).num_bytes for split in SPLITS)
    cache = choose_cache(num_bytes, memory, disk=0)
    if num_bytes and cache == "none":  # only now, because a host may have no folder for temporary files
        cache = choose_cache(num_bytes, memory, free_disk() // local_size)
    return replace(config, cache=cache)


def free_disk() -> int:
    """Returns the free bytes of the disk for temporary files; 0 if there is none, or if it is memory."""
    try:
        folder = tempfile.gettempdir()
        free, device = shutil.disk_usage(folder).free, os.stat(folder).st_dev
    except OSError:
        return 0
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return free
    number = f"{os.major(device)}:{os.minor(device)}"
    types = [line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == number]
    return 0 if {"tmpfs", "ramfs"}.intersection(types) else free
