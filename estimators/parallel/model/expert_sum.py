"""Sums the gradients of a network whose experts are spread over ranks that read different rows.

A rank's experts have computed tokens of all ranks of their axis, so their gradients are summed over the ranks
that have the same experts; those of everything else over all ranks.

Invariant: every rank runs a pass for each micro-batch that any rank may have, without rows if need be: its
experts serve the other ranks' tokens, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import nn

from ringspark.estimators.parallel.data.gradient_sum import SummedGradients
from ringspark.estimators.parallel.mesh import Mesh
from ringspark.estimators.parallel.model.expert import expert_names
from ringspark.models.outputs import as_outputs


class ExpertSum(SummedGradients):
    """Gradients summed over the ranks that have the parameter; passes without rows for the others' sake."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        *,
        rounds: int,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        bucket_bytes: int | Literal["chosen"] | None = "chosen",
    ) -> None:
        """Ties the gradients together.

        Args:
            module: This rank's part of the network; `spread_experts` has cut it.
            rounds: Most micro-batches of a step on any rank; 0 where whoever runs the passes, those of a
                pipeline, runs those without rows too.
            around: Makes the context of a forward pass, autocast, for passes without rows.
            bucket_bytes: See `SummedGradients`.
        """
        experts = expert_names(module)
        super().__init__(
            module,
            optimizer,
            mesh.gradients,
            over=lambda name: mesh.expert_gradients if name in experts else mesh.gradients,
            bucket_bytes=bucket_bytes,
        )
        # An overflow in some experts is known to their ranks alone.
        self.ranks_differ = True
        self._rounds = rounds
        self._round = 0
        self._around = around
        self._like: list[torch.Tensor] = []
        if rounds:
            module.register_forward_pre_hook(self._remember)

    def _remember(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._like = [values[:0].detach() for values in inputs]

    def backward_without_rows(self, inputs: Sequence[torch.Tensor] = ()) -> None:
        # `reduce` makes up for the rounds themselves.
        self._like = [values[:0].detach() for values in inputs]

    def forward_without_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        with torch.no_grad(), self._around():
            self.network(*(values[:0] for values in inputs))

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return self._own_round()

    @contextmanager
    def _own_round(self) -> Iterator[None]:
        # Gradients are complete after the last round of all, which may be one without rows.
        with super().micro_batch(last=self._round + 1 == self._rounds):
            yield
        self._round += 1

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
        while self._round < self._rounds:
            with self._own_round():
                self._run_without_rows()
        self._round = 0
        super().reduce(scale)
