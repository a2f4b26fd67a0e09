"""The stages of a rank whose rows come or go in chunks of time: their passes, and what they exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ringspark.estimators.parallel.model.pipeline.exchange import Exchange, Place
from ringspark.estimators.parallel.model.pipeline.sections import Section
from ringspark.estimators.parallel.model.pipeline.wire import Values, Wait
from ringspark.extras.schedules.in_time import (
    Give,
    Gradients,
    LiveInTime,
    Piece,
    Span,
    backward,
    forward,
)
from ringspark.models.chain import State
from ringspark.models.reports import num_losses

ADDS_IN_CHUNKS = (
    "layers of a stage that works in chunks of time add to the loss, which parallelism's 'time_chunks' does "
    "not cut; leave 'time_chunks' out"
)


class StagesInTime:
    """Runs them within the contexts that are around a pass."""

    def __init__(self, place: Place, exchange: Exchange) -> None:
        self._place, self._exchange = place, exchange

    def forward(
        self,
        module: nn.Module,
        stage: int,
        micro: int,
        arguments: Sequence[torch.Tensor | None],
        give: Give,
        span: Span,
    ) -> list[list[Piece]]:
        """Runs a stage on a micro-batch; returns what its backward pass needs.

        Args:
            arguments: The network's, where the stage is the first.
            give: Like that of `in_time.forward`.
            span: Like that of `in_time.forward`.

        Raises:
            ValueError: A layer that works in chunks adds to the loss.
        """
        streams_in, lengths = self._place.streams_in(stage), self._exchange.lengths(micro)
        if stage == 0:
            arriving: Iterator[Values] = iter([tuple(arguments)])
        else:
            chunks = range(len(lengths) if streams_in else 1)
            arriving = (self._exchange.arrived(True, stage, micro, chunk) for chunk in chunks)

        def call(values: Values, section: Section, states: Sequence[State]) -> tuple[Any, Sequence[State]]:
            known = num_losses()
            found: tuple[Any, Sequence[State]] = module(
                *values,
                stage=stage,
                part=(section.first, section.end, states if section.is_chunked else None),
            )
            if section.is_chunked and num_losses() > known:
                raise ValueError(ADDS_IN_CHUNKS)
            return found

        sections = self._place.sections[stage]
        return forward(sections, lengths, arriving, call, give, streams_in=streams_in, span=span)

    def backward(self, stage: int, micro: int, live: LiveInTime, span: Span) -> None:
        """Runs a stage back, and hands on the gradients of its inputs chunk by chunk."""
        place, lengths = self._place, self._exchange.lengths(micro)
        if stage == place.last:
            gradients: Gradients = [[torch.ones_like(r) for r in live.sections[-1][0].results]]
        else:
            chunks = reversed(range(len(lengths) if place.streams[stage] else 1))
            gradients = (self._exchange.arrived(False, stage, micro, chunk) for chunk in chunks)
        streams_in = place.streams_in(stage)
        found = backward(
            place.sections[stage], live.sections, lengths, gradients, streams_in=streams_in, span=span
        )
        sent: list[Wait] = []
        chunk = len(lengths) if streams_in else 1
        for own in found:
            chunk -= 1
            if stage > 0:
                sent.append(self._exchange.hand_back(own, stage, micro, chunk))
        for wait in live.sent:
            # Their gradients are here, so this does not wait.
            wait()
        if sent:
            self._exchange.limit_sends()
            self._exchange.keep(sent)
