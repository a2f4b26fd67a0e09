"""Measures the cost of an epoch besides time: bytes, operations, energy, communication.

One all-gather at the epoch's end joins the ranks' measurements. Operations are counted in one micro-batch
after each start of the ranks, and scaled to all rows. For an epoch that was resumed in the middle, only the
operations are known.
"""

from __future__ import annotations

import hashlib
import operator
import re
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.history import EpochCost
from ringspark.estimators.training.observation.overlap import StepOverlap
from ringspark.estimators.training.settings.config import TrainConfig

RAPL_FOLDER = Path("/sys/class/powercap")
_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")

# Seconds between two reads of an energy counter; some wrap around every quarter of an hour.
_ENERGY_SECONDS = 60.0
_UNKNOWN = -1
_NOTHING: AbstractContextManager[None] = nullcontext()

# Operations per second without sparsity, in fp32 outside the tensor cores and in 16 bits, from the makers'
# data sheets. The first name that begins the device's name counts. CPUs have no entry, because their clock
# varies.
PEAKS: tuple[tuple[str, float, float], ...] = (
    ("NVIDIA H200", 67e12, 989e12),
    ("NVIDIA H100 PCIe", 51e12, 756e12),
    ("NVIDIA H100 80GB HBM3", 67e12, 989e12),
    ("NVIDIA A100", 19.5e12, 312e12),
    ("NVIDIA L40S", 91.6e12, 362e12),
    ("NVIDIA L4", 30.3e12, 121e12),
    ("Tesla V100-SXM2", 15.7e12, 125e12),
    ("Tesla V100-PCIE", 14e12, 112e12),
    ("Tesla T4", 8.1e12, 65e12),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    for name, single, half in PEAKS:
        if device_name == name or device_name.startswith((f"{name}-", f"{name} ")):
            # Before Ampere there were no tensor cores for bf16.
            if precision == "bf16" and name.startswith("Tesla"):
                return None
            return single if precision == "fp32" else half
    return None


class OperatorMode(TorchDispatchMode):
    """Calls `see` after every operator that runs on this thread while this mode is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def see(self, packet: Any, args: tuple[Any, ...], given: dict[str, Any], result: Any) -> None:
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see(func._overloadpacket, args, kwargs or {}, result)
        return result


class FlopCount(OperatorMode):  # type: ignore[no-untyped-call]
    """Counts matrix products, convolutions and attention.

    torch's `FlopCounterMode` also counts recomputation, and decomposes unknown operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def see(self, packet: Any, args: tuple[Any, ...], given: dict[str, Any], result: Any) -> None:
        # A forward pass within the backward pass recomputes; only it builds a graph there.
        if not (torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1):
            self.flops += count_flops(packet, args, given, result) or 0


# Matrix products per attention call on the CPU; torch counts only GPU kernels.
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": 2,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 5,
}


def count_flops(packet: Any, args: tuple[Any, ...], given: dict[str, Any], result: Any) -> int | None:
    """Returns the floating-point operations of a matrix product or similar; None for other operators."""
    if packet.__name__ in _ATTENTION:
        # The backward pass has the gradient in front of queries, keys and values.
        query, key = args[1:3] if packet.__name__.endswith("backward") else args[:2]
        rows, heads, queries, dim = query.shape
        return int(_ATTENTION[packet.__name__] * 2 * rows * heads * queries * key.shape[-2] * dim)
    return int(flop_registry[packet](*args, **given, out_val=result)) if packet in flop_registry else None


def device_key(device: torch.device) -> str:
    """Returns a name that ranks share if they share the GPU, or on CPUs the host."""
    if device.type != "cuda":
        return f"host {socket.gethostname()}"
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


