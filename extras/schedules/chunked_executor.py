"""Runs stages that pass values in sequence chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ringspark.extras.model_parallel.pipeline.actions import Action
from ringspark.extras.model_parallel.pipeline.executor import Executor, select_differentiable
from ringspark.extras.model_parallel.pipeline.sections import StageSection
from ringspark.extras.model_parallel.pipeline.wire import Values, Wait
from ringspark.extras.schedules.chunk_passes import (
    ChunkPass,
    Give,
    Gradients,
    LiveChunks,
    Span,
    run_backward,
    run_forward,
)
from ringspark.models.chain import State, as_values
from ringspark.models.reports import num_losses

_ADDS_IN_CHUNKS = (
    "Pipeline's sequence_chunks does not support layers that add to the loss in a stage that works on "
    "sequence chunks; leave sequence_chunks out"
)


class ChunkedExecutor(Executor):
    def _evaluate(
        self, module: nn.Module, stage: int, micro: int, inputs: Sequence[torch.Tensor]
    ) -> tuple[Any, list[Wait]]:
        if not self._place.sections[stage]:
            return super()._evaluate(module, stage, micro, inputs)
        sent: list[Wait] = []
        returned: list[Any] = []
        give = self._giver(stage, micro, sent, returned)
        with self.weights(micro), self.around():
            self._run_forward(module, stage, micro, inputs, give, nullcontext)
        return returned[0] if returned else None, sent

    def _keep_forward(
        self,
        module: nn.Module,
        action: Action,
        arguments: Values,
        loss: Callable[[Any], torch.Tensor],
        added: Callable[[], torch.Tensor | None],
    ) -> None:
        _, stage, micro = action
        if not self._place.sections[stage]:
            super()._keep_forward(module, action, arguments, loss, added)
            return
        live = self._live[stage, micro] = LiveChunks([])
        returned: list[Any] = []
        give = self._giver(stage, micro, live.sent, returned)
        span = partial(self.span, action)
        # One context for all chunks, because it collects the layers' reports of the micro-batch.
        with self.weights(micro), self.around():
            live.sections = self._run_forward(module, stage, micro, arguments, give, span)
        if stage == self._place.last:
            # Outside autocast, as for whole rows: the loss is computed in fp32.
            with self.span(action):
                live.sections[-1][0].results = select_differentiable((loss(returned.pop()),))
        elif added() is not None:
            raise ValueError(_ADDS_IN_CHUNKS)

    def _backward(self, action: Action) -> None:
        _, stage, micro = action
        if not self._place.sections[stage]:
            super()._backward(action)
            return
        with self.weights(micro):
            self._run_backward(stage, micro, self._live[stage, micro], partial(self.span, action))
        del self._live[stage, micro]

    def _giver(self, stage: int, micro: int, sent: list[Wait], returned: list[Any]) -> Give:
        def give(result: Any, chunk: int) -> list[torch.Tensor]:
            if stage == self._place.last:
                returned.append(result)
                return []
            outputs = as_values(result, self._place.firsts[stage + 1])
            sent.append(self._exchange.hand_on(outputs, stage, micro, chunk))
            return select_differentiable(outputs)

        return give

    def _run_forward(
        self,
        module: nn.Module,
        stage: int,
        micro: int,
        arguments: Sequence[torch.Tensor | None],
        give: Give,
        span: Span,
    ) -> list[list[ChunkPass]]:
        """Runs a stage's forward pass; returns the `ChunkPass` objects of each `StageSection`.

        Stage 0 takes `arguments`; a later stage takes the values that the previous stage sends.
        """
        streams_in, lengths = self._place.streams_in(stage), self._exchange.lengths(micro)
        if stage == 0:
            arriving: Iterator[Values] = iter([tuple(arguments)])
        else:
            chunks = range(len(lengths) if streams_in else 1)
            arriving = (self._exchange.arrived(True, stage, micro, chunk) for chunk in chunks)

        def call(
            values: Values, section: StageSection, states: Sequence[State]
        ) -> tuple[Any, Sequence[State]]:
            known = num_losses()
            found: tuple[Any, Sequence[State]] = module(
                *values,
                stage=stage,
                part=(section.first, section.end, states if section.is_chunked else None),
            )
            if section.is_chunked and num_losses() > known:
                raise ValueError(_ADDS_IN_CHUNKS)
            return found

        sections = self._place.sections[stage]
        return run_forward(sections, lengths, arriving, call, give, streams_in=streams_in, span=span)

    def _run_backward(self, stage: int, micro: int, live: LiveChunks, span: Span) -> None:
        place, lengths = self._place, self._exchange.lengths(micro)
        if stage == place.last:
            gradients: Gradients = [[torch.ones_like(r) for r in live.sections[-1][0].results]]
        else:
            chunks = reversed(range(len(lengths) if place.streams[stage] else 1))
            gradients = (self._exchange.arrived(False, stage, micro, chunk) for chunk in chunks)
        streams_in = place.streams_in(stage)
        found = run_backward(
            place.sections[stage], live.sections, lengths, gradients, streams_in=streams_in, span=span
        )
        sent: list[Wait] = []
        chunk = len(lengths) if streams_in else 1
        for own in found:
            chunk -= 1
            if stage > 0:
                sent.append(self._exchange.hand_back(own, stage, micro, chunk))
        for wait in live.sent:
            # The gradients have arrived, so this does not wait.
            wait()
        if sent:
            self._exchange.limit_sends()
            self._exchange.keep(sent)
