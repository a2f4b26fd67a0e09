"""Lets layers report losses and counts from inside a network, without changing the network's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import nn


class CountingLayer(nn.Module):
    """Base class of layers that count something over their rows; `num_counts` must be equal on all ranks."""

    num_counts: int

    @staticmethod
    def numbers(totals: Sequence[torch.Tensor]) -> dict[str, float]:
        """Returns columns of the training history by name.

        `totals` has one tensor per layer, (num_counts,): the layer's counts, summed over all rows.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class CountingLayerInfo:
    """Describes a counting layer of any rank; `names` has several entries if the network reuses the layer."""

    names: tuple[str, ...]
    num_counts: int
    numbers: Callable[[Sequence[torch.Tensor]], dict[str, float]]


def find_counting_layers(network: nn.Module) -> list[CountingLayerInfo]:
    names: dict[CountingLayer, list[str]] = {}
    for name, layer in network.named_modules(remove_duplicate=False):
        if isinstance(layer, CountingLayer):
            names.setdefault(layer, []).append(name)
    return [
        CountingLayerInfo(tuple(own), layer.num_counts, type(layer).numbers) for layer, own in names.items()
    ]


@dataclass(frozen=True)
class Reports:
    losses: list[torch.Tensor] = field(default_factory=list)
    counts: dict[CountingLayer, torch.Tensor] = field(default_factory=dict)


_OPEN: ContextVar[Reports | None] = ContextVar("_OPEN", default=None)


@contextmanager
def collect_reports() -> Iterator[Reports]:
    reports = Reports()
    token = _OPEN.set(reports)
    try:
        yield reports
    finally:
        _OPEN.reset(token)


def add_loss(rows: torch.Tensor) -> None:
    """Adds the mean of `rows` over the global batch to the training loss; `rows` has one loss per row.

    Call this function in training mode only. The loss of a row must not depend on other rows; otherwise the
    training loss would depend on the number of ranks.
    """
    reports = _OPEN.get()
    if reports is not None:
        reports.losses.append(rows)


def num_losses() -> int:
    """Returns the number of losses added so far; 0 outside of `collect_reports`."""
    reports = _OPEN.get()
    return 0 if reports is None else len(reports.losses)


def add_counts(layer: CountingLayer, counts: torch.Tensor) -> None:
    """Adds a layer's counts of this pass to the current report; does nothing outside of `collect_reports`."""
    reports = _OPEN.get()
    if reports is not None:
        known = reports.counts.get(layer)
        reports.counts[layer] = counts.detach() if known is None else known + counts.detach()
