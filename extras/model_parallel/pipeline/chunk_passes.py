"""Runs a stage's passes over a micro-batch in sequence chunks, section by section (see `StageSection`).

Each chunk of each section has its own autograd graph, whose leaves are the chunk's inputs and initial states.
The chunk's input gradients can therefore be sent before the backward pass of the previous chunk. In the
backward pass the last chunk comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ringspark.extras.model_parallel.pipeline.sections import StageSection
from ringspark.extras.model_parallel.pipeline.wire import Values, detach_values
from ringspark.models.chain import State, as_values

# (values, section, states of its layers) -> (result, states after it).
Call = Callable[[Values, StageSection, Sequence[State]], tuple[Any, Sequence[State]]]
# (result of the last section, number of the chunk) -> tensors whose gradients come back.
Give = Callable[[Any, int], list[torch.Tensor]]
# Gradients of values that require them, chunk by chunk.
Gradients = Iterable[list[torch.Tensor]]
# (results, their gradients, inputs that require gradients): computes gradients into `.grad`.
Differentiate = Callable[[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]], None]


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


def run_forward(
    sections: Sequence[StageSection],
    lengths: Sequence[int],
    arriving: Iterator[Values],
    call: Call,
    give: Give,
    *,
    streams_in: bool,
) -> list[list[ChunkPass]]:
    """Runs a stage's forward pass.

    Args:
        lengths: Number of time steps of each chunk.
        arriving: The stage's inputs, leaves of the graph, as chunks or as whole rows.
        give: Function called with each result of the last section.
        streams_in: Whether the inputs arrive in chunks.
    """
    kept: list[list[ChunkPass]] = [[] for _ in sections]
    chunks, is_chunked = arriving, streams_in
    results: Iterator[Any] = iter(())
    for own, section in zip(kept, sections, strict=True):
        values = _rechunk(chunks, is_chunked, section.is_chunked, lengths)
        pass_on = give if own is kept[-1] else _keep_for_next
        results = _section_forward(section, values, lengths, own, call, pass_on)
        chunks, is_chunked = (detach_values(_as_tuple(result)) for result in results), section.is_chunked
    for _ in results:
        pass
    return kept


def run_backward(
    sections: Sequence[StageSection],
    kept: Sequence[list[ChunkPass]],
    lengths: Sequence[int],
    gradients: Gradients,
    *,
    streams_in: bool,
    differentiate: Differentiate,
) -> Iterator[list[torch.Tensor]]:
    """Runs a stage's backward pass; yields gradients of the stage's inputs, for the last chunk first.

    `kept` is the result of `run_forward`, and `lengths` has the time steps of each chunk. If `streams_in` is
    False, yields the gradients of whole rows at once.
    """
    for number in range(len(sections) - 1, -1, -1):
        found = _section_backward(kept[number], gradients, differentiate)
        before = sections[number - 1].is_chunked if number else streams_in
        gradients = _rechunk_gradients(found, sections[number].is_chunked, before, lengths)
    yield from gradients


def _section_forward(
    section: StageSection,
    chunks: Iterator[Values],
    lengths: Sequence[int],
    kept: list[ChunkPass],
    call: Call,
    give: Give,
) -> Iterator[Any]:
    states: list[State] = [None] * (section.end - section.first)
    for number, values in enumerate(chunks):
        result, after = call(values, section, states)
        if section.is_chunked:
            _check_times(_as_tuple(result), lengths[number])
        kept.append(ChunkPass(select_differentiable(values), give(result, number)))
        states = [_detach_state(state, kept[-1].states) for state in after]
        yield result


def _keep_for_next(result: Any, chunk: int) -> list[torch.Tensor]:
    return select_differentiable(_as_tuple(result))


def _section_backward(
    kept: Sequence[ChunkPass], gradients: Gradients, differentiate: Differentiate
) -> Iterator[list[torch.Tensor]]:
    for piece, own in zip(reversed(kept), gradients, strict=True):
        carried = [(state, leaf.grad) for state, leaf in piece.states if leaf.grad is not None]
        roots = [*piece.results, *(state for state, _ in carried)]
        if roots:
            # The loss, or a scalar added to it, follows the results that `gradients` belong to.
            ones = map(torch.ones_like, piece.results[len(own) :])
            differentiate(roots, [*own, *ones, *(gradient for _, gradient in carried)], piece.inputs)
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
        parts = zip(*chunks, strict=True)
        yield detach_values(tuple(None if own[0] is None else torch.cat(own, 1) for own in parts))
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
    nothing = [None] * len(lengths)
    pieces = [nothing if value is None else torch.split(value, list(lengths), 1) for value in values]
    yield from map(detach_values, zip(*pieces, strict=True))


def _check_times(values: Values, length: int) -> None:
    for value in values:
        if value is not None and (value.dim() < 2 or value.shape[1] != length):
            raise ValueError(
                f"layers with sequence chunks must return (batch, time, ...) with {length} time steps, as in "
                f"the network's first argument, got shape {tuple(value.shape)}; leave sequence_chunks out, "
                "or let the layers keep the number of time steps"
            )


def _detach_state(state: State, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> State:
    """Returns the detached state for the next chunk.

    Appends (tensor, detached tensor) to `kept` for each tensor of the state that requires a gradient.
    """
    if state is None:
        return None
    leaves = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in state)
    kept += [(own, leaf) for own, leaf in zip(state, leaves, strict=True) if own.requires_grad]
    return leaves


def select_differentiable(values: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [value for value in values if value is not None and value.requires_grad]


def _as_tuple(result: Any) -> Values:
    return as_values(result, "the next section")
