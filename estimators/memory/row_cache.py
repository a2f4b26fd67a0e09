"""Decides what `cache='auto'` means for a rank: where it keeps the rows that it will read again."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace

from ringspark.estimators.training.kept_rows import kept_rows
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
        local_size: Number of ranks on this host, which share its disk.
        memory: As for `choose_cache`.
    """
    if config.cache != "auto":
        return config
    parts = [kept_rows(config, manifest, split, rank, size) for split in SPLITS]
    free = shutil.disk_usage(tempfile.gettempdir()).free // local_size
    return replace(config, cache=choose_cache(sum(part.num_bytes for part in parts), memory, free))
