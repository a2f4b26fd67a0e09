"""Records the buffers that a forward pass changes, so that a rerun does not change a running mean twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

Key = tuple[str, str]  # (path of the submodule, name of the buffer)
Values = dict[Key, torch.Tensor]


class MovingBuffers:
    """Learns which buffers a module's forward pass changes, and copies only these before each pass.

    Autograd's version counter shows a change. Batch normalization does not increase it, but in training it
    does not read its buffers, so a rerun needs no copies.
    """

    def __init__(self) -> None:
        self._moving: set[Key] | None = None

    @contextlib.contextmanager
    def record(self, module: nn.Module) -> Iterator[Values]:
        """Wraps a forward pass; the yielded dict holds the old values of changed buffers at the end."""
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
def replace_buffers(module: nn.Module, recorded: Values) -> Iterator[None]:
    """Wraps a rerun: replaces all buffers by copies of their recorded or else their present values.

    Writing in place would fail autograd's version check on saved tensors.
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
