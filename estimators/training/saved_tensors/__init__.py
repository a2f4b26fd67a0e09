"""Offloads or compresses the tensors that autograd saves in the forward pass for the backward pass.

`saved_tensor_hooks` wraps one forward pass. Every tensor that an operation saves for its backward goes
through `hooks.SavedTensors`, which may compress it (`compression`), move it out of the device's memory
(`offload`), or both, and restores it for the backward pass.

Invariants: offload and the compression "bits" keep every gradient bitwise equal (on the CPU); "int8" and
"fp8" change them by a measured error, and keep NaN and Inf, so that a loss scaler still sees an overflow.
Parameters and buffers, their views and their copies under autocast are not touched.

The techniques are vDNN's (Rhu et al. 2016) and Gist's (Jain et al. 2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from ringspark.estimators.training.saved_tensors.compression import ForwardMode
from ringspark.estimators.training.saved_tensors.hooks import SavedTensors
from ringspark.estimators.training.saved_tensors.offload import make_store


def saved_tensor_hooks(
    *, offload: str, compression: str, module: nn.Module, device: torch.device
) -> AbstractContextManager[None]:
    """Returns the context of one forward pass whose saved tensors are offloaded or compressed.

    Without gradients, or with neither technique, it is empty and costs nothing. Saved tensors live as long
    as the graph: after the backward pass, or when an exception drops the graph, memory and disk are free
    again.

    Args:
        offload: Value of `TrainConfig.activation_offload`.
        compression: Value of `TrainConfig.activation_compression`.
        module: The network; its parameters and buffers are not touched.
        device: Device of the training; saved tensors on other devices are not touched. On "meta",
            offloaded tensors are not held at all, so that bytes can be counted.

    Raises:
        OSError: The disk of offload "disk" is full or fails; raised in the pass.
    """
    if not torch.is_grad_enabled() or (offload == "none" and compression == "none"):
        return nullcontext()
    return _hooks(offload, compression, module, device)


@contextmanager
def _hooks(offload: str, compression: str, module: nn.Module, device: torch.device) -> Iterator[None]:
    saved = SavedTensors(module, device, compression, make_store(offload, device))
    mode = nullcontext() if compression == "none" else ForwardMode(saved.saving)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack), mode:
            yield
    finally:
        # The graph keeps the hooks alive; data for the forward pass alone is dropped here.
        saved.end_forward()
