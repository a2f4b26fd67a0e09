"""The passes of a rank's stages that get or return sequence chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ringspark.estimators.parallel.model.pipeline.sections import StageSection
from ringspark.estimators.parallel.model.pipeline.transfers import StagePlacement, StageTransfers
from ringspark.estimators.parallel.model.pipeline.wire import Values, Wait
from ringspark.extras.schedules.chunk_passes import (
    ChunkPass,
    Give,
    Gradients,
    LiveChunks,
    Span,
    run_backward,
    run_forward,
)
from ringspark.models.chain import State
from ringspark.models.reports import num_losses

ADDS_IN_CHUNKS = (
    "parallelism's 'time_chunks' does not support layers that add to the loss in a stage that works on "
    "sequence chunks; leave 'time_chunks' out"
)


class ChunkedStages:
    def __init__(self, place: StagePlacement, exchange: StageTransfers) -> None:
        self._place, self._exchange = place, exchange

    def run_forward(
        self,
        module: nn.Module,
        stage: int,
        micro: int,
        arguments: Sequence[torch.Tensor | None],
        give: Give,
        span: Span,
    ) -> list[list[ChunkPass]]:
        """Runs a stage, the first one on `arguments`; returns the chunks by section."""
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
                raise ValueError(ADDS_IN_CHUNKS)
            return found

        sections = self._place.sections[stage]
        return run_forward(sections, lengths, arriving, call, give, streams_in=streams_in, span=span)

    def run_backward(self, stage: int, micro: int, live: LiveChunks, span: Span) -> None:
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
