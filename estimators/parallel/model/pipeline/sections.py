"""How a stage works through chunks of time: its links in sections that go along time, or need whole rows.

A stack of recurrent layers overlaps in time: layer 2 can work on chunk t while layer 1 works on chunk t + 1,
since layer 2 needs of layer 1 the chunk t alone, and of itself the state after chunk t - 1. Where the last
link of a stage and the first of the next go along time (`Link.over_time`), values pass between the two chunk
by chunk, and the chunks' gradients come back in reverse.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringspark.models.chain import Link


@dataclass(frozen=True)
class Section:
    """Consecutive links of a stage.

    Attributes:
        first, end: Numbers of its first link and of that behind its last one, within the stage.
        is_chunked: Whether it works chunk by chunk, or on whole rows.
    """

    first: int
    end: int
    is_chunked: bool


def streams_of(stages: Sequence[Sequence[Link]], time_chunks: int) -> list[bool]:
    """Returns of each stage whether the next one gets its values chunk by chunk."""
    if time_chunks == 1:
        return [False] * len(stages)
    pairs = itertools.pairwise(stages)
    between = [_goes_along(before[-1]) and _goes_along(after[0]) for before, after in pairs]
    return [*between, False]


def sections_of(links: Sequence[Link], *, streams_in: bool, streams_out: bool) -> list[Section]:
    """Cuts a stage into sections; none if whole rows come in and go out.

    The links that go along time at an end of the stage where chunks pass work on them; all others work on
    whole rows, as the last section of a stage does that gives whole rows, though it may have no links.
    """
    if not (streams_in or streams_out):
        return []
    num = len(links)
    lead = next((i for i, link in enumerate(links) if not _goes_along(link)), num) if streams_in else 0
    if lead == num:
        return [Section(0, num, True), *([] if streams_out else [Section(num, num, False)])]
    trail = num
    while streams_out and trail > lead and _goes_along(links[trail - 1]):
        trail -= 1
    found = [Section(0, lead, True), Section(lead, trail, False), Section(trail, num, True)]
    return [s for s in found if s.end > s.first or not (s.is_chunked or streams_out)]


def lengths_of(arguments: Sequence[torch.Tensor], time_chunks: int) -> list[int]:
    """Returns the lengths of a row's chunks of time, which differ by 1 at most; fewer for shorter rows.

    Raises:
        ValueError: The first argument has no time.
    """
    if arguments[0].dim() < 2:
        raise ValueError(
            "parallelism's 'time_chunks' cuts the network's first argument along its second dimension, got a "
            f"shape of {tuple(arguments[0].shape)}; give rows that have one, or leave 'time_chunks' out"
        )
    length = arguments[0].shape[1]
    num = max(1, min(time_chunks, length))
    size, longer = divmod(length, num)
    return [size + (i < longer) for i in range(num)]


def goes_along_time(links: Sequence[Link]) -> bool:
    """Whether two links follow each other that go along time, between which chunks could pass."""
    return any(_goes_along(a) and _goes_along(b) for a, b in itertools.pairwise(links))


def _goes_along(link: Link) -> bool:
    return link.over_time is not None
