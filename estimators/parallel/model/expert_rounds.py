"""Passes without rows, by which a rank's experts serve the tokens of ranks that have rows.

Invariant: every rank runs a pass for each micro-batch that any rank may have, without rows if need be: its
experts serve the other ranks' tokens, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from ringspark.estimators.parallel.base import PlainSync
from ringspark.models.outputs import as_outputs

Around = Callable[[], AbstractContextManager[object]]


class ExpertRounds(PlainSync):
    """Stands before the class that exchanges the gradients; that one's constructor comes before `serve`."""

    def serve(self, rounds: int, around: Around) -> None:
        """Makes every step have the same number of passes on all ranks.

        Args:
            rounds: Most micro-batches of a step on any rank; 0 where whoever runs the passes, those of a
                pipeline, runs those without rows too.
            around: Makes the context of a forward pass, autocast, for passes without rows.
        """
        self._num_passes = rounds
        self._passes = 0
        self._around = around
        self._like: list[torch.Tensor] = []
        if rounds:
            self.network.register_forward_pre_hook(self._remember)

    def _remember(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._like = [values[:0].detach() for values in inputs]

    def backward_without_rows(self, inputs: Sequence[torch.Tensor] = ()) -> None:
        # `reduce` makes up for the passes themselves.
        self._like = [values[:0].detach() for values in inputs]

    def forward_without_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        with torch.no_grad(), self._around():
            self.network(*(values[:0] for values in inputs))

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return self._own_pass()

    @contextmanager
    def _own_pass(self) -> Iterator[None]:
        # Gradients are complete after the last pass of all, which may be one without rows.
        with super().micro_batch(last=self._passes + 1 == self._num_passes):
            yield
        self._passes += 1

    def _run_without_rows(self) -> None:
        """Runs a pass over no rows; buffers do not change."""
        kept = [(buffer, buffer.clone()) for buffer in self.network.buffers()]
        with self._around():
            outputs = as_outputs(self.module(*self._like))
        # Sums of no numbers: their gradients are zeros, and those of the other ranks' tokens pass as well.
        torch.stack([output.float().sum() for output in outputs]).sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for buffer, values in kept:
                buffer.copy_(values)

    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        while self._passes < self._num_passes:
            with self._own_pass():
                self._run_without_rows()
        self._passes = 0
        super().reduce(scale)
