"""Works through a rank's actions: runs its stages forward and backward, and exchanges values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringspark.estimators.parallel.model.pipeline.actions import Action, Arrival, Kind, Steps
from ringspark.estimators.parallel.model.pipeline.timeline import Recorder
from ringspark.estimators.parallel.model.pipeline.wire import Forms, Values, Wait, Wire, forms_of, marked
from ringspark.models.chain import Link, as_values

Loss = Callable[[Any, int], torch.Tensor]
Context = Callable[[], AbstractContextManager[object]]
# Gets the number of a micro-batch, just after a stage has run; returns the scalar that it adds to the loss.
Added = Callable[[int], torch.Tensor | None]

# Gradients that may be on their way while the next are computed.
SENDS_UNDER_WAY = 2


@dataclass
class _Live:
    """What a stage keeps of a micro-batch between its forward and its backward pass.

    Attributes:
        inputs: The stage's arguments, leaves of its graph.
        results: Its outputs, or the loss; behind the outputs what the stage adds to the loss.
        sent: Waits until the outputs are sent.
        gradients: Gradients of the results, from `INPUT` to `WEIGHT`.
        groups: torch's record of where the gradients of weights begin, from `INPUT` to `WEIGHT`.
        adds: Whether the stage adds to the loss.
    """

    inputs: Values
    results: list[torch.Tensor]
    adds: bool = False
    sent: Wait | None = None
    gradients: list[torch.Tensor] | None = None
    groups: list[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place in the pipeline.

    Attributes:
        rank: Its number.
        owners: The rank of each stage.
        firsts: The first link of each stage.
    """

    rank: int
    owners: Sequence[int]
    firsts: Sequence[Link]

    @property
    def last(self) -> int:
        return len(self.owners) - 1

    def is_own(self, stage: int) -> bool:
        return self.owners[stage] == self.rank


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
        self._wire = wire
        self._live: dict[tuple[int, int], _Live] = {}
        self._arriving: dict[tuple[bool, int, int], Callable[[], Any]] = {}
        self._sending: deque[Wait] = deque()
        self._keys: dict[int, Hashable] = {}

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
            self._keys[micro] = _key(module, arguments)
        for step in steps:
            if isinstance(step, Arrival):
                self._expect(step)
                continue
            if step.kind is Kind.FORWARD:
                self._keep_forward(module, step, inputs, loss, added, first_micro)
                self.most_live = max(self.most_live, len(self._live))
            else:
                self._backward(module, step)
        self.finish()

    def evaluate(self, module: nn.Module, stages: Sequence[int], inputs: Sequence[torch.Tensor]) -> Any:
        """Runs the stages on one micro-batch without gradients; returns outputs where the last stage is."""
        micro = -1
        self._keys[micro] = _key(module, inputs)
        result = None
        for stage in stages:
            values: Values = tuple(inputs)
            if stage > 0:
                if not self._place.is_own(stage - 1):
                    self._expect(Arrival(True, stage, micro, self._place.owners[stage - 1]))
                values = self._arrived(True, stage, micro)
            result = self._forward(module, stage, micro, values)
            if stage != self._place.last:
                outputs = as_values(result, self._place.firsts[stage + 1])
                self._sending.append(self._hand_on(outputs, stage, micro))
                result = None
        # The others may still be busy with what was sent; the next micro-batch need not wait for them.
        self._limit_sends()
        return result

    def finish(self) -> None:
        """Waits until everything that this rank sends has left."""
        while self._sending:
            self._sending.popleft()()

    def drop(self) -> None:
        """Drops everything under way, because references to it would keep connections open."""
        self._live.clear()
        self._arriving.clear()
        self._sending.clear()

    def forget(self, micros: Sequence[int]) -> None:
        """Forgets finished micro-batches."""
        for micro in micros:
            self._keys.pop(micro, None)

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
        values = tuple(inputs[index]) if stage == 0 else self._arrived(True, stage, micro)
        with self.recorder.span(action):
            result = self._forward(module, stage, micro, values)
            if stage == self._place.last:
                scalar = loss(result, index)
                self._live[stage, micro] = _Live(values, [scalar] if scalar.requires_grad else [])
            else:
                own = added(index)
        if stage != self._place.last:
            outputs = as_values(result, self._place.firsts[stage + 1])
            more = _wanted((own,))
            self._live[stage, micro] = _Live(values, [*_wanted(outputs), *more], adds=bool(more))
            self._live[stage, micro].sent = self._hand_on(outputs, stage, micro)

    def _backward(self, module: nn.Module, action: Action) -> None:
        kind, stage, micro = action
        live = self._live[stage, micro]
        if kind is not Kind.WEIGHT:
            gradients: list[torch.Tensor] | None = None
            if stage != self._place.last:
                arrived: list[torch.Tensor] = self._arrived(False, stage, micro)
                # A loss of the stage's own stands behind its outputs.
                gradients = [*arrived, *map(torch.ones_like, live.results[len(arrived) :])]
            if live.sent is not None:
                # Nobody sends gradients of what has not arrived, so this does not wait.
                live.sent()
            live.gradients = gradients
        with self.recorder.span(action), self.weights(micro):
            if kind is Kind.INPUT:
                # Without inputs that want gradients there is nothing to split: all is done with the weights.
                if live.results and _wanted(live.inputs):
                    if live.adds:
                        # What reaches a weight from such a loss past the inputs would be lost in a split.
                        torch.autograd.backward(live.results, live.gradients)
                        live.results = []
                    else:
                        live.groups = _input_gradients(module, live)
            elif live.groups is not None:
                _weight_gradients(module, live.groups)
            elif live.results:
                torch.autograd.backward(live.results, live.gradients)
        if kind is not Kind.WEIGHT and stage > 0:
            self._hand_back(live.inputs, stage, micro)
        if kind is not Kind.INPUT:
            del self._live[stage, micro]

    def _expect(self, arrival: Arrival) -> None:
        """Begins to receive."""
        is_forward, stage, micro, source = arrival
        if is_forward:
            found = self._wire.start_receive((stage, self._keys[micro]), source)
            self._arriving[True, stage, micro] = found
        else:
            forms = self._wire.forms((stage + 1, self._keys[micro]))
            self._arriving[False, stage, micro] = self._wire.start_receive_gradients(forms, source)

    def _arrived(self, is_forward: bool, stage: int, micro: int) -> Any:
        return self._arriving.pop((is_forward, stage, micro))()

    def _hand_on(self, outputs: Values, stage: int, micro: int) -> Wait:
        """Gives the outputs of a stage to the next one."""
        following = stage + 1
        if not self._place.is_own(following):
            return self._wire.send(outputs, (following, self._keys[micro]), self._place.owners[following])
        # The next stage has a graph of its own, as if it had received the values.
        forms: Forms = forms_of(outputs)
        values = marked(tuple(None if v is None else v.detach() for v in outputs), forms)
        self._arriving[True, following, micro] = lambda: values
        return _nothing

    def _hand_back(self, inputs: Values, stage: int, micro: int) -> None:
        """Gives the gradients of a stage's inputs to the stage before it."""
        gradients = []
        for value in _wanted(inputs):
            gradients.append(torch.zeros_like(value) if value.grad is None else value.grad)
            value.grad = None
        before = stage - 1
        if self._place.is_own(before):
            self._arriving[False, before, micro] = lambda: gradients
            return
        self._limit_sends()
        self._sending.append(self._wire.send_gradients(gradients, self._place.owners[before]))

    def _limit_sends(self) -> None:
        while len(self._sending) > SENDS_UNDER_WAY:
            self._sending.popleft()()


def _key(module: nn.Module, arguments: Sequence[torch.Tensor]) -> Hashable:
    """Returns what decides the forms of a micro-batch's values on all ranks of the pipeline."""
    forms = tuple((value.dtype, tuple(value.shape)) for value in arguments)
    return forms, module.training, torch.is_grad_enabled()


def _wanted(values: Values) -> list[torch.Tensor]:
    """Returns the values that require gradients."""
    return [value for value in values if value is not None and value.requires_grad]


def _input_gradients(module: nn.Module, live: _Live) -> list[dict[str, Any]]:
    """Computes the gradients of a stage's inputs alone; returns what is left to do for its weights."""
    from torch.distributed.pipelining._backward import stage_backward_input

    # torch detaches these in place to free the graph behind them: a view does not allow that, and an input
    # that is passed on as it is would no longer want its gradient.
    results = [r.clone() if r._is_view() or r.is_leaf else r for r in live.results]
    live.results = []
    _, groups = stage_backward_input(results, live.gradients, list(live.inputs), module.parameters())
    return groups


def _weight_gradients(module: nn.Module, groups: list[dict[str, Any]]) -> None:
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(module.parameters(), groups)


def _nothing() -> None:
    """Waits for nothing."""
