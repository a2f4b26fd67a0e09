"""Reads how much energy a rank's machine used, where it says so.

A processor says it by RAPL, in files that Linux often lets only root read: the energy of the packages and
their memory, whatever ran on them. A GPU says it by NVML, whose library comes with the driver, since Volta:
the energy of the whole card. A training on a GPU counts the card, and leaves the host out.
"""

from __future__ import annotations

import ctypes
import re
import socket
from pathlib import Path
from typing import Protocol

import torch

RAPL_FOLDER = Path("/sys/class/powercap")


class EnergySource(Protocol):
    """A counter that only grows."""

    def joules(self) -> float:
        """Returns the energy since the source was made; to be called every few minutes at least.

        Raises:
            OSError: The machine says it no longer.
        """


def device_key(device: torch.device) -> str:
    """Returns a name that ranks have in common if they share the card, or on processors the host."""
    if device.type != "cuda":
        return f"host {socket.gethostname()}"
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def energy_source(device: torch.device) -> EnergySource | None:
    """Returns what the device's energy is read from; None if the machine does not say it."""
    try:
        return NvmlEnergy(device) if device.type == "cuda" else RaplEnergy()
    except OSError:
        return None


class RaplEnergy:
    """The processor's packages and their memory, in microjoules that begin anew at a largest value."""

    def __init__(self, folder: Path = RAPL_FOLDER) -> None:
        """Raises OSError if there is nothing that can be read."""
        found = [zone for zone in folder.glob("intel-rapl:*") if _is_counted(zone)]
        if not found:
            raise FileNotFoundError(f"no zone of a package below {folder}")
        self._zones = [(zone / "energy_uj", _number(zone / "max_energy_range_uj")) for zone in found]
        self._last = [_number(file) for file, _ in self._zones]
        self._total = 0

    def joules(self) -> float:
        for index, (file, most) in enumerate(self._zones):
            now = _number(file)
            passed = now - self._last[index]
            self._total += passed if passed >= 0 else passed + most
            self._last[index] = now
        return self._total / 1e6


def _is_counted(zone: Path) -> bool:
    """Returns whether the zone is a package or its memory; cores are parts of a package."""
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
    """One GPU, in millijoules since its driver was loaded."""

    def __init__(self, device: torch.device) -> None:
        """Raises OSError if the library or the card does not say it."""
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", device_key(device).encode(), ctypes.byref(self._handle))
        self._first = self._read()

    def joules(self) -> float:
        return (self._read() - self._first) / 1000

    def _read(self) -> int:
        value = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(value))
        return value.value

    def _call(self, name: str, *args: object) -> None:
        if code := getattr(self._library, name)(*args):
            raise OSError(f"{name} returned {code}")
