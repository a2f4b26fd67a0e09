"""Transfers between a rank's stages and other stages: values and gradients, whole or as sequence chunks.

Invariant: two ranks send and receive in the same order, which `with_arrivals` defines; the chunks of one
micro-batch are consecutive, forward in the order of the sequence and backward in reverse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringspark.extras.model_parallel.pipeline.actions import Arrival
from ringspark.extras.model_parallel.pipeline.sections import StageSection, chunk_lengths
from ringspark.extras.model_parallel.pipeline.wire import Values, Wait, Wire, detach_values

# Largest number of micro-batches whose sends may be in flight while the next are computed.
SENDS_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True)
class StagePlacement:
    """The stages of a pipeline, as one rank needs them; the sequences have one item per stage.

    Attributes:
        owners: The rank of each stage.
        firsts: Names of the first layer of each stage.
        streams: Whether the stage sends its values in sequence chunks.
        sections: Sections of each stage.
    """

    rank: int
    owners: Sequence[int]
    firsts: Sequence[str]
    streams: Sequence[bool]
    sections: Sequence[Sequence[StageSection]]
    time_chunks: int = 1

    @property
    def last(self) -> int:
        return len(self.owners) - 1

    def is_own(self, stage: int) -> bool:
        return self.owners[stage] == self.rank

    def streams_in(self, stage: int) -> bool:
        return stage > 0 and self.streams[stage - 1]

    def is_chunked(self, stage: int) -> bool:
        return self.streams_in(stage) or self.streams[stage]


class StageTransfers:
    def __init__(self, place: StagePlacement, wire: Wire) -> None:
        self._place = place
        self._wire = wire
        self._arriving: dict[tuple[bool, int, int, int], Callable[[], Any]] = {}
        self._sending: deque[Sequence[Wait]] = deque()
        self._keys: dict[int, Hashable] = {}
        self._lengths: dict[int, list[int]] = {}

    def begin(self, micro: int, module: nn.Module, arguments: Sequence[torch.Tensor]) -> None:
        """Registers a micro-batch's arguments, which have equal shapes on all ranks of the pipeline."""
        forms = tuple((value.dtype, tuple(value.shape)) for value in arguments)
        self._keys[micro] = forms, module.training, torch.is_grad_enabled()
        if any(self._place.streams):
            self._lengths[micro] = chunk_lengths(arguments, self._place.time_chunks)

    def lengths(self, micro: int) -> list[int]:
        """Returns the time steps of each sequence chunk, if stages exchange chunks."""
        return self._lengths.get(micro, [])

    def expect(self, arrival: Arrival) -> None:
        is_forward, stage, micro, source = arrival
        boundary = stage if is_forward else stage + 1
        chunks = list(enumerate(self._keys_of(boundary, micro)))
        for chunk, key in chunks if is_forward else reversed(chunks):
            place = (is_forward, stage, micro, chunk)
            if is_forward:
                self._arriving[place] = self._wire.start_receive(key, source)
            else:
                self._arriving[place] = self._wire.start_receive_gradients(key, source)

    def arrived(self, is_forward: bool, stage: int, micro: int, chunk: int = 0) -> Any:
        return self._arriving.pop((is_forward, stage, micro, chunk))()

    def hand_on(self, outputs: Values, stage: int, micro: int, chunk: int = 0) -> Wait:
        following = stage + 1
        if not self._place.is_own(following):
            key = self._keys_of(following, micro)[chunk]
            return self._wire.send(outputs, key, self._place.owners[following])
        # The next stage has its own graph, as if it had received the values.
        values = detach_values(outputs)
        self._arriving[True, following, micro, chunk] = lambda: values
        return lambda: None

    def hand_back(self, gradients: list[torch.Tensor], stage: int, micro: int, chunk: int = 0) -> Wait:
        before = stage - 1
        if self._place.is_own(before):
            self._arriving[False, before, micro, chunk] = lambda: gradients
            return lambda: None
        return self._wire.send_gradients(gradients, self._place.owners[before])

    def keep(self, waits: Sequence[Wait]) -> None:
        if waits:
            self._sending.append(waits)

    def limit_sends(self, most: int = SENDS_IN_FLIGHT) -> None:
        """Waits until at most `most` of the kept sends are in flight."""
        while len(self._sending) > most:
            for wait in self._sending.popleft():
                wait()

    def drop(self) -> None:
        """Drops everything in flight, because references to it would keep connections open."""
        self._arriving.clear()
        self._sending.clear()

    def forget(self, micros: Sequence[int]) -> None:
        for micro in micros:
            self._keys.pop(micro, None)
            self._lengths.pop(micro, None)

    def _keys_of(self, stage: int, micro: int) -> list[Hashable]:
        if not self._place.streams_in(stage):
            return [(stage, self._keys[micro])]
        # Chunks of equal length have equal shapes, so only the first one is described.
        return [(stage, self._keys[micro], length) for length in self._lengths[micro]]
