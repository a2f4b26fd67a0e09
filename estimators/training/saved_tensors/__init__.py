"""What autograd keeps from the forward pass for the backward pass: elsewhere, or smaller.

`saved_tensor_hooks` stands around one forward pass. Every tensor that an operation saves for its
backward goes through `hooks.SavedTensors`, which may compress it (`compression`), move it out of the
device's memory (`offload`), or both, and gives it back when the backward pass asks for it.

Invariants: offload and the compression "bits" change no bit of any gradient; "int8" and "fp8" do, by a
measured error, and keep NaN and Inf, so that a loss scaler still sees an overflow. Parameters and
buffers, views of them and their copies under autocast stay where and what they are.

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
    """The context of one forward pass whose saved tensors are offloaded or compressed.

    Without gradients, or with neither technique, it is empty and costs nothing. What was saved lives as
    long as the graph does: after the backward pass, or when an exception drops the graph, memory and
    disk are free again.

    Args:
        offload: `TrainConfig.activation_offload`.
        compression: `TrainConfig.activation_compression`.
        module: The network; its parameters and buffers are left alone.
        device: Where the training computes; saved tensors of other devices are left alone. On "meta"
            what would leave the device is not held at all, so that bytes can be counted.

    Raises:
        OSError: In the pass, where the disk of offload "disk" is full or fails.
    """
    if not torch.is_grad_enabled() or (offload == "none" and compression == "none"):
        return nullcontext()
    return _hooks(offload, compression, module, device)


@contextmanager
def _hooks(offload: str, compression: str, module: nn.Module, device: torch.device) -> Iterator[None]:
    saved = SavedTensors(module, device, compression, make_store(offload, device))
    mode = nullcontext() if compression == "none" else ForwardMode(saved)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack), mode:
            yield
    finally:
        # The graph holds the hooks: what only the forward pass needs must not live as long.
        saved.end_forward()


__all__ = ["saved_tensor_hooks"]
