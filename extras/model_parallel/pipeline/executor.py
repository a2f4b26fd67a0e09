"""Runs a rank's actions: its stages forward and backward, and their transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ringspark.extras.model_parallel.pipeline.actions import Action, Arrival, PassType, Steps
from ringspark.extras.model_parallel.pipeline.split_backward import (
    WeightPass,
    run_input_pass,
    run_weight_passes,
)
from ringspark.extras.model_parallel.pipeline.transfers import StagePlacement, StageTransfers
from ringspark.extras.model_parallel.pipeline.wire import Values, Wait, Wire
from ringspark.models.chain import as_values

Loss = Callable[[Any, int], torch.Tensor]
Context = Callable[[], AbstractContextManager[object]]
# Called with the number of a micro-batch after a stage has run; returns the scalar that it adds to the loss.
Added = Callable[[int], torch.Tensor | None]


@dataclass
class _Live:
    """A micro-batch of a stage between its forward and its backward pass.

    `INPUT` and `WEIGHT` are the two halves of a split backward pass, see `PassType`.

    Attributes:
        results: The stage's outputs, then the scalar that the stage adds to the loss. Last stage: the loss.
        sent: Waits until the outputs are sent.
        gradients: Gradients of the results, for `WEIGHT` if `INPUT` could not split the backward pass.
        weights: Backward passes that `INPUT` leaves to `WEIGHT`; None if `INPUT` could not split the pass.
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
        weights: (number of a micro-batch) -> context that selects the micro-batch's version of the weights.
        span: (action) -> context around its computation.
        most_live: Largest number of micro-batches with activations so far.
    """

    def __init__(self, place: StagePlacement, wire: Wire) -> None:
        self.around: Context = nullcontext
        self.weights: Callable[[int], AbstractContextManager[object]] = lambda micro: nullcontext()
        self.span: Callable[[Action], AbstractContextManager[object]] = lambda action: nullcontext()
        self.most_live = 0
        self._place = place
        self._exchange = StageTransfers(place, wire)
        self._live: dict[tuple[int, int], Any] = {}

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
                continue
            if step.kind is PassType.FORWARD:
                index = step.micro - first_micro
                arguments = tuple(inputs[index]) if step.stage == 0 else ()
                self._keep_forward(module, step, arguments, _bind_index(loss, index), partial(added, index))
                self.most_live = max(self.most_live, len(self._live))
            else:
                self._backward(step)
        self.finish()

    def evaluate(self, module: nn.Module, stages: Sequence[int], inputs: Sequence[torch.Tensor]) -> Any:
        micro = -1
        self._exchange.begin(micro, module, inputs)
        result: Any = None
        for stage in stages:
            if stage > 0 and not self._place.is_own(stage - 1):
                self._exchange.expect(Arrival(True, stage, micro, self._place.owners[stage - 1]))
            result, sent = self._evaluate(module, stage, micro, inputs)
            if sent:
                self._exchange.keep(sent)
        # The next micro-batch need not wait until other ranks have received these sends.
        self._exchange.limit_sends()
        return result

    def finish(self) -> None:
        self._exchange.finish()

    def drop(self) -> None:
        """Drops everything in flight, because references to it would keep connections open."""
        self._live.clear()
        self._exchange.drop()

    def forget(self, micros: Sequence[int]) -> None:
        self._exchange.forget(micros)

    def _forward(self, module: nn.Module, stage: int, micro: int, values: Values) -> Any:
        with self.weights(micro), self.around():
            return module(*values, stage=stage)

    def _evaluate(
        self, module: nn.Module, stage: int, micro: int, inputs: Sequence[torch.Tensor]
    ) -> tuple[Any, list[Wait]]:
        """Runs one stage; returns (outputs of the last stage or None, functions that wait for the sends)."""
        values = tuple(inputs) if stage == 0 else self._exchange.arrived(True, stage, micro)
        result = self._forward(module, stage, micro, values)
        if stage == self._place.last:
            return result, []
        outputs = as_values(result, self._place.firsts[stage + 1])
        return None, [self._exchange.hand_on(outputs, stage, micro)]

    def _keep_forward(
        self,
        module: nn.Module,
        action: Action,
        arguments: Values,
        loss: Callable[[Any], torch.Tensor],
        added: Callable[[], torch.Tensor | None],
    ) -> None:
        _, stage, micro = action
        values = arguments if stage == 0 else self._exchange.arrived(True, stage, micro)
        with self.span(action):
            result = self._forward(module, stage, micro, values)
            if stage == self._place.last:
                scalar = loss(result)
                self._live[stage, micro] = _Live(values, [scalar] if scalar.requires_grad else [])
            else:
                own = added()
        if stage != self._place.last:
            outputs = as_values(result, self._place.firsts[stage + 1])
            live = self._live[stage, micro] = _Live(values, select_differentiable((*outputs, own)))
            live.sent = self._exchange.hand_on(outputs, stage, micro)

    def _backward(self, action: Action) -> None:
        kind, stage, micro = action
        live: _Live = self._live[stage, micro]
        if kind is not PassType.WEIGHT:
            arrived: list[torch.Tensor] = []
            if stage != self._place.last:
                arrived = self._exchange.arrived(False, stage, micro)
            # The loss, or the scalar added to it, follows the outputs; its gradient is 1.
            live.gradients = [*arrived, *map(torch.ones_like, live.results[len(arrived) :])]
            if live.sent is not None:
                # The gradients arrived after the outputs, so this does not wait.
                live.sent()
        with self.span(action), self.weights(micro):
            inputs = select_differentiable(live.inputs)
            if kind is PassType.INPUT:
                # Without inputs that require gradients, `WEIGHT` runs the whole pass.
                if live.results and inputs:
                    live.weights = run_input_pass(live.results, live.gradients, inputs)
                    live.results, live.gradients = [], ()
            elif live.weights is not None:
                run_weight_passes(live.weights)
            elif live.results:
                torch.autograd.backward(live.results, live.gradients)
        if kind is not PassType.WEIGHT and stage > 0:
            self._exchange.limit_sends()
            self._exchange.keep([self._exchange.hand_back(_take_gradients(live.inputs), stage, micro)])
        if kind is not PassType.INPUT:
            del self._live[stage, micro]


def _bind_index(loss: Loss, index: int) -> Callable[[Any], torch.Tensor]:
    return lambda outputs: loss(outputs, index)


def select_differentiable(values: Values) -> list[torch.Tensor]:
    return [value for value in values if value is not None and value.requires_grad]


def _take_gradients(inputs: Values) -> list[torch.Tensor]:
    gradients = []
    for value in select_differentiable(inputs):
        gradients.append(torch.zeros_like(value) if value.grad is None else value.grad)
        value.grad = None
    return gradients
