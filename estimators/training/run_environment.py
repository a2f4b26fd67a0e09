"""Records where and on what a run was trained: `environment.json` and `data.json` in the run directory.

Rank 0 writes. Training continues if the store refuses the files.
"""

from __future__ import annotations

import logging
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import psutil
import torch

from ringspark.estimators import run_layout
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.column_stats import ColumnStats
from ringspark.pipelines.manifest import SPLITS
from ringspark.pipelines.typed_json import JsonText

_log = logging.getLogger(__name__)

# Packages that affect numbers and speed; packages that are not installed are left out.
_PACKAGES = ("ringspark", "torch", "numpy", "pyarrow", "pyspark", "petastorm", "horovod")
# A run that is restarted more often keeps its first and newest starts.
MOST_STARTS = 20


@dataclass(frozen=True, kw_only=True)
class RankHost(JsonText):
    """The machine of one rank; sizes of memory are in bytes, and the peaks are 0 until the training ends."""

    host: str
    device: str
    cores: int
    host_memory: int
    peak_memory: int = 0
    peak_device_memory: int = 0


@dataclass(frozen=True, kw_only=True)
class GangStart:
    """One start of the ranks; `began` is in seconds since 1970, `versions` are by package."""

    began: float
    system: str
    versions: dict[str, str]
    ranks: tuple[RankHost, ...]


@dataclass(frozen=True, kw_only=True)
class Environment(JsonText):
    """All starts of a run, in order."""

    starts: tuple[GangStart, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SplitFacts:
    rows: int
    files: int
    num_bytes: int
    row_groups: int
    group_rows: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    name: str
    kind: str
    source: str


@dataclass(frozen=True, kw_only=True)
class DataFacts(JsonText):
    """Facts about a run's data, kept when the shards are deleted: the manifest without its list of files."""

    uri: str
    columns: tuple[ColumnFacts, ...]
    splits: dict[str, SplitFacts]
    stats: dict[str, dict[str, ColumnStats]]
    skipped_rows: int
    is_table: bool = False

    @classmethod
    def of(cls, manifest: ShardManifest) -> DataFacts:
        found = {split: manifest.select(split) for split in SPLITS}
        return cls(
            uri=manifest.uri,
            columns=tuple(
                ColumnFacts(name=c.name, kind=str(c.kind), source=c.source) for c in manifest.columns
            ),
            splits={split: _sizes(view) for split, view in found.items() if view.files},
            stats={split: dict(columns) for split, columns in manifest.stats.items()},
            skipped_rows=manifest.skipped_rows,
            is_table=manifest.table is not None,
        )


def _sizes(view: ShardManifest) -> SplitFacts:
    groups = view.row_groups
    return SplitFacts(
        rows=view.num_rows,
        files=len(view.files),
        num_bytes=sum(file.num_bytes for file in view.files),
        row_groups=len(groups),
        group_rows=(min(groups), median(groups), max(groups)) if groups else (),
    )


def record_start(
    config: TrainConfig, mesh: RankMesh, manifest: ShardManifest, device: torch.device
) -> GangStart | None:
    """Records a start of the ranks and their data. Runs on every rank; rank 0 returns the start."""
    texts = gather_bytes(mesh.world, _describe_rank(device), to_all=False)
    if not mesh.writes:
        return None
    try:
        start = GangStart(
            began=time.time(), system=platform.platform(), versions=list_versions(), ranks=_parse_ranks(texts)
        )
        starts = _read(config.run_uri)
        kept = [*starts[: MOST_STARTS // 2], *starts[MOST_STARTS // 2 :][-(MOST_STARTS // 2 - 1) :], start]
        _write(config.run_uri, kept)
        facts = DataFacts.of(manifest)
        facts = replace(facts, stats={}) if config.hides_rows else facts
        _put(config.run_uri, run_layout.DATA, facts.to_json())
    except (OSError, ValueError) as error:
        _log.warning("the run's environment was not written (%s); training continues without it", error)
        return None
    return start


def record_memory(run_uri: str, mesh: RankMesh, device: torch.device, start: GangStart | None) -> None:
    """Adds the ranks' peak memory to their start. Runs on every rank."""
    texts = gather_bytes(mesh.world, _describe_rank(device, at_end=True), to_all=False)
    # Without a record of this start, the last one in the file is of ranks that no longer exist.
    if start is None:
        return
    try:
        starts = _read(run_uri)
        if starts and starts[-1] == start:
            _write(run_uri, [*starts[:-1], replace(start, ranks=_parse_ranks(texts))])
    except (OSError, ValueError) as error:
        _log.warning("the ranks' memory was not written (%s); training continues without it", error)


def _describe_rank(device: torch.device, *, at_end: bool = False) -> bytes:
    """Returns this rank's `RankHost` as JSON, or b"". It must not raise, because the other ranks wait."""
    try:
        on_gpu = device.type == "cuda"
        host = RankHost(
            host=socket.gethostname(),
            device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
            host_memory=psutil.virtual_memory().total,
        )
        if at_end:
            # macOS counts bytes, Linux kibibytes.
            unit = 1 if sys.platform == "darwin" else 1024
            host = replace(
                host,
                peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
                peak_device_memory=torch.cuda.max_memory_allocated(device) if on_gpu else 0,
            )
        return host.to_json().encode()
    except (OSError, RuntimeError, ValueError, psutil.Error) as error:
        _log.warning("this rank's host is not known (%s); training continues without it", error)
        return b""


def list_versions() -> dict[str, Any]:
    """Returns the versions of Python and of the packages of a training, by name."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _parse_ranks(texts: Sequence[bytes]) -> tuple[RankHost, ...]:
    unknown = RankHost(host="unknown", device="unknown", cores=0, host_memory=0)
    return tuple(RankHost.from_json(text) if text else unknown for text in texts)


def _read(run_uri: str) -> Sequence[GangStart]:
    uri = storage.join(run_uri, run_layout.ENVIRONMENT)
    return Environment.from_json(storage.read_bytes(uri)).starts if storage.exists(uri) else ()


def _write(run_uri: str, starts: Sequence[GangStart]) -> None:
    _put(run_uri, run_layout.ENVIRONMENT, Environment(starts=tuple(starts)).to_json())


def _put(run_uri: str, name: str, text: str) -> None:
    storage.write_atomic(storage.join(run_uri, name), text.encode(), durable=False)
