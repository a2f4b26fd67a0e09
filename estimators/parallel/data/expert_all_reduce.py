"""Synchronizes the gradients of experts, which ranks with different rows share.

Every rank runs the same number of passes: the largest number of micro-batches that any rank can have. A rank
that has run out of rows runs its last passes without rows, because its experts compute other ranks' tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import nn

from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.data.gradient_all_reduce import GradientAllReduce
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.model.expert import expert_names
from ringspark.estimators.parallel.sync_settings import SyncSettings
from ringspark.models.outputs import as_outputs


def num_empty_passes(mesh: RankMesh, settings: SyncSettings) -> int:
    return 0 if mesh.sizes["pipeline"] > 1 else settings.micro_batches


@contextmanager
def keep_buffers(network: nn.Module) -> Iterator[None]:
    """Restores the network's buffers at the end."""
    kept = [(buffer, buffer.clone()) for buffer in network.buffers()]
    yield
    with torch.no_grad():
        for buffer, values in kept:
            buffer.copy_(values)


class EmptyPasses(GradientSync):
    """Mixin that adds passes without rows. List it before the base class that synchronizes the gradients.

    A subclass calls the constructor of that base class first, then `add_empty_passes`.
    """

    def add_empty_passes(
        self, num_passes: int, autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Makes every step have `num_passes` passes; 0 for a pipeline, which adds passes itself."""
        self._num_passes, self._passes, self._autocast = num_passes, 0, autocast
        self._like: list[torch.Tensor] = []
        if num_passes:
            self.network.register_forward_pre_hook(self._remember)

    def _remember(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._like = [values[:0].detach() for values in inputs]

    def backward_without_rows(self, inputs: Sequence[torch.Tensor] = ()) -> None:
        # `reduce` runs the missing passes.
        self._like = [values[:0].detach() for values in inputs]

    def forward_without_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        with torch.no_grad(), self._autocast():
            self.network(*(values[:0] for values in inputs))

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return self._own_pass()

    @contextmanager
    def _own_pass(self) -> Iterator[None]:
        # The last pass may be one without rows.
        with super().micro_batch(last=self._passes + 1 == self._num_passes):
            yield
        self._passes += 1

    def _run_without_rows(self) -> None:
        """Runs a pass over no rows; buffers do not change."""
        with keep_buffers(self.network):
            with self._autocast():
                outputs = as_outputs(self.module(*self._like))
            # The sum of no numbers has gradients of zeros; gradients of the other ranks' tokens flow too.
            torch.stack([output.float().sum() for output in outputs]).sum().backward()  # type: ignore[no-untyped-call]

    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        while self._passes < self._num_passes:
            with self._own_pass():
                self._run_without_rows()
        self._passes = 0
        super().reduce(scale)


class ExpertAllReduce(EmptyPasses, GradientAllReduce):
    """Each gradient is all-reduced over the ranks that have the parameter."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: RankMesh,
        settings: SyncSettings,
        *,
        bucket_bytes: int | Literal["chosen"] | None = "chosen",
    ) -> None:
        experts = expert_names(module)
        GradientAllReduce.__init__(
            self,
            module,
            optimizer,
            mesh.gradients,
            over=lambda name: mesh.expert_gradients if name in experts else mesh.gradients,
            bucket_bytes=bucket_bytes,
        )
        # An overflow in some experts is known to their ranks alone.
        self.ranks_differ = True
        self.add_empty_passes(num_empty_passes(mesh, settings), settings.autocast)
