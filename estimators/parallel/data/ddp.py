"""Averages gradients with torch's DistributedDataParallel during the backward pass (Li et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import backward_errors, num_bytes
from ringspark.estimators.parallel.base import PlainSync
from ringspark.models.outputs import as_outputs


class _Anchored(nn.Module):
    """The module for DistributedDataParallel to wrap, with one more parameter that needs no rows, the anchor.

    With the anchor, a rank without rows has a backward pass that uses no parameter of the module. If an
    output has more tensors than the losses take (hidden states, an unused head), the rest is dropped,
    because DistributedDataParallel would wait for its gradients.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self.anchor = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if not inputs:
            return self.anchor * 0.0
        output = self.module(*inputs)
        return output if isinstance(output, torch.Tensor) else as_outputs(output)


class DdpSync(PlainSync):
    """Gradients averaged by DistributedDataParallel; `loss_factor` turns the mean into a sum.

    It looks for unused parameters in every step, because a network may branch by its data. Their gradients
    count as zeros if another rank used them, and stay None if none did.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, collective: Collective, micro_batches: int
    ) -> None:
        device = next(module.parameters()).device
        # Buffers are not synchronized: as with Horovod, each rank keeps its own running statistics and the
        # checkpoint takes rank 0's. torch 2.13 renamed the argument.
        renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        options: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
        anchored = _Anchored(module, device)
        self._parallel: DistributedDataParallel | None = DistributedDataParallel(
            anchored,
            # No device_ids: with them it indexes the arguments, and a rank without rows passes none.
            find_unused_parameters=True,
            **options,
        )
        super().__init__(self._parallel, optimizer)
        self.network = module
        self.loss_factor = float(collective.size)
        self._traffic = collective.traffic
        # The reducer refers to the process group, whose connections close only without any reference.
        collective.on_leave(self.release)
        # Its buckets hold every trainable parameter, also those that the optimizer leaves out; a flag of
        # 4 bytes for each says whether a rank used it.
        exchanged = [p for p in anchored.parameters() if p.requires_grad]
        self._gradient_bytes = num_bytes(exchanged) + 4 * len(exchanged)

    def backward_without_rows(self, inputs: Sequence[torch.Tensor] = ()) -> None:
        with backward_errors():
            self.module().sum().backward()

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        if self._parallel is not None and not last:
            return self._parallel.no_sync()
        return nullcontext()

    def reduce(self) -> None:
        # The reduction itself ended with the backward pass.
        self._traffic.all_reduce(self._gradient_bytes)

    def release(self) -> None:
        """Gives the wrapped module back and drops the reducer."""
        self.module, self._parallel = self.network, None
