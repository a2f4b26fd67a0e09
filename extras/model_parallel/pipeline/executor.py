"""Runs a rank's actions: its stages forward and backward, and their transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ringspark.extras.model_parallel.pipeline.actions import Action, Arrival, PassType, Steps
from ringspark.extras.model_parallel.pipeline.chunk_passes import (
    ChunkPass,
    Gradients,
    run_backward,
    run_forward,
    select_differentiable,
)
from ringspark.extras.model_parallel.pipeline.sections import StageSection
from ringspark.extras.model_parallel.pipeline.split_backward import run_input_pass, run_weight_passes
from ringspark.extras.model_parallel.pipeline.transfers import StagePlacement, StageTransfers
from ringspark.extras.model_parallel.pipeline.wire import Values, Wait, Wire
from ringspark.models.chain import State, as_values
from ringspark.models.reports import num_losses

Loss = Callable[[Any, int], torch.Tensor]
Context = Callable[[], AbstractContextManager[object]]
# Called with the number of a micro-batch after a stage has run; returns the scalar that it adds to the loss.
Added = Callable[[int], torch.Tensor | None]

_ADDS_IN_CHUNKS = (
    "Pipeline's sequence_chunks does not support layers that add to the loss in a stage that works on "
    "sequence chunks; leave sequence_chunks out"
)


@dataclass
class _Live:
    """A micro-batch of a stage between its forward and its backward pass.

    Attributes:
        sections: Tensors of the chunks of each `StageSection`. The results of the last section end with the
            scalar that the stage adds to the loss; in the last stage, the loss is the only result.
        sent: Functions that wait until the outputs are sent.
        rest: Runs the half of the backward pass that `PassType.INPUT` leaves to `PassType.WEIGHT`.
    """

    sections: list[list[ChunkPass]] = field(default_factory=list)
    sent: list[Wait] = field(default_factory=list)
    rest: Callable[[], None] | None = None


class Executor:
    """Runs the stages of one rank.

    Attributes:
        around: Makes the context of every forward pass, such as autocast.
        weights: (number of a micro-batch) -> context that selects the micro-batch's version of the weights.
    """

    def __init__(self, place: StagePlacement, wire: Wire) -> None:
        self.around: Context = nullcontext
        self.weights: Callable[[int], AbstractContextManager[object]] = lambda micro: nullcontext()
        self._place = place
        self._exchange = StageTransfers(place, wire)
        self._live: dict[tuple[int, int], _Live] = {}

    def train(
        self,
        module: nn.Module,
        steps: Steps,
        inputs: Sequence[Sequence[torch.Tensor]],
        loss: Loss,
        added: Added,
        first_micro: int = 0,
    ) -> None:
        """Runs the steps. Gradients accumulate in the parameters or in the version that `weights` selects."""
        for micro, arguments in enumerate(inputs, first_micro):
            self._exchange.begin(micro, module, arguments)
        for step in steps:
            if isinstance(step, Arrival):
                self._exchange.expect(step)
            elif step.kind is PassType.FORWARD:
                index = step.micro - first_micro
                self._keep_forward(module, step, inputs[index], loss, added, index)
            else:
                self._backward(step)
        self._exchange.limit_sends(0)

    def evaluate(self, module: nn.Module, stages: Sequence[int], inputs: Sequence[torch.Tensor]) -> Any:
        micro = -1
        self._exchange.begin(micro, module, inputs)
        result: Any = None
        for stage in stages:
            if stage > 0 and not self._place.is_own(stage - 1):
                self._exchange.expect(Arrival(True, stage, micro, self._place.owners[stage - 1]))
            result, live = self._forward(module, stage, micro, inputs)
            self._exchange.keep(live.sent)
        self._exchange.limit_sends(0)
        return result

    def drop(self) -> None:
        """Drops everything in flight, because references to it would keep connections open."""
        self._live.clear()
        self._exchange.drop()

    def forget(self, micros: Sequence[int]) -> None:
        self._exchange.forget(micros)

    def _keep_forward(
        self,
        module: nn.Module,
        action: Action,
        inputs: Sequence[torch.Tensor],
        loss: Loss,
        added: Added,
        index: int,
    ) -> None:
        _, stage, micro = action
        outputs, live = self._forward(module, stage, micro, inputs)
        # Outside autocast: the loss is computed in fp32.
        own = loss(outputs, index) if stage == self._place.last else added(index)
        if own is not None:
            if stage != self._place.last and self._place.is_chunked(stage):
                raise ValueError(_ADDS_IN_CHUNKS)
            live.sections[-1][0].results += select_differentiable((own,))
        self._live[stage, micro] = live

    def _forward(
        self, module: nn.Module, stage: int, micro: int, inputs: Sequence[torch.Tensor]
    ) -> tuple[Any, _Live]:
        """Runs a stage, and starts to send its outputs; returns the network's outputs in the last stage.

        Stage 0 takes `inputs`; a later stage takes the values that the previous stage sends.
        """
        place, live = self._place, _Live()
        outputs: Any = None

        def give(result: Any, chunk: int) -> list[torch.Tensor]:
            nonlocal outputs
            if stage == place.last:
                outputs = result
                return []
            values = as_values(result, place.firsts[stage + 1])
            live.sent.append(self._exchange.hand_on(values, stage, micro, chunk))
            return select_differentiable(values)

        def call(
            values: Values, section: StageSection, states: Sequence[State]
        ) -> tuple[Any, Sequence[State]]:
            known = num_losses()
            part = (section.first, section.end, states if section.is_chunked else None)
            found: tuple[Any, Sequence[State]] = module(*values, stage=stage, part=part)
            if section.is_chunked and num_losses() > known:
                raise ValueError(_ADDS_IN_CHUNKS)
            return found

        streams_in, lengths = place.streams_in(stage), self._exchange.lengths(micro)
        arriving: Iterator[Values] = (
            self._exchange.arrived(True, stage, micro, chunk)
            for chunk in range(len(lengths) if streams_in else 1)
        )
        if stage == 0:
            arriving = iter([tuple(inputs)])
        # One context for all chunks, because it collects the layers' reports of the micro-batch.
        with self.weights(micro), self.around():
            live.sections = run_forward(
                place.sections[stage], lengths, arriving, call, give, streams_in=streams_in
            )
        return outputs, live

    def _backward(self, action: Action) -> None:
        kind, stage, micro = action
        live = self._live[stage, micro]
        with self.weights(micro):
            if kind is not PassType.WEIGHT:
                self._run_backward(stage, micro, live, splits=kind is PassType.INPUT)
            elif live.rest is not None:
                live.rest()
        if kind is not PassType.INPUT:
            del self._live[stage, micro]

    def _run_backward(self, stage: int, micro: int, live: _Live, *, splits: bool) -> None:
        def differentiate(
            results: list[torch.Tensor], gradients: list[torch.Tensor], inputs: list[torch.Tensor]
        ) -> None:
            if not splits:
                torch.autograd.backward(results, gradients)
            elif inputs:
                assert live.rest is None  # no schedule splits the backward pass of chunks
                live.rest = partial(run_weight_passes, run_input_pass(results, gradients, inputs))
            else:
                live.rest = partial(torch.autograd.backward, results, gradients)

        place, lengths = self._place, self._exchange.lengths(micro)
        chunks = reversed(range(len(lengths) if place.streams[stage] else 1))
        gradients: Gradients = [[]]
        if stage < place.last:
            gradients = (self._exchange.arrived(False, stage, micro, chunk) for chunk in chunks)
        streams_in = place.streams_in(stage)
        found = run_backward(
            place.sections[stage],
            live.sections,
            lengths,
            gradients,
            streams_in=streams_in,
            differentiate=differentiate,
        )
        sent: list[Wait] = []
        chunk = len(lengths) if streams_in else 1
        for own in found:
            chunk -= 1
            if stage > 0:
                self._exchange.limit_sends()
                sent.append(self._exchange.hand_back(own, stage, micro, chunk))
        for wait in live.sent:
            # The gradients have arrived, so this does not wait.
            wait()
        self._exchange.keep(sent)
