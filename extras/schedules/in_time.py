"""A stage's passes over one micro-batch in chunks of time, section by section.

Invariant: the graph of each chunk of each section is its own. Its inputs, and the states that it starts from,
are leaves, so that the backward pass of a chunk can be made, and its gradients sent, before that of the chunk
before it: chunk by chunk against time, with the gradients of the states carried along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from ringspark.estimators.parallel.model.pipeline.sections import Section
from ringspark.estimators.parallel.model.pipeline.wire import Values, Wait, forms_of, marked
from ringspark.models.chain import Link, State, as_values

Span = Callable[[], AbstractContextManager[None]]
# (values, section, states of its links) -> (result, states after it).
Call = Callable[[Values, Section, Sequence[State]], tuple[Any, Sequence[State]]]
# (result of the last section, number of the chunk) -> the tensors of which gradients come back.
Give = Callable[[Any, int], list[torch.Tensor]]
# Gradients of the values that want them, chunk by chunk.
Gradients = Iterable[list[torch.Tensor]]


@dataclass
class Piece:
    """What a section keeps of one chunk between its forward and its backward pass.

    Attributes:
        inputs: The values that want gradients, leaves.
        results: The results that get gradients.
        states: Each state after the chunk that wants a gradient, with the leaf that the next chunk starts
            from.
    """

    inputs: list[torch.Tensor]
    results: list[torch.Tensor]
    states: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


@dataclass
class LiveInTime:
    """What a stage keeps of a micro-batch: the pieces of each section, and waits for what it sent."""

    sections: list[list[Piece]]
    sent: list[Wait] = field(default_factory=list)


def forward(
    sections: Sequence[Section],
    lengths: Sequence[int],
    arriving: Iterator[Values],
    call: Call,
    give: Give,
    *,
    streams_in: bool,
    span: Span,
) -> list[list[Piece]]:
    """Runs a stage.

    Args:
        lengths: Length of each chunk.
        arriving: The stage's inputs, leaves: chunk by chunk or as whole rows.
        give: Takes the results of the last section.
        streams_in: Whether the inputs come chunk by chunk.
        span: Makes the context of each computation, without waits.
    """
    kept: list[list[Piece]] = [[] for _ in sections]
    chunks, is_chunked = arriving, streams_in
    for number, section in enumerate(sections):
        last = give if number + 1 == len(sections) else None
        cut = _cut_anew(chunks, is_chunked, section.is_chunked, lengths)
        chunks, is_chunked = (
            _section_forward(section, cut, lengths, kept[number], call, last, span),
            section.is_chunked,
        )
    for _ in chunks:
        pass
    return kept


def backward(
    sections: Sequence[Section],
    kept: Sequence[list[Piece]],
    lengths: Sequence[int],
    gradients: Gradients,
    *,
    streams_in: bool,
    span: Span,
) -> Iterator[list[torch.Tensor]]:
    """Runs a stage back; yields gradients of the stage's inputs, the last chunk's first.

    Args:
        gradients: Those of what the stage gave, in the same order.
        streams_in: Whether the stage before wants chunks.
    """
    for number in range(len(sections) - 1, -1, -1):
        found = _section_backward(kept[number], gradients, span)
        before = sections[number - 1].is_chunked if number else streams_in
        gradients = _gradients_anew(found, sections[number].is_chunked, before, lengths)
    yield from gradients


def _section_forward(
    section: Section,
    chunks: Iterator[Values],
    lengths: Sequence[int],
    kept: list[Piece],
    call: Call,
    give: Give | None,
    span: Span,
) -> Iterator[Values]:
    states: list[State] = [None] * (section.end - section.first)
    for number, values in enumerate(chunks):
        with span():
            result, after = call(values, section, states)
            if section.is_chunked:
                _check_times(_as_tuple(result), lengths[number])
            if give is not None:
                kept.append(Piece(_wanted(values), give(result, number)))
            else:
                outputs = _as_tuple(result)
                kept.append(Piece(_wanted(values), _wanted(outputs)))
            states = [_cut_off(state, kept[-1].states) for state in after]
        yield () if give is not None else _leaves(outputs)


def _section_backward(
    kept: Sequence[Piece], gradients: Gradients, span: Span
) -> Iterator[list[torch.Tensor]]:
    for piece, own in zip(reversed(kept), gradients, strict=True):
        carried = [(state, leaf.grad) for state, leaf in piece.states if leaf.grad is not None]
        roots = [*piece.results, *(state for state, _ in carried)]
        with span():
            if roots:
                torch.autograd.backward(roots, [*own, *(gradient for _, gradient in carried)])
        # The graph goes with its chunk, not with the stage.
        piece.results, piece.states = [], []
        found = []
        for value in piece.inputs:
            found.append(torch.zeros_like(value) if value.grad is None else value.grad)
            value.grad = None
        yield found


def _cut_anew(
    chunks: Iterator[Values], is_chunked: bool, wants_chunks: bool, lengths: Sequence[int]
) -> Iterator[Values]:
    """Yields the values as a section wants them: in chunks, or as whole rows."""
    if is_chunked == wants_chunks:
        yield from chunks
    elif is_chunked:
        yield _joined(list(chunks))
    else:
        (whole,) = chunks
        yield from _split(whole, lengths)


def _gradients_anew(
    found: Iterator[list[torch.Tensor]], is_chunked: bool, before: bool, lengths: Sequence[int]
) -> Iterator[list[torch.Tensor]]:
    """Yields gradients as the section before wants them; the last chunk's first."""
    if is_chunked == before:
        yield from found
    elif is_chunked:
        every = list(found)[::-1]
        yield [torch.cat(parts, 1) for parts in zip(*every, strict=True)]
    else:
        (whole,) = found
        parts = [torch.split(gradient, list(lengths), 1) for gradient in whole]
        for chunk in range(len(lengths) - 1, -1, -1):
            yield [part[chunk] for part in parts]


def _split(values: Values, lengths: Sequence[int]) -> Iterator[Values]:
    _check_times(values, sum(lengths))
    pieces = [None if v is None else torch.split(v.detach(), list(lengths), 1) for v in values]
    for chunk in range(len(lengths)):
        # Each chunk is a leaf of its own; a view of another tensor could not become one after the next.
        own = tuple(None if p is None else p[chunk].detach() for p in pieces)
        yield marked(own, forms_of(values))


def _check_times(values: Values, length: int) -> None:
    for value in values:
        if value is not None and (value.dim() < 2 or value.shape[1] != length):
            raise ValueError(
                f"links over time pass on values of (batch, time, ...), of {length} times here as the "
                f"network's first argument has, got a shape of {tuple(value.shape)}; leave time_chunks out, "
                "or let links keep the number of times"
            )


def _joined(chunks: Sequence[Values]) -> Values:
    parts = list(zip(*chunks, strict=True))
    whole = tuple(None if own[0] is None else torch.cat([t.detach() for t in own], 1) for own in parts)
    return marked(whole, forms_of(chunks[0]))


def _leaves(values: Values) -> Values:
    return marked(tuple(None if v is None else v.detach() for v in values), forms_of(values))


def _cut_off(state: State, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> State:
    """Returns the state as leaves, from which the next chunk starts; notes those that want gradients."""
    if state is None:
        return None
    leaves = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in state)
    kept += [(own, leaf) for own, leaf in zip(state, leaves, strict=True) if own.requires_grad]
    return leaves


def _as_tuple(result: Any) -> Values:
    return as_values(result, Link("the next section", _as_tuple, ()))


def _wanted(values: Values) -> list[torch.Tensor]:
    return [value for value in values if value is not None and value.requires_grad]
