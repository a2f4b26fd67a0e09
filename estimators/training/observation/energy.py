"""Reads the energy that a rank's device used, if the machine reports it.

CPUs report it by RAPL, in files that Linux often lets only root read; GPUs by NVML (package nvidia-ml-py).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

RAPL_FOLDER = Path("/sys/class/powercap")


def device_key(device: torch.device) -> str:
    """Returns a name that ranks share if they share the GPU, or on CPUs the host."""
    if device.type != "cuda":
        return f"host {socket.gethostname()}"
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def energy_source(device: torch.device) -> RaplEnergy | NvmlEnergy | None:
    """Returns the device's energy counter; None if the machine has none."""
    try:
        return NvmlEnergy(device) if device.type == "cuda" else RaplEnergy()
    except OSError:
        return None


class RaplEnergy:
    """The processor's packages and their memory, by counters in microjoules that wrap around."""

    def __init__(self, folder: Path = RAPL_FOLDER) -> None:
        found = [zone for zone in folder.glob("intel-rapl:*") if _is_counted(zone)]
        if not found:
            raise FileNotFoundError(f"no zone of a package below {folder}")
        self._zones = [(zone / "energy_uj", _number(zone / "max_energy_range_uj")) for zone in found]
        self._last = [_number(file) for file, _ in self._zones]
        self._total = 0

    def joules(self) -> float:
        """Returns the energy since this object was made; call it at least every few minutes."""
        for index, (file, most) in enumerate(self._zones):
            now = _number(file)
            passed = now - self._last[index]
            self._total += passed if passed >= 0 else passed + most
            self._last[index] = now
        return self._total / 1e6


def _is_counted(zone: Path) -> bool:
    """Returns whether the zone is a package or its memory; cores are inside a package."""
    if re.fullmatch(r"intel-rapl:\d+(:\d+)?", zone.name) is None:
        return False
    name = (zone / "name").read_text().strip()
    return name.startswith("package") or name == "dram"


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except ValueError as error:
        raise OSError(f"{file} has no number") from error


class NvmlEnergy:
    """One GPU, by a counter in millijoules."""

    def __init__(self, device: torch.device) -> None:
        with _nvml_errors():
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(device_key(device))
            self._read = partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
            self._first = self._read()

    def joules(self) -> float:
        with _nvml_errors():
            return float(self._read() - self._first) / 1000


@contextmanager
def _nvml_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # ImportError, or an NVMLError of the package that may be missing
        raise OSError(f"NVML is not available ({type(error).__name__}: {error})") from error