class RaplEnergy:
    """The energy of a host's packages and their memory, from files that Linux often lets only root read."""

    def __init__(self, folder: Path = RAPL_FOLDER) -> None:
        # Cores are inside a package.
        zones = [zone for zone in folder.glob("intel-rapl:*") if _ZONE.fullmatch(zone.name)]
        names = {zone: (zone / "name").read_text().strip() for zone in zones}
        found = [zone for zone, name in names.items() if name.startswith("package") or name == "dram"]
        if not found:
            raise FileNotFoundError(f"no zone of a package below {folder}")
        self._files = [zone / "energy_uj" for zone in found]
        self._limits = [int((zone / "max_energy_range_uj").read_text()) for zone in found]
        self._last = [int(file.read_text()) for file in self._files]
        self._total = 0

    def joules(self) -> float:
        """Returns the energy since this object was made; call it at least every few minutes."""
        now = [int(file.read_text()) for file in self._files]
        for passed, limit in zip(map(operator.sub, now, self._last), self._limits, strict=True):
            self._total += passed if passed >= 0 else passed + limit  # the counter has wrapped around
        self._last = now
        return self._total / 1e6


class NvmlEnergy:
    """The energy of one GPU, the whole card, Volta or newer; needs the package nvidia-ml-py."""

    def __init__(self, device: torch.device) -> None:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(device_key(device))
        self._read = partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        self._first = self._read()

    def joules(self) -> float:
        return float(self._read() - self._first) / 1000


class EpochMeter:
    """Measures one epoch after another on one rank."""

    def __init__(
        self, config: TrainConfig, mesh: RankMesh, device: torch.device, overlap: StepOverlap | None
    ) -> None:
        self._world, self._overlap = mesh.world, overlap
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = peak_flops(name, config.precision)
        self._energy: RaplEnergy | NvmlEnergy | None = None
        # No energy if the machine does not report it; NVMLError is of a package that may be missing.
        with suppress(Exception):
            self._energy = NvmlEnergy(device) if device.type == "cuda" else RaplEnergy()
        # Equal on ranks that share a host or a GPU.
        key = hashlib.sha256(device_key(device).encode()).digest()
        self._shared = int.from_bytes(key[:7], "big")
        # Under the count, compiled code would run uncompiled.
        self._counts_next = not config.compile
        self._flops = _UNKNOWN
        self._counted_rows = 0
        self._ranks_per_replica = mesh.replica.size  # they share the same rows
        self._bytes_before: int | None = None
        self._joules_before: float | None = None

    def begin(self, *, is_whole: bool) -> None:
        self._bytes_before = self._world.bytes_sent if is_whole else None
        self._joules_before = self._joules() if is_whole else None
        if self._overlap is not None:
            self._overlap.begin()

    def steps(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields the batches, and reads the energy counter often enough between them."""
        last = time.monotonic()
        for batch in batches:
            yield batch
            if time.monotonic() - last > _ENERGY_SECONDS:
                last = time.monotonic()
                self._joules()

    def counting(self, batch: Batch) -> AbstractContextManager[None]:
        return self._count(batch) if self._counts_next else _NOTHING

    def cost(self, rows: int, seconds: float) -> EpochCost:
        """Returns the cost of the epoch's `rows`, in `seconds`, over all ranks. Runs on every rank."""
        used, energy = self._joules(), _UNKNOWN
        if used is not None and self._joules_before is not None:
            energy = round(1000 * (used - self._joules_before))
        sent = self._bytes_before
        found = None if sent is None or self._overlap is None else self._overlap.read()
        mine = [
            _UNKNOWN if sent is None else self._world.bytes_sent - sent,
            energy,
            self._shared,
            self._flops,
            self._counted_rows,
            _UNKNOWN if self._peak is None else round(self._peak),
            *(found or (_UNKNOWN, _UNKNOWN)),
        ]
        of_ranks = self._world.all_gather(torch.tensor(mine), [len(mine)] * self._world.size)
        num_bytes, joules, keys, flops, counted, peaks, communicated, hidden = zip(
            *(t.tolist() for t in of_ranks), strict=True
        )
        # A rank without rows in its first batch has counted nothing yet.
        known = [(f, n) for f, n in zip(flops, counted, strict=True) if n]
        total = None
        if known and all(f > 0 for f, _ in known):
            counted_rows = sum(n for _, n in known) / self._ranks_per_replica
            total = round(rows * sum(f for f, _ in known) / counted_rows)
        # Ranks that share a host or a GPU all read the same counter.
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
        if self._energy is not None:
            try:
                return self._energy.joules()
            except Exception:
                self._energy = None
        return None


def _sum(values: Iterable[int]) -> int | None:
    found = list(values)
    return None if _UNKNOWN in found else sum(found)
