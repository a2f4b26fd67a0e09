"""Passes of a rank without rows, for networks whose passes call collectives.

Every rank runs the same number of passes: the largest number of micro-batches that any rank can have. A rank
that has run out of rows runs its last passes without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from ringspark.estimators.parallel.base import GradientSync, keep_buffers
from ringspark.models.outputs import as_outputs


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
            # This rank's own gradients are zeros; the pass still computes gradients of other ranks' tokens.
            torch.stack([output.float().sum() for output in outputs]).sum().backward()  # type: ignore[no-untyped-call]

    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        while self._passes < self._num_passes:
            with self._own_pass():
                self._run_without_rows()
        self._passes = 0
        super().reduce(scale)
