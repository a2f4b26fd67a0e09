"""Works through a rank's actions: runs its stages forward and backward, and exchanges values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ringspark.estimators.parallel.model.pipeline.actions import Action, Arrival, Kind, Steps
from ringspark.estimators.parallel.model.pipeline.exchange import Exchange, Place
from ringspark.estimators.parallel.model.pipeline.in_time import Give, LiveInTime
from ringspark.estimators.parallel.model.pipeline.split_backward import WeightPass, input_pass
from ringspark.estimators.parallel.model.pipeline.stages_in_time import ADDS_IN_CHUNKS, StagesInTime
from ringspark.estimators.parallel.model.pipeline.timeline import Recorder
from ringspark.estimators.parallel.model.pipeline.wire import Values, Wait, Wire
from ringspark.models.chain import as_values

Loss = Callable[[Any, int], torch.Tensor]
Context = Callable[[], AbstractContextManager[object]]
# Gets the number of a micro-batch, just after a stage has run; returns the scalar that it adds to the loss.
Added = Callable[[int], torch.Tensor | None]


@dataclass
class _Live:
    """What a stage keeps of a micro-batch between its forward and its backward pass.

    Attributes:
        inputs: The stage's arguments, leaves of its graph.
        results: Its outputs, or the loss; behind the outputs what the stage adds to the loss.
        sent: Waits until the outputs are sent.
        gradients: Gradients of the results; `WEIGHT` needs them if `INPUT` could not split the pass.
        weights: Passes that `INPUT` leaves to `WEIGHT`; None if `INPUT` could not split the pass.
    """

    inputs: Values
    results: list[torch.Tensor]
    sent: Wait | None = None
    gradients: Sequence[torch.Tensor] = ()
    weights: list[WeightPass] | None = None


class Executor:
    """Runs the stages of one rank.

    Attributes:
        around: Makes the context of every forward pass, such as autocast.
        weights: (micro-batch) -> the context of its forward and backward pass that puts its weights in place.
        most_live: Most micro-batches whose activations the rank held at a time, summed over its stages.
    """

    def __init__(self, place: Place, wire: Wire) -> None:
        self.around: Context = nullcontext
        self.weights: Callable[[int], AbstractContextManager[object]] = lambda micro: nullcontext()
        self.recorder = Recorder()
        self.most_live = 0
        self._place = place
        self._exchange = Exchange(place, wire)
        self._in_time = StagesInTime(place, self._exchange)
        self._live: dict[tuple[int, int], _Live | LiveInTime] = {}

    def train(
        self,
        module: nn.Module,
        steps: Steps,
        inputs: Sequence[Sequence[torch.Tensor]],
        loss: Loss,
        added: Added,
        first_micro: int = 0,
    ) -> None:
        """Works through the steps; gradients add up in the parameters, or in the weights in place.

        Args:
            inputs: The network's arguments for each new micro-batch, alike on all ranks of the pipeline.
            added: Called after each forward pass of a stage that is not the last.
            first_micro: Number of the first new micro-batch.
        """
        for micro, arguments in enumerate(inputs, first_micro):
            self._exchange.begin(micro, module, arguments)
        for step in steps:
            if isinstance(step, Arrival):
                self._exchange.expect(step)
                continue
            if step.kind is Kind.FORWARD:
                self._keep_forward(module, step, inputs, loss, added, first_micro)
                self.most_live = max(self.most_live, len(self._live))
            else:
                self._backward(step)
        self.finish()

    def evaluate(self, module: nn.Module, stages: Sequence[int], inputs: Sequence[torch.Tensor]) -> Any:
        """Runs the stages on one micro-batch without gradients; returns outputs where the last stage is."""
        micro = -1
        self._exchange.begin(micro, module, inputs)
        result: Any = None
        for stage in stages:
            if stage > 0 and not self._place.is_own(stage - 1):
                self._exchange.expect(Arrival(True, stage, micro, self._place.owners[stage - 1]))
            sent: list[Wait] = []
            returned: list[Any] = []
            give = self._giver(stage, micro, sent, returned)
            if self._place.sections[stage]:
                with self.weights(micro), self.around():
                    self._in_time.forward(module, stage, micro, inputs, give, nullcontext)
            else:
                values = tuple(inputs) if stage == 0 else self._exchange.arrived(True, stage, micro)
                give(self._forward(module, stage, micro, values), 0)
            result = returned[0] if returned else None
            if sent:
                self._exchange.keep(sent)
        # The others may still be busy with what was sent; the next micro-batch need not wait for them.
        self._exchange.limit_sends()
        return result

    def finish(self) -> None:
        """Waits until everything that this rank sends has left."""
        self._exchange.finish()

    def drop(self) -> None:
        """Drops everything under way, because references to it would keep connections open."""
        self._live.clear()
        self._exchange.drop()

    def forget(self, micros: Sequence[int]) -> None:
        """Forgets finished micro-batches."""
        self._exchange.forget(micros)

    def _forward(self, module: nn.Module, stage: int, micro: int, values: Values) -> Any:
        with self.weights(micro), self.around():
            return module(*values, stage=stage)

    def _keep_forward(
        self,
        module: nn.Module,
        action: Action,
        inputs: Sequence[Sequence[torch.Tensor]],
        loss: Loss,
        added: Added,
        first_micro: int,
    ) -> None:
        """Runs a forward pass, and keeps what its backward pass needs: not the network's outputs, then."""
        _, stage, micro = action
        index = micro - first_micro
        arguments = tuple(inputs[index]) if stage == 0 else ()
        if self._place.sections[stage]:
            self._keep_in_time(module, action, arguments, lambda y: loss(y, index), partial(added, index))
            return
        values = arguments if stage == 0 else self._exchange.arrived(True, stage, micro)
        with self.recorder.span(action):
            result = self._forward(module, stage, micro, values)
            if stage == self._place.last:
                scalar = loss(result, index)
                self._live[stage, micro] = _Live(values, [scalar] if scalar.requires_grad else [])
            else:
                own = added(index)
        if stage != self._place.last:
            outputs = as_values(result, self._place.firsts[stage + 1])
            live = self._live[stage, micro] = _Live(values, _wanted((*outputs, own)))
            live.sent = self._exchange.hand_on(outputs, stage, micro)

    def _keep_in_time(
        self,
        module: nn.Module,
        action: Action,
        arguments: Values,
        loss: Callable[[Any], torch.Tensor],
        added: Callable[[], torch.Tensor | None],
    ) -> None:
        """Runs a forward pass chunk by chunk."""
        _, stage, micro = action
        live = self._live[stage, micro] = LiveInTime([])
        returned: list[Any] = []
        give = self._giver(stage, micro, live.sent, returned)
        span = partial(self.recorder.span, action)
        # One context for all chunks: it collects what the layers report of the micro-batch.
        with self.weights(micro), self.around():
            live.sections = self._in_time.forward(module, stage, micro, arguments, give, span)
        if stage == self._place.last:
            # As for whole rows, outside of what is around forward passes: in fp32.
            with self.recorder.span(action):
                live.sections[-1][0].results = _wanted((loss(returned.pop()),))
        elif added() is not None:
            raise ValueError(ADDS_IN_CHUNKS)

    def _giver(self, stage: int, micro: int, sent: list[Wait], returned: list[Any]) -> Give:
        """Returns what takes the results of a stage, whole or chunk by chunk: it hands on or returns them."""

        def give(result: Any, chunk: int) -> list[torch.Tensor]:
            if stage == self._place.last:
                returned.append(result)
                return []
            outputs = as_values(result, self._place.firsts[stage + 1])
            sent.append(self._exchange.hand_on(outputs, stage, micro, chunk))
            return _wanted(outputs)

        return give

    def _backward(self, action: Action) -> None:
        kind, stage, micro = action
        live = self._live[stage, micro]
        if isinstance(live, LiveInTime):
            with self.weights(micro):
                self._in_time.backward(stage, micro, live, partial(self.recorder.span, action))
            del self._live[stage, micro]
            return
        if kind is not Kind.WEIGHT:
            arrived: list[torch.Tensor] = []
            if stage != self._place.last:
                arrived = self._exchange.arrived(False, stage, micro)
            # The stage's loss, or its addition to the loss, comes after its outputs; its gradient is 1.
            live.gradients = [*arrived, *map(torch.ones_like, live.results[len(arrived) :])]
            if live.sent is not None:
                # Nobody sends gradients of what has not arrived, so this does not wait.
                live.sent()
        with self.recorder.span(action), self.weights(micro):
            inputs = _wanted(live.inputs)
            if kind is Kind.INPUT:
                # Without inputs that want gradients there is nothing to split: all is done with the weights.
                if live.results and inputs:
                    live.weights = input_pass(live.results, live.gradients, inputs)
                    live.results, live.gradients = [], ()
            elif live.weights is not None:
                for weights in live.weights:
                    weights.run()
            elif live.results:
                torch.autograd.backward(live.results, live.gradients)
        if kind is not Kind.WEIGHT and stage > 0:
            self._exchange.limit_sends()
            self._exchange.keep([self._exchange.hand_back(_taken(live.inputs), stage, micro)])
        if kind is not Kind.INPUT:
            del self._live[stage, micro]


def _wanted(values: Values) -> list[torch.Tensor]:
    """Returns the values that require gradients."""
    return [value for value in values if value is not None and value.requires_grad]


def _taken(inputs: Values) -> list[torch.Tensor]:
    """Returns the gradients of a stage's inputs, and leaves none there."""
    gradients = []
    for value in _wanted(inputs):
        gradients.append(torch.zeros_like(value) if value.grad is None else value.grad)
        value.grad = None
    return gradients
