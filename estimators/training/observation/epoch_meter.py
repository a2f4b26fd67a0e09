"""Measures what an epoch cost beside its time: bytes, operations, energy, communication.

Every rank measures its own part, and one small exchange at an epoch's end puts the parts together. An epoch
that begins in its midst, after a resume or a rollback, has no bytes, energy or times of communication: those
of its first part are lost with the process that counted them. The operations are counted in one micro-batch
after each start of the ranks, and stand for all rows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ringspark.estimators.collectives import Collective
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.history import EpochCost
from ringspark.estimators.training.observation.energy import device_key, energy_source
from ringspark.estimators.training.observation.flops import FlopCount, peak_flops
from ringspark.estimators.training.observation.overlap import NO_OVERLAP, Overlap

# Seconds between two looks at an energy counter, some of which begin anew every quarter of an hour.
_ENERGY_SECONDS = 60.0
_UNKNOWN = -1
_NOTHING: AbstractContextManager[None] = nullcontext()


class EpochMeter:
    """Measures one epoch after the other on one rank."""

    def __init__(
        self,
        world: Collective,
        device: torch.device,
        *,
        precision: str,
        is_compiled: bool = False,
        overlap: Overlap = NO_OVERLAP,
        ranks_per_copy: int = 1,
    ) -> None:
        """Stands before the first epoch.

        Args:
            ranks_per_copy: Ranks that compute parts of the same rows.
        """
        self._world = world
        self._overlap = overlap
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = peak_flops(name, precision)
        self._energy = energy_source(device)
        key = hashlib.sha256(device_key(device).encode()).digest()
        # Equal on ranks that share a machine or a card.
        self._shared = int.from_bytes(key[:7], "big")
        # Compiled code would be left for the count, and run otherwise than in the steps after it.
        self._counts_next = not is_compiled
        self._flops = _UNKNOWN
        self._counted_rows = 0
        self._ranks_per_copy = ranks_per_copy
        self._bytes_before: int | None = None
        self._joules_before: float | None = None

    def begin(self, *, is_whole: bool) -> None:
        """Begins an epoch, or the rest of one that is not `is_whole`."""
        self._bytes_before = self._world.bytes_sent if is_whole else None
        self._joules_before = self._joules() if is_whole else None
        self._overlap.begin()

    def steps(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Returns the batches of an epoch's steps."""
        return batches if self._energy is None else self._looked_after(batches)

    def counting(self, batch: Batch) -> AbstractContextManager[None]:
        """Returns a context for the passes of a micro-batch; the first one's operations are counted."""
        return self._count(batch) if self._counts_next else _NOTHING

    def cost(self, rows: int, seconds: float) -> EpochCost:
        """Returns what the epoch cost all ranks. Runs on every rank.

        Args:
            rows: Rows of all ranks.
            seconds: Time of the epoch's steps.
        """
        used, energy = self._joules(), _UNKNOWN
        if used is not None and self._joules_before is not None:
            energy = round(1000 * (used - self._joules_before))
        sent = self._bytes_before
        found = None if sent is None else self._overlap.taken()
        mine = [
            _UNKNOWN if sent is None else self._world.bytes_sent - sent,
            energy,
            self._shared,
            self._flops,
            self._counted_rows,
            _UNKNOWN if self._peak is None else round(self._peak),
            # The measured steps stand for all.
            _UNKNOWN if found is None else found.total_ns * found.taken // found.measured,
            _UNKNOWN if found is None else found.hidden_ns * found.taken // found.measured,
        ]
        of_ranks = self._world.all_gather(torch.tensor(mine), [len(mine)] * self._world.size)
        num_bytes, joules, keys, flops, counted, peaks, communicated, hidden = zip(
            *(t.tolist() for t in of_ranks), strict=True
        )
        # A rank without rows in its first batch has counted nothing yet.
        known = [(f, n) for f, n in zip(flops, counted, strict=True) if n]
        total = None
        if known and all(f > 0 for f, _ in known):
            counted_rows = sum(n for _, n in known) / self._ranks_per_copy
            total = round(rows * sum(f for f, _ in known) / counted_rows)
        # Ranks that share a machine or a card all see the same counter.
        all_joules = _sum(dict(zip(keys, joules, strict=True)).values())
        peak = _sum(dict(zip(keys, peaks, strict=True)).values())
        all_ns, hidden_ns = _sum(communicated), _sum(hidden)
        return EpochCost(
            training_seconds=seconds,
            bytes_sent=_sum(num_bytes),
            flops=total,
            flops_utilization=total / seconds / peak if total and peak and seconds > 0 else None,
            energy_joules=None if all_joules is None else all_joules / 1000,
            communication_seconds=None if all_ns is None else all_ns / self._world.size / 1e9,
            communication_hidden=hidden_ns / all_ns if all_ns and hidden_ns is not None else None,
        )

    @contextmanager
    def _count(self, batch: Batch) -> Iterator[None]:
        self._counts_next = False
        with FlopCount() as count:
            yield
        self._flops, self._counted_rows = count.flops, batch.num_rows

    def _joules(self) -> float | None:
        if self._energy is None:
            return None
        try:
            return self._energy.joules()
        except OSError:
            self._energy = None
            return None

    def _looked_after(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        last = time.monotonic()
        for batch in batches:
            yield batch
            if time.monotonic() - last > _ENERGY_SECONDS:
                last = time.monotonic()
                self._joules()


def _sum(values: Iterable[int]) -> int | None:
    """Returns the sum; None if one of them is unknown."""
    found = list(values)
    return None if _UNKNOWN in found else sum(found)
