"""Buffers that a forward pass changes, so that a second run finds them as the first did and changes copies.

Batch normalisation would otherwise take every batch into its running mean twice, and spectral
normalisation would divide by another estimate than in the forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

Key = tuple[str, str]  # Path of the submodule, name of the buffer.
Values = dict[Key, torch.Tensor]


class MovingBuffers:
    """Learns which buffers of a module its forward pass changes; only those are copied before each pass.

    A change is told by autograd's version counter, which batch normalisation's kernels do not move: in
    training they write their buffers without reading them, so nothing is lost. A buffer that stays the
    same through the first pass is copied from the pass on that follows its first change.
    """

    def __init__(self) -> None:
        self._moving: set[Key] | None = None

    @contextlib.contextmanager
    def recorded(self, module: nn.Module) -> Iterator[Values]:
        """Around a forward pass: yields what is filled at its end, the changed buffers as they were."""
        recorded: Values = {}
        before = _buffers(module)
        versions = {key: buffer._version for key, buffer in before.items()}
        wanted = before.keys() if self._moving is None else self._moving & before.keys()
        copies = {key: before[key].detach().clone() for key in wanted}
        try:
            yield recorded
        finally:
            after = _buffers(module)
            moved = {
                key
                for key, buffer in before.items()
                if after.get(key) is not buffer or buffer._version != versions[key]
            }
            self._moving = (self._moving or set()) | moved
            recorded |= {key: copies[key] for key in moved & copies.keys()}


@contextlib.contextmanager
def replaced(module: nn.Module, recorded: Values) -> Iterator[None]:
    """Around a second run: copies in the place of all buffers, of what was recorded or else as they are.

    They are swapped, not written back: writing in place would trip autograd's version check on tensors
    that the forward pass saved.
    """
    kept = [(path, owner, dict(owner._buffers)) for path, owner in module.named_modules() if owner._buffers]
    for path, owner, buffers in kept:
        for name, buffer in buffers.items():
            if buffer is not None:
                was = recorded.get((path, name))
                owner._buffers[name] = (buffer if was is None else was).clone()
    try:
        yield
    finally:
        for _, owner, buffers in kept:
            owner._buffers.update(buffers)


def _buffers(module: nn.Module) -> Values:
    return {
        (path, name): buffer
        for path, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    }
