"""Collective operations inside a network, each with the operation that its gradient needs.

A value is *replicated* if all ranks hold the same tensor, *partial* if the whole is the sum over the ranks,
and *sharded* if each rank holds a shard along one dimension. Shoeybi et al. 2019, "Megatron-LM", call
`all_reduce_gradient` f and `all_reduce` g; Korthikanti et al. 2022 call `reduce_scatter` g-bar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.shard_spec import shard_length, shard_view

Operation = Callable[[torch.Tensor], torch.Tensor]


def all_reduce_gradient(x: torch.Tensor, collective: Collective) -> torch.Tensor:
    """Returns the replicated `x` for use by shards of the network; all-reduces its gradient."""
    return _apply(x, collective, lambda x: x.view_as(x), lambda g: all_reduce(g, collective))


def all_reduce(x: torch.Tensor, collective: Collective) -> torch.Tensor:
    """All-reduces the partial `x`; its gradient is the result's gradient."""
    return _apply(x, collective, collective.all_reduce, lambda g: all_reduce_gradient(g, collective))


def take_shard(x: torch.Tensor, dim: int, collective: Collective) -> torch.Tensor:
    """Returns this rank's shard of the replicated `x`; all-gathers its gradient."""
    length = x.shape[dim]
    return _apply(
        x,
        collective,
        lambda x: shard_view(x, dim, collective.rank, collective.size).contiguous(),
        lambda g: all_gather(g, dim, collective, length),
    )


def all_gather(x: torch.Tensor, dim: int, collective: Collective, length: int) -> torch.Tensor:
    """All-gathers the sharded `x`; each rank takes its shard of the gradient.

    `length` is the result's length along `dim`.
    """
    return _apply(
        x, collective, lambda x: _gather(x, dim, collective, length), lambda g: take_shard(g, dim, collective)
    )


def all_gather_for_shards(x: torch.Tensor, dim: int, collective: Collective, length: int) -> torch.Tensor:
    """Like `all_gather`, for a result that ranks use differently: reduce-scatters its gradient."""
    return _apply(
        x,
        collective,
        lambda x: _gather(x, dim, collective, length),
        lambda g: _scatter(g, dim, collective),
        _LinearOnce,
    )


def reduce_scatter(x: torch.Tensor, dim: int, collective: Collective) -> torch.Tensor:
    """Reduce-scatters the partial `x`; all-gathers the gradient."""
    length = x.shape[dim]
    return _apply(
        x,
        collective,
        lambda x: _scatter(x, dim, collective),
        lambda g: _gather(g, dim, collective, length),
        _LinearOnce,
    )


def all_to_all(
    x: torch.Tensor, sent: Sequence[int], arriving: Sequence[int], collective: Collective
) -> torch.Tensor:
    """Sends each rank its rows of `x`, in rank order; returns the rows that arrived, in rank order."""
    sent, arriving = tuple(sent), tuple(arriving)
    return _apply(
        x,
        collective,
        lambda x: _send_rows(x, sent, arriving, collective),
        lambda g: all_to_all(g, arriving, sent, collective),
    )


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns `x`; multiplies its gradient by `factor`."""
    return apply_once(x, lambda x: x.view_as(x), lambda gradient: gradient * factor)


def apply_once(x: torch.Tensor, forward: Operation, backward: Operation) -> torch.Tensor:
    """Returns `forward(x)`; `backward` maps its gradient to the gradient of `x`. No second derivative."""
    result: torch.Tensor = _LinearOnce.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


class LinearOperation(torch.autograd.Function):
    """Runs `forward`, and `backward` on the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Operation, backward: Operation) -> torch.Tensor:
        ctx.differentiate = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.differentiate(gradient), None, None


class _LinearOnce(LinearOperation):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.differentiate(gradient), None, None


def _apply(
    x: torch.Tensor,
    collective: Collective,
    forward: Operation,
    backward: Operation,
    kind: Any = LinearOperation,
) -> torch.Tensor:
    if collective.size == 1:
        return x
    result: torch.Tensor = kind.apply(x, forward, backward)
    return result


def _gather(x: torch.Tensor, dim: int, collective: Collective, length: int) -> torch.Tensor:
    """All-gathers tensors with shapes that differ only in dimension `dim`."""
    first = x.movedim(dim, 0).contiguous()
    lengths = [shard_length(length, rank, collective.size) for rank in range(collective.size)]
    width = first.shape[1:].numel()
    shards = collective.all_gather(first.reshape(-1), [n * width for n in lengths])
    # Not -1: there may be no rows.
    whole = torch.cat([s.view(n, *first.shape[1:]) for n, s in zip(lengths, shards, strict=True)])
    return whole.movedim(0, dim).contiguous()


def _scatter(x: torch.Tensor, dim: int, collective: Collective) -> torch.Tensor:
    first = x.movedim(dim, 0).contiguous()
    size = collective.size
    lengths = [shard_length(len(first), rank, size) for rank in range(size)]
    width = first.shape[1:].numel()
    flat = collective.start_reduce_scatter(first.view(-1), [n * width for n in lengths])()
    return flat.view(lengths[collective.rank], *first.shape[1:]).movedim(0, dim).contiguous()


def _send_rows(
    x: torch.Tensor, sent: Sequence[int], arriving: Sequence[int], collective: Collective
) -> torch.Tensor:
    width = x.shape[1:].numel()
    flat = x.contiguous().view(-1)
    pieces = list(torch.split(flat, [n * width for n in sent]))
    found = collective.all_to_all(pieces, [n * width for n in arriving])
    # Not -1: rows may be of no numbers.
    return torch.cat(found).view(sum(arriving), *x.shape[1:])
