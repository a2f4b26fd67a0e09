"""Runs stages that pass values in sequence chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ringspark.estimators.parallel.model.pipeline.actions import Action
from ringspark.estimators.parallel.model.pipeline.executor import Executor, select_differentiable
from ringspark.estimators.parallel.model.pipeline.transfers import StagePlacement
from ringspark.estimators.parallel.model.pipeline.wire import Values, Wait, Wire
from ringspark.extras.schedules.chunk_passes import Give, LiveChunks
from ringspark.extras.schedules.chunked_stages import ADDS_IN_CHUNKS, ChunkedStages
from ringspark.models.chain import as_values


class ChunkedExecutor(Executor):
    def __init__(self, place: StagePlacement, wire: Wire) -> None:
        super().__init__(place, wire)
        self._chunked = ChunkedStages(place, self._exchange)

    def _evaluate(
        self, module: nn.Module, stage: int, micro: int, inputs: Sequence[torch.Tensor]
    ) -> tuple[Any, list[Wait]]:
        if not self._place.sections[stage]:
            return super()._evaluate(module, stage, micro, inputs)
        sent: list[Wait] = []
        returned: list[Any] = []
        give = self._giver(stage, micro, sent, returned)
        with self.weights(micro), self.around():
            self._chunked.run_forward(module, stage, micro, inputs, give, nullcontext)
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
        span = partial(self.recorder.span, action)
        # One context for all chunks, because it collects the layers' reports of the micro-batch.
        with self.weights(micro), self.around():
            live.sections = self._chunked.run_forward(module, stage, micro, arguments, give, span)
        if stage == self._place.last:
            # Outside autocast, as for whole rows: the loss is computed in fp32.
            with self.recorder.span(action):
                live.sections[-1][0].results = select_differentiable((loss(returned.pop()),))
        elif added() is not None:
            raise ValueError(ADDS_IN_CHUNKS)

    def _backward(self, action: Action) -> None:
        _, stage, micro = action
        if not self._place.sections[stage]:
            super()._backward(action)
            return
        with self.weights(micro):
            self._chunked.run_backward(
                stage, micro, self._live[stage, micro], partial(self.recorder.span, action)
            )
        del self._live[stage, micro]

    def _giver(self, stage: int, micro: int, sent: list[Wait], returned: list[Any]) -> Give:
        """Returns a function that sends a stage's results, or keeps the network's outputs."""

        def give(result: Any, chunk: int) -> list[torch.Tensor]:
            if stage == self._place.last:
                returned.append(result)
                return []
            outputs = as_values(result, self._place.firsts[stage + 1])
            sent.append(self._exchange.hand_on(outputs, stage, micro, chunk))
            return select_differentiable(outputs)

        return give
