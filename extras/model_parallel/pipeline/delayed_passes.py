"""Runs the passes of the schedules in `delayed`: a stage may apply the gradients of an earlier step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ringspark.extras.model_parallel.pipeline.actions import CompletedActions, with_arrivals
from ringspark.extras.model_parallel.pipeline.delayed import Backlog, DelayedStep
from ringspark.extras.model_parallel.pipeline.executor import Added, Context, Loss
from ringspark.extras.model_parallel.pipeline.passes import PipelinePasses, add_nothing


class StashedWeights:
    """Copy of a module's parameters at one step, with the gradients of the step's micro-batches.

    Weight stashing (Narayanan et al. 2019, "PipeDream"): a micro-batch's backward pass uses the same weights
    as its forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        # One copy per tied parameter, so that its gradients add up.
        copies = {p: nn.Parameter(p.detach().clone()) for p in module.parameters() if p.requires_grad}
        self._places = [
            (owner, name, parameter, copies[parameter])
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter in copies
        ]

    @contextmanager
    def use(self) -> Iterator[None]:
        """Makes the module use this copy, also in backward passes, which may recompute layers."""
        for owner, name, _, copy in self._places:
            setattr(owner, name, copy)
        try:
            yield
        finally:
            for owner, name, parameter, _ in self._places:
                setattr(owner, name, parameter)

    def release(self) -> None:
        with torch.no_grad():
            for _, _, parameter, copy in self._places:
                parameter.grad = copy.grad


class DelayedPasses(PipelinePasses):
    """Passes of one rank; each step has its own copy of the weights."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self._schedule.delays is not None
        self._delays = self._schedule.delays(self._num_ranks, self._num_micro)
        self._backlog = Backlog(self._delays)
        self._progress = CompletedActions(self.num_stages)
        # Versions of this stage by step number, and the step of each unfinished micro-batch.
        self._versions: dict[int, StashedWeights] = {}
        self._step_of: dict[int, int] = {}
        self.executor.weights = self._weights_of

    @property
    def steps_in_flight(self) -> int:
        return self._backlog.steps_left

    def train(
        self,
        micro_batches: Sequence[Sequence[torch.Tensor]],
        loss: Loss,
        around: Context = nullcontext,
        added: Added = add_nothing,
    ) -> None:
        self._train_late(self._backlog.step(len(micro_batches)), micro_batches, loss, around, added)

    def drain(self) -> None:
        step = self._backlog.step(0, is_drain=True)
        self._train_late(step, (), _no_loss, nullcontext, add_nothing)

    def _train_late(
        self,
        step: DelayedStep,
        micro_batches: Sequence[Sequence[torch.Tensor]],
        loss: Loss,
        around: Context,
        added: Added,
    ) -> None:
        (stage,) = self.stages
        self._step_of |= dict.fromkeys(step.micros, step.number)
        if step.micros and self._delays[stage]:
            self._versions[step.number] = StashedWeights(self.network)
        orders = step.orders[::-1]  # by rank: rank 0 has the last stage
        steps = with_arrivals(orders, self._place.owners, self._progress)[self._place.rank]
        self.executor.around = around
        self.executor.train(self.module, steps, micro_batches, loss, added, step.micros.start)
        number = step.released.get(stage)
        if number is not None and number in self._versions:
            self._versions.pop(number).release()
        self._progress.forget(step.finished)
        self.executor.forget(step.finished)
        for micro in step.finished:
            self._step_of.pop(micro, None)
        self._ties.add(step.released)

    def _weights_of(self, micro: int) -> AbstractContextManager[object]:
        version = self._versions.get(self._step_of.get(micro, -1))
        return nullcontext() if version is None else version.use()


def _no_loss(outputs: Any, index: int) -> torch.Tensor:
    raise AssertionError("a step without rows has no losses")
