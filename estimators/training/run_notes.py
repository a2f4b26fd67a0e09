"""Notes in the run's folder where and on what it was trained: `environment.json` and `data.json`.

Every rank says once in which process it runs, and at the end how much memory that took; rank 0 writes. The
notes only inform: no training ends because the store refuses them.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from ringspark.estimators import run_layout
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.data_facts import DataFacts
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.typed_json import parse_object, record

_log = logging.getLogger(__name__)

# What decides numbers and speed; those that are not installed are left out.
PACKAGES = ("ringspark", "torch", "numpy", "pyarrow", "pyspark", "petastorm", "horovod")
# A run that is started again and again keeps the first and the newest.
MOST_STARTS = 20


@dataclass(frozen=True, kw_only=True)
class RankNote:
    """Where one rank ran.

    Attributes:
        device: Name of the GPU; "cpu" without one.
        host_memory: Bytes of the host's memory, which all its ranks share.
        peak_memory: Most bytes that the rank's process held at a moment, whatever it did before; 0 if the
            training has not come to its end.
        peak_device_memory: Most bytes of tensors on its GPU; 0 likewise, and without one.
    """

    host: str
    device: str
    cores: int
    host_memory: int
    peak_memory: int = 0
    peak_device_memory: int = 0


@dataclass(frozen=True, kw_only=True)
class StartNote:
    """One start of the ranks.

    Attributes:
        began: Seconds since 1970, by the clock of rank 0.
        system: Operating system and machine of rank 0.
        versions: Versions on rank 0, by package.
        ranks: One note per rank, in rank order.
    """

    began: float
    system: str
    versions: dict[str, str]
    ranks: tuple[RankNote, ...]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """All starts of a run, the first first."""

    starts: tuple[StartNote, ...] = ()

    @classmethod
    def from_json(cls, text: str | bytes) -> Environment:
        """Reads the file; raises ValueError if it is damaged."""
        return record(cls, parse_object(text))


def note_start(
    config: TrainConfig, mesh: RankMesh, manifest: ShardManifest, device: torch.device
) -> StartNote | None:
    """Notes a start of the ranks and their data. Runs on every rank.

    Returns:
        The note, for `note_memory`; None on ranks that do not write, and if it could not be made.
    """
    texts = _gathered(mesh, _told(device))
    if not mesh.writes:
        return None
    try:
        start = StartNote(
            began=time.time(),
            system=platform.platform(),
            versions={"python": platform.python_version()} | _versions(),
            ranks=_ranks(texts),
        )
        starts = _read(config.run_uri)
        kept = [*starts[: MOST_STARTS // 2], *starts[MOST_STARTS // 2 :][-(MOST_STARTS // 2 - 1) :], start]
        _write(config.run_uri, kept)
        _put(config.run_uri, run_layout.DATA, DataFacts.of(manifest).to_json())
    except (OSError, ValueError) as error:
        _log.warning("the run's environment was not noted (%s); the training goes on without it", error)
        return None
    return start


def note_memory(run_uri: str, mesh: RankMesh, device: torch.device, start: StartNote | None) -> None:
    """Adds the ranks' memory to the note of their start. Runs on every rank, at the end."""
    texts = _gathered(mesh, _told(device, at_end=True))
    # Without a note of this start, the last one in the file is that of ranks which are gone.
    if start is None:
        return
    try:
        starts = _read(run_uri)
        if starts and starts[-1] == start:
            _write(run_uri, [*starts[:-1], replace(start, ranks=_ranks(texts))])
    except (OSError, ValueError) as error:
        _log.warning("the ranks' memory was not noted (%s); the training goes on without it", error)


def _told(device: torch.device, *, at_end: bool = False) -> bytes:
    """Returns the note of this rank as JSON; empty if the machine does not tell.

    It must not raise: the other ranks are in the call that gathers the notes, and would wait.
    """
    try:
        note = _here(device)
        if at_end:
            on_gpu = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
            note = replace(note, peak_memory=_peak(), peak_device_memory=on_gpu)
        return json.dumps(asdict(note)).encode()
    except (OSError, RuntimeError, ValueError, psutil.Error) as error:
        _log.warning("this rank's host was not noted (%s); the training goes on without it", error)
        return b""


def _here(device: torch.device) -> RankNote:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    return RankNote(
        host=socket.gethostname(), device=name, cores=cores, host_memory=psutil.virtual_memory().total
    )


def _peak() -> int:
    """Returns the most bytes that this process ever held."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux kibibytes.
    return most if sys.platform == "darwin" else most * 1024


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _gathered(mesh: RankMesh, note: bytes) -> list[bytes]:
    """Returns the notes of all ranks, in rank order; on other ranks than rank 0 it means nothing."""
    return gather_bytes(mesh.world, note, to_all=False)


def _ranks(texts: Sequence[bytes]) -> tuple[RankNote, ...]:
    """Reads the ranks' notes; a rank that could not tell is there all the same, with nothing known."""
    unknown = RankNote(host="unknown", device="unknown", cores=0, host_memory=0)
    return tuple(record(RankNote, parse_object(text)) if text else unknown for text in texts)


def _read(run_uri: str) -> Sequence[StartNote]:
    uri = storage.join(run_uri, run_layout.ENVIRONMENT)
    return Environment.from_json(storage.read_bytes(uri)).starts if storage.exists(uri) else ()


def _write(run_uri: str, starts: Sequence[StartNote]) -> None:
    _put(run_uri, run_layout.ENVIRONMENT, json.dumps({"starts": [asdict(start) for start in starts]}))


def _put(run_uri: str, name: str, text: str) -> None:
    storage.write_atomic(storage.join(run_uri, name), text.encode(), durable=False)
