"""Runs a stage's passes over a micro-batch in sequence chunks, section by section (see `StageSection`).

Each chunk of each section has its own autograd graph, whose leaves are the chunk's inputs and initial states.
The chunk's input gradients can therefore be sent before the backward pass of the previous chunk. In the
backward pass the last chunk comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from ringspark.extras.model_parallel.pipeline.executor import select_differentiable
from ringspark.extras.model_parallel.pipeline.sections import StageSection
from ringspark.extras.model_parallel.pipeline.wire import Values, Wait, forms_of, mark_gradients
from ringspark.models.chain import Link, State, as_values

Span = Callable[[], AbstractContextManager[object]]
# (values, section, states of its layers) -> (result, states after it).
Call = Callable[[Values, StageSection, Sequence[State]], tuple[Any, Sequence[State]]]
# (result of the last section, number of the chunk) -> tensors whose gradients come back.
Give = Callable[[Any, int], list[torch.Tensor]]
# Gradients of values that require them, chunk by chunk.
Gradients = Iterable[list[torch.Tensor]]


@dataclass
class ChunkPass:
    """Tensors of one chunk of a section, kept between its forward and its backward pass.

    Attributes:
        inputs: Inputs that require gradients; leaves of the graph.
        results: Results that receive gradients.
        states: Pairs of a differentiable state after the chunk and its detached copy, a leaf of the next
            chunk's graph.
    """

    inputs: list[torch.Tensor]
    results: list[torch.Tensor]
    states: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


@dataclass
class LiveChunks:
    sections: list[list[ChunkPass]]
    sent: list[Wait] = field(default_factory=list)


def run_forward(
    sections: Sequence[StageSection],
    lengths: Sequence[int],
    arriving: Iterator[Values],
    call: Call,
    give: Give,
    *,
    streams_in: bool,
    span: Span,
) -> list[list[ChunkPass]]:
    """Runs a stage's forward pass.

    Args:
        lengths: Number of time steps of each chunk.
        arriving: The stage's inputs, leaves of the graph, as chunks or as whole rows.
        give: Function called with each result of the last section.
        streams_in: Whether the inputs arrive in chunks.
        span: Returns a context, which is open during each computation but not during a wait for inputs.
    """
    kept: list[list[ChunkPass]] = [[] for _ in sections]
    chunks, is_chunked = arriving, streams_in
    for number, section in enumerate(sections):
        last = give if number + 1 == len(sections) else None
        values = _rechunk(chunks, is_chunked, section.is_chunked, lengths)
        chunks, is_chunked = (
            _section_forward(section, values, lengths, kept[number], call, last, span),
            section.is_chunked,
        )
    for _ in chunks:
        pass
    return kept


def run_backward(
    sections: Sequence[StageSection],
    kept: Sequence[list[ChunkPass]],
    lengths: Sequence[int],
    gradients: Gradients,
    *,
    streams_in: bool,
    span: Span,
) -> Iterator[list[torch.Tensor]]:
    """Runs a stage's backward pass; yields gradients of the stage's inputs, for the last chunk first.

    `kept` is the result of `run_forward`, and `lengths` has the time steps of each chunk. If `streams_in` is
    False, yields the gradients of whole rows at once.
    """
    for number in range(len(sections) - 1, -1, -1):
        found = _section_backward(kept[number], gradients, span)
        before = sections[number - 1].is_chunked if number else streams_in
        gradients = _rechunk_gradients(found, sections[number].is_chunked, before, lengths)
    yield from gradients


def _section_forward(
    section: StageSection,
    chunks: Iterator[Values],
    lengths: Sequence[int],
    kept: list[ChunkPass],
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
                kept.append(ChunkPass(select_differentiable(values), give(result, number)))
            else:
                outputs = _as_tuple(result)
                kept.append(ChunkPass(select_differentiable(values), select_differentiable(outputs)))
            states = [_detach_state(state, kept[-1].states) for state in after]
        yield () if give is not None else _leaves(outputs)


def _section_backward(
    kept: Sequence[ChunkPass], gradients: Gradients, span: Span
) -> Iterator[list[torch.Tensor]]:
    for piece, own in zip(reversed(kept), gradients, strict=True):
        carried = [(state, leaf.grad) for state, leaf in piece.states if leaf.grad is not None]
        roots = [*piece.results, *(state for state, _ in carried)]
        with span():
            if roots:
                torch.autograd.backward(roots, [*own, *(gradient for _, gradient in carried)])
        # Free the graph of the chunk.
        piece.results, piece.states = [], []
        found = []
        for value in piece.inputs:
            found.append(torch.zeros_like(value) if value.grad is None else value.grad)
            value.grad = None
        yield found


def _rechunk(
    chunks: Iterator[Values], is_chunked: bool, needs_chunks: bool, lengths: Sequence[int]
) -> Iterator[Values]:
    if is_chunked == needs_chunks:
        yield from chunks
    elif is_chunked:
        yield _concatenate(list(chunks))
    else:
        (whole,) = chunks
        yield from _split(whole, lengths)


def _rechunk_gradients(
    found: Iterator[list[torch.Tensor]], is_chunked: bool, before: bool, lengths: Sequence[int]
) -> Iterator[list[torch.Tensor]]:
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
        # Each chunk is its own leaf.
        own = tuple(None if p is None else p[chunk].detach() for p in pieces)
        yield mark_gradients(own, forms_of(values))


def _check_times(values: Values, length: int) -> None:
    for value in values:
        if value is not None and (value.dim() < 2 or value.shape[1] != length):
            raise ValueError(
                f"layers with sequence chunks must return (batch, time, ...) with {length} time steps, as in "
                f"the network's first argument, got shape {tuple(value.shape)}; leave sequence_chunks out, "
                "or let the layers keep the number of time steps"
            )


def _concatenate(chunks: Sequence[Values]) -> Values:
    parts = list(zip(*chunks, strict=True))
    whole = tuple(None if own[0] is None else torch.cat([t.detach() for t in own], 1) for own in parts)
    return mark_gradients(whole, forms_of(chunks[0]))


def _leaves(values: Values) -> Values:
    return mark_gradients(tuple(None if v is None else v.detach() for v in values), forms_of(values))


def _detach_state(state: State, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> State:
    """Returns the detached state for the next chunk.

    Appends (tensor, detached tensor) to `kept` for each tensor of the state that requires a gradient.
    """
    if state is None:
        return None
    leaves = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in state)
    kept += [(own, leaf) for own, leaf in zip(state, leaves, strict=True) if own.requires_grad]
    return leaves


def _as_tuple(result: Any) -> Values:
    return as_values(result, Link("the next section", _as_tuple, ()))
