"""What a rank's stages get from other stages and give to them: values and gradients, whole or chunk by chunk.

Invariant: what two ranks send each other lies in one order on both sides, that of `with_arrivals`; the chunks
of one micro-batch follow each other in it, forward in the order of time and backward against it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringspark.estimators.parallel.model.pipeline.actions import Arrival
from ringspark.estimators.parallel.model.pipeline.sections import Section, lengths_of
from ringspark.estimators.parallel.model.pipeline.wire import Forms, Values, Wait, Wire, forms_of, marked
from ringspark.models.chain import Link

# Micro-batches whose gradients may be on their way while the next are computed.
SENDS_UNDER_WAY = 2


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place in the pipeline.

    Attributes:
        rank: Its number.
        owners: The rank of each stage.
        firsts: The first link of each stage.
        streams: Of each stage, whether the next one gets its values chunk by chunk of time.
        sections: Of each stage, how it works through chunks; empty for one that gets and gives whole rows.
        time_chunks: Chunks of time at most.
    """

    rank: int
    owners: Sequence[int]
    firsts: Sequence[Link]
    streams: Sequence[bool]
    sections: Sequence[Sequence[Section]]
    time_chunks: int = 1

    @property
    def last(self) -> int:
        return len(self.owners) - 1

    def is_own(self, stage: int) -> bool:
        return self.owners[stage] == self.rank

    def streams_in(self, stage: int) -> bool:
        return stage > 0 and self.streams[stage - 1]


class Exchange:
    """Begins to receive what comes, and hands on what is computed."""

    def __init__(self, place: Place, wire: Wire) -> None:
        self._place = place
        self._wire = wire
        self._arriving: dict[tuple[bool, int, int, int], Callable[[], Any]] = {}
        self._sending: deque[Sequence[Wait]] = deque()
        self._keys: dict[int, Hashable] = {}
        self._lengths: dict[int, list[int]] = {}

    def begin(self, micro: int, module: nn.Module, arguments: Sequence[torch.Tensor]) -> None:
        """Takes note of a micro-batch's arguments, which are alike on all ranks of the pipeline."""
        forms = tuple((value.dtype, tuple(value.shape)) for value in arguments)
        self._keys[micro] = forms, module.training, torch.is_grad_enabled()
        if any(self._place.streams):
            self._lengths[micro] = lengths_of(arguments, self._place.time_chunks)

    def lengths(self, micro: int) -> list[int]:
        """Returns the length of each chunk of time."""
        return self._lengths[micro]

    def expect(self, arrival: Arrival) -> None:
        """Begins to receive all chunks of what another rank computes."""
        is_forward, stage, micro, source = arrival
        boundary = stage if is_forward else stage + 1
        chunks = list(enumerate(self._keys_of(boundary, micro)))
        for chunk, key in chunks if is_forward else reversed(chunks):
            place = (is_forward, stage, micro, chunk)
            if is_forward:
                self._arriving[place] = self._wire.start_receive(key, source)
            else:
                forms = self._wire.forms(key)
                self._arriving[place] = self._wire.start_receive_gradients(forms, source)

    def arrived(self, is_forward: bool, stage: int, micro: int, chunk: int = 0) -> Any:
        """Waits for what a stage needs of another one."""
        return self._arriving.pop((is_forward, stage, micro, chunk))()

    def hand_on(self, outputs: Values, stage: int, micro: int, chunk: int = 0) -> Wait:
        """Gives the outputs of a stage to the next one."""
        following = stage + 1
        if not self._place.is_own(following):
            key = self._keys_of(following, micro)[chunk]
            return self._wire.send(outputs, key, self._place.owners[following])
        # The next stage has a graph of its own, as if it had received the values.
        forms: Forms = forms_of(outputs)
        values = marked(tuple(None if v is None else v.detach() for v in outputs), forms)
        self._arriving[True, following, micro, chunk] = lambda: values
        return _nothing

    def hand_back(self, gradients: list[torch.Tensor], stage: int, micro: int, chunk: int = 0) -> Wait:
        """Gives the gradients of a stage's inputs to the stage before it."""
        before = stage - 1
        if self._place.is_own(before):
            self._arriving[False, before, micro, chunk] = lambda: gradients
            return _nothing
        return self._wire.send_gradients(gradients, self._place.owners[before])

    def keep(self, waits: Sequence[Wait]) -> None:
        """Takes what a micro-batch has sent, to wait for it later."""
        self._sending.append(waits)

    def limit_sends(self) -> None:
        while len(self._sending) > SENDS_UNDER_WAY:
            self._wait_for_first()

    def finish(self) -> None:
        """Waits until everything that this rank sends has left."""
        while self._sending:
            self._wait_for_first()

    def drop(self) -> None:
        """Drops everything under way, because references to it would keep connections open."""
        self._arriving.clear()
        self._sending.clear()

    def forget(self, micros: Sequence[int]) -> None:
        """Forgets finished micro-batches."""
        for micro in micros:
            self._keys.pop(micro, None)
            self._lengths.pop(micro, None)

    def _keys_of(self, stage: int, micro: int) -> list[Hashable]:
        """Returns what decides the forms of each chunk of the stage's inputs; a chunk for whole rows."""
        if not self._place.streams_in(stage):
            return [(stage, self._keys[micro])]
        # Chunks of one length look alike, so that the first of each length alone is described.
        return [(stage, self._keys[micro], length) for length in self._lengths[micro]]

    def _wait_for_first(self) -> None:
        for wait in self._sending.popleft():
            wait()


def _nothing() -> None:
    """Waits for nothing."""
