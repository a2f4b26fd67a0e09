"""Runs stages that pass values to each other in chunks of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ringspark.estimators.parallel.model.pipeline.actions import Action
from ringspark.estimators.parallel.model.pipeline.exchange import Place
from ringspark.estimators.parallel.model.pipeline.executor import Executor, wanted
from ringspark.estimators.parallel.model.pipeline.wire import Values, Wait, Wire
from ringspark.extras.schedules.in_time import Give, LiveInTime
from ringspark.extras.schedules.stages_in_time import ADDS_IN_CHUNKS, StagesInTime
from ringspark.models.chain import as_values


class ChunkedExecutor(Executor):
    """Runs the stages of one rank; a stage with sections runs chunk by chunk."""

    def __init__(self, place: Place, wire: Wire) -> None:
        super().__init__(place, wire)
        self._in_time = StagesInTime(place, self._exchange)

    def _evaluate(
        self, module: nn.Module, stage: int, micro: int, inputs: Sequence[torch.Tensor]
    ) -> tuple[Any, list[Wait]]:
        if not self._place.sections[stage]:
            return super()._evaluate(module, stage, micro, inputs)
        sent: list[Wait] = []
        returned: list[Any] = []
        give = self._giver(stage, micro, sent, returned)
        with self.weights(micro), self.around():
            self._in_time.forward(module, stage, micro, inputs, give, nullcontext)
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
        live = self._live[stage, micro] = LiveInTime([])
        returned: list[Any] = []
        give = self._giver(stage, micro, live.sent, returned)
        span = partial(self.recorder.span, action)
        # One context for all chunks, because it collects the reports of the layers for the micro-batch.
        with self.weights(micro), self.around():
            live.sections = self._in_time.forward(module, stage, micro, arguments, give, span)
        if stage == self._place.last:
            # Outside of autocast, as for whole rows: the loss is computed in fp32.
            with self.recorder.span(action):
                live.sections[-1][0].results = wanted((loss(returned.pop()),))
        elif added() is not None:
            raise ValueError(ADDS_IN_CHUNKS)

    def _backward(self, action: Action) -> None:
        _, stage, micro = action
        if not self._place.sections[stage]:
            super()._backward(action)
            return
        with self.weights(micro):
            self._in_time.backward(
                stage, micro, self._live[stage, micro], partial(self.recorder.span, action)
            )
        del self._live[stage, micro]

    def _giver(self, stage: int, micro: int, sent: list[Wait], returned: list[Any]) -> Give:
        """Returns a function that sends the results of a stage to the next one, or keeps the outputs."""

        def give(result: Any, chunk: int) -> list[torch.Tensor]:
            if stage == self._place.last:
                returned.append(result)
                return []
            outputs = as_values(result, self._place.firsts[stage + 1])
            sent.append(self._exchange.hand_on(outputs, stage, micro, chunk))
            return wanted(outputs)

        return give
