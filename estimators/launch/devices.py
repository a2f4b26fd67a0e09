"""Assigns a device to every rank.

Spark names the GPU of a task by the node's index, an index in the container or a UUID, but not by its PyTorch
index. So all ranks gather the devices that they were given and that they see, and compute the same table. A
reused Python worker may still have the last job's `CUDA_VISIBLE_DEVICES`, so this module does not read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_REMEDY = (
    "set spark.executor.resource.gpu.amount to the GPUs of an executor and spark.task.resource.gpu.amount=1, "
    "or set useGpu=False"
)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The GPUs that one rank was given and the GPUs that it sees.

    `addresses` are the GPUs that Spark assigned, if it manages GPUs. `visible` are the CUDA devices in the
    order of PyTorch's indices: their UUIDs if known, else their indices.
    """

    host: str
    addresses: tuple[str, ...] = ()
    visible: tuple[str, ...] = ()


def visible_devices() -> tuple[str, ...]:
    import torch

    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    # Only CUDA builds know the UUID; without it, the index identifies a device on its host as well.
    return tuple(str(getattr(value, "uuid", index)) for index, value in enumerate(properties))


def check_enough(num_workers: int, host: str, num_gpus: int) -> None:
    """Raises ValueError if a host without GPU scheduling by Spark has fewer GPUs than workers."""
    if num_gpus < num_workers:
        raise ValueError(
            f"useGpu=True needs a GPU for each of the {num_workers} workers on host {host}, but "
            f"PyTorch sees {num_gpus} there; lower numWorkers or set useGpu=False"
        )


def assign_devices(claims: Sequence[Claim]) -> list[str]:
    """Returns the torch device of every rank, in the order of `claims`."""
    _check_not_shared(claims)
    # Ranks that see the same devices use the same indices.
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for number, claim in enumerate(claims):
        groups.setdefault((claim.host, claim.visible), []).append(number)
    indices: dict[int, int] = {}
    for members in groups.values():
        indices.update(zip(members, _indices([claims[m] for m in members]), strict=True))
    # Processes that see different devices may use two indices for the same card.
    devices = Counter((claim.host, claim.visible[indices[number]]) for number, claim in enumerate(claims))
    for (host, device), count in devices.items():
        if count > 1:
            raise ValueError(
                f"useGpu=True needs a separate GPU for each worker, but two workers of host {host} "
                f"resolve to device {device}; {_REMEDY}"
            )
    return [f"cuda:{indices[number]}" for number in range(len(claims))]


def _check_not_shared(claims: Iterable[Claim]) -> None:
    # Spark shares a GPU if a task needs only a fraction of it. Two containers on one host may each call their
    # only card "0", so visible devices are compared too.
    counts = Counter((claim.host, claim.visible, claim.addresses[0]) for claim in claims if claim.addresses)
    for (host, _, address), count in counts.items():
        if count > 1:
            raise ValueError(
                f"useGpu=True needs a separate GPU for each worker, but Spark gave GPU {address!r} of host "
                f"{host} to {count} of them (spark.task.resource.gpu.amount is below 1); {_REMEDY}"
            )


def _indices(group: Sequence[Claim]) -> list[int]:
    visible, host = group[0].visible, group[0].host
    if not group[0].addresses:
        check_enough(len(group), host, len(visible))
        return list(range(len(group)))
    names = [_strip_prefix(name) for name in visible]
    # A task that asks for several GPUs has several addresses; the rank computes on the first.
    addresses = [claim.addresses[0] for claim in group]
    if all(_strip_prefix(address) in names for address in addresses):
        return [names.index(_strip_prefix(address)) for address in addresses]
    if all(address.isdecimal() and int(address) < len(visible) for address in addresses):
        return [int(address) for address in addresses]
    # In an isolated process, the visible devices are the given devices, renumbered in the same order.
    given = sorted({a for claim in group for a in claim.addresses}, key=lambda a: (len(a), a))
    if len(given) == len(visible):
        return [given.index(address) for address in addresses]
    raise ValueError(
        f"useGpu=True needs PyTorch to see the GPUs that Spark assigns: on host {host} Spark assigned "
        f"{', '.join(given)}, but PyTorch sees {len(visible)} device(s); install a CUDA build of torch, "
        "let the executors see all of their GPUs (spark.executorEnv.CUDA_VISIBLE_DEVICES, and "
        "spark.python.worker.reuse=false if another job changes it), or set useGpu=False"
    )


def _strip_prefix(name: str) -> str:
    # Spark's discovery scripts write `GPU-` in front of a UUID; PyTorch does not.
    return name.lower().removeprefix("gpu-")
