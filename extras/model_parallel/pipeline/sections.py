"""Splits a stage into sections: consecutive layers that all work on sequence chunks, or all on whole rows.

A stack of recurrent layers overlaps in time: layer 2 can compute chunk t while layer 1 computes chunk t + 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringspark.estimators.parallel.shard_spec import shard_length
from ringspark.models.chain import Link


@dataclass(frozen=True)
class StageSection:
    """Consecutive layers of a stage, from `first` to `end`, that work chunk by chunk or on whole rows."""

    first: int
    end: int
    is_chunked: bool


def find_streams(stages: Sequence[Sequence[Link]], time_chunks: int) -> list[bool]:
    if time_chunks == 1:
        return [False] * len(stages)
    pairs = itertools.pairwise(stages)
    between = [_goes_along(before[-1]) and _goes_along(after[0]) for before, after in pairs]
    return [*between, False]


def split_into_sections(links: Sequence[Link], *, streams_in: bool, streams_out: bool) -> list[StageSection]:
    """Splits a stage into sections; there is one section if the stage receives and sends whole rows.

    With `streams_in`, chunks arrive, and the layers before the first layer without chunk support work on
    chunks. With `streams_out`, chunks are sent, and the last layers with chunk support work on chunks. All
    other layers work on whole rows. Without `streams_out` the last section works on whole rows, even if the
    section has no layers.
    """
    num = len(links)
    lead = next((i for i, link in enumerate(links) if not _goes_along(link)), num) if streams_in else 0
    if lead == num:
        return [StageSection(0, num, True), *([] if streams_out else [StageSection(num, num, False)])]
    trail = num
    while streams_out and trail > lead and _goes_along(links[trail - 1]):
        trail -= 1
    found = [StageSection(0, lead, True), StageSection(lead, trail, False), StageSection(trail, num, True)]
    return [s for s in found if s.end > s.first or not (s.is_chunked or streams_out)]


def chunk_lengths(arguments: Sequence[torch.Tensor], time_chunks: int) -> list[int]:
    if arguments[0].dim() < 2:
        raise ValueError(
            "Pipeline's sequence_chunks splits the network's first argument along its second dimension, got "
            f"shape {tuple(arguments[0].shape)}; give rows that have one, or leave sequence_chunks out"
        )
    length = arguments[0].shape[1]
    num = max(1, min(time_chunks, length))
    return [shard_length(length, chunk, num) for chunk in range(num)]


def goes_along_time(links: Sequence[Link]) -> bool:
    return any(_goes_along(a) and _goes_along(b) for a, b in itertools.pairwise(links))


def _goes_along(link: Link) -> bool:
    return link.over_time is not None
