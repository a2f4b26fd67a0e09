"""Counts the floating-point operations of a network, and knows how many some devices can do.

What is counted are products of matrices, convolutions and attention, forward and backward, as torch's own
table of them says (`torch.utils.flop_counter`): the operations of the model. What is computed a second time
in the backward pass, because memory was saved, is left out. `FlopCounterMode` itself is not used, because it
counts that too, and decomposes what it does not know, so that other kernels may run than in the steps that
are not counted. Here every operation runs as it would without the count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# Operations per second without sparsity, in fp32 outside the tensor cores, and in 16 bits: from the makers'
# data sheets. The first name that begins the device's name counts. A device that is not here has no known
# peak, and neither has a processor, whose clock goes up and down.
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
    """Returns the most operations a second of a device, None where it is not known."""
    for name, single, half in PEAKS:
        if device_name == name or device_name.startswith((f"{name}-", f"{name} ")):
            # Before Ampere there were no tensor cores for bf16.
            if precision == "bf16" and name.startswith("Tesla"):
                return None
            return single if precision == "fp32" else half
    return None


class FlopCount(TorchDispatchMode):
    """Counts what runs within it on this thread, and in the backward pass that this thread begins."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        count = flop_registry.get(func._overloadpacket)
        if count is not None and not _is_recomputing():
            self.flops += int(count(*args, **given, out_val=result))
        return result


def _is_recomputing() -> bool:
    """Returns whether a forward pass runs within the backward pass: only that one builds a graph there."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
