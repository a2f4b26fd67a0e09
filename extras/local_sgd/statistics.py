"""Averages floating-point buffers over the ranks, such as running statistics of batch normalization.

Only buffers that changed on some rank since the last time are averaged, so that rounding does not change
constants, such as a mask with infinities. Integers, such as a count of batches, differ between ranks until a
validation shares rank 0's.
"""

from __future__ import annotations

import torch
from torch import nn

from ringspark.estimators.collectives import Collective


class Statistics:
    def __init__(self, network: nn.Module, collective: Collective) -> None:
        self._network = network
        self._collective = collective
        saved = network.state_dict().keys()
        self._seen = {
            name: buffer.detach().clone()
            for name, buffer in network.named_buffers()
            if name in saved and buffer.is_floating_point()
        }

    @torch.no_grad()
    def average(self) -> None:
        """Makes the changed buffers their average over the ranks. Runs on every rank."""
        if not self._seen:
            return
        buffers = dict(self._network.named_buffers())
        own = [buffers.get(name) for name in self._seen]
        first = next(iter(self._seen.values()))
        is_double = any(seen.dtype == torch.float64 for seen in self._seen.values())
        dtype = torch.float64 if is_double else torch.float32
        values, fits, changed = [], [], []
        for seen, buffer in zip(self._seen.values(), own, strict=True):
            # Every rank sends as much, whatever shapes its buffers have by now.
            has_shape = buffer is not None and buffer.shape == seen.shape
            is_other = has_shape and buffer is not None and not torch.equal(buffer, seen)
            source = buffer if has_shape and buffer is not None else torch.zeros_like(seen)
            values.append(source.detach().reshape(-1).to(dtype))
            fits.append(float(has_shape))
            changed.append(float(is_other))
        flags = torch.tensor([*fits, *changed], dtype=dtype, device=first.device)
        flat = torch.cat([*values, flags])
        self._collective.start_sum(flat, "local.buffers")()
        sizes = [seen.numel() for seen in self._seen.values()]
        *sums, flags = torch.split(flat, [*sizes, len(flags)])
        everywhere, anywhere = flags.view(2, -1).tolist()
        for index, (name, buffer) in enumerate(zip(self._seen, own, strict=True)):
            if buffer is None or everywhere[index] != self._collective.size or not anywhere[index]:
                continue
            buffer.copy_((sums[index] / self._collective.size).view(buffer.shape))
            self._seen[name] = buffer.detach().clone()
