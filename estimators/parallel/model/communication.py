"""Collective operations inside a network, each with the operation that its gradient needs.

All ranks of the collective call these functions in the same order, forward and backward. A value is
*replicated* if all ranks hold the same tensor, *partial* if the whole is the sum over the ranks, and
*sharded* if each rank holds a shard along one dimension. The gradient of a replicated value is replicated,
because all ranks compute the same loss.

Invariant: a backward pass either consists of these functions, so it can be differentiated again, or it
refuses second derivatives. It refuses if ranks hold different shards of a gradient: a loss made of these
gradients would differ between ranks.

Shoeybi et al. 2019, "Megatron-LM", call `all_reduce_gradient` f and `all_reduce` g; Korthikanti et al. 2022
call `all_gather_for_shards` and `reduce_scatter` g-bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.shard_spec import shard_length, shard_view


def all_reduce_gradient(x: torch.Tensor, collective: Collective) -> torch.Tensor:
    """Returns the replicated `x` for use by shards of the network; all-reduces its gradient."""
    return _run(_AllReduceGradient, x, collective)


def all_reduce(x: torch.Tensor, collective: Collective) -> torch.Tensor:
    """All-reduces the partial `x`; its gradient is the result's gradient."""
    return _run(_AllReduce, x, collective)


def take_shard(x: torch.Tensor, dim: int, collective: Collective) -> torch.Tensor:
    """Returns this rank's shard of the replicated `x`; all-gathers its gradient."""
    return _run(_TakeShard, x, collective, dim)


def all_gather(x: torch.Tensor, dim: int, collective: Collective, length: int | None = None) -> torch.Tensor:
    """All-gathers the sharded `x`; each rank takes its shard of the gradient.

    Args:
        length: Length of the result along `dim`; None asks the ranks, which is one more message.
    """
    return _run(_AllGather, x, collective, dim, length)


def all_gather_for_shards(
    x: torch.Tensor, dim: int, collective: Collective, length: int | None = None
) -> torch.Tensor:
    """Like `all_gather`, for a result that ranks use differently: reduce-scatters its gradient."""
    return _run(_AllGatherForShards, x, collective, dim, length)


def reduce_scatter(x: torch.Tensor, dim: int, collective: Collective) -> torch.Tensor:
    """Reduce-scatters the partial `x`; all-gathers the gradient."""
    return _run(_ReduceScatter, x, collective, dim)


def all_to_all(
    x: torch.Tensor, sent: Sequence[int], arriving: Sequence[int], collective: Collective
) -> torch.Tensor:
    """Sends each rank its rows of `x`; sends the gradients of the rows back.

    Args:
        x: (rows, ...), the rows for rank 0 first.
        sent: Number of rows for each rank; may be 0.
        arriving: Number of rows from each rank.

    Returns:
        The rows that arrived, in rank order.
    """
    return _run(_AllToAll, x, collective, tuple(sent), tuple(arriving))


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns `x`; multiplies its gradient by `factor`."""
    result: torch.Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return result


def _run(function: Any, x: torch.Tensor, collective: Collective, *options: Any) -> torch.Tensor:
    if collective.size == 1:
        return x
    result: torch.Tensor = function.apply(x, collective, *options)
    return result


def _gather(x: torch.Tensor, dim: int, collective: Collective, length: int | None) -> torch.Tensor:
    """All-gathers tensors that only differ in the length of `dim`."""
    first = x.movedim(dim, 0).contiguous()
    if length is None:
        own = torch.tensor([len(first)])
        lengths = [int(n) for n in collective.all_gather(own, [1] * collective.size)]
    else:
        lengths = [shard_length(length, rank, collective.size) for rank in range(collective.size)]
    width = first.shape[1:].numel()
    shards = collective.all_gather(first.reshape(-1), [n * width for n in lengths])
    # Not -1: there may be no rows.
    whole = torch.cat([s.view(n, *first.shape[1:]) for n, s in zip(lengths, shards, strict=True)])
    return whole.movedim(0, dim).contiguous()


def _scatter(x: torch.Tensor, dim: int, collective: Collective) -> torch.Tensor:
    """Returns this rank's shard of the sum."""
    first = x.movedim(dim, 0).contiguous()
    size = collective.size
    lengths = [shard_length(len(first), rank, size) for rank in range(size)]
    width = first.shape[1:].numel()
    flat = collective.start_reduce_scatter(first.view(-1), [n * width for n in lengths])()
    return flat.view(lengths[collective.rank], *first.shape[1:]).movedim(0, dim).contiguous()


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


class _AllReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collective: Collective) -> torch.Tensor:
        ctx.collective = collective
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_reduce(gradient, ctx.collective), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collective: Collective) -> torch.Tensor:
        ctx.collective = collective
        return collective.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_reduce_gradient(gradient, ctx.collective), None


class _TakeShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collective: Collective, dim: int) -> torch.Tensor:
        ctx.collective, ctx.dim, ctx.length = collective, dim, x.shape[dim]
        return shard_view(x, dim, collective.rank, collective.size).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_gather(gradient, ctx.dim, ctx.collective, ctx.length), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, collective: Collective, dim: int, length: int | None
    ) -> torch.Tensor:
        ctx.collective, ctx.dim = collective, dim
        return _gather(x, dim, collective, length)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return take_shard(gradient, ctx.dim, ctx.collective), None, None, None


class _AllGatherForShards(_AllGather):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _scatter(gradient, ctx.dim, ctx.collective), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collective: Collective, dim: int) -> torch.Tensor:
        ctx.collective, ctx.dim, ctx.length = collective, dim, x.shape[dim]
        return _scatter(x, dim, collective)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _gather(gradient, ctx.dim, ctx.collective, ctx.length), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, collective: Collective, sent: tuple[int, ...], arriving: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.collective, ctx.sent, ctx.arriving = collective, sent, arriving
        return _send_rows(x, sent, arriving, collective)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return all_to_all(gradient, ctx.arriving, ctx.sent, ctx.collective), None, None, None


def _send_rows(
    x: torch.Tensor, sent: Sequence[int], arriving: Sequence[int], collective: Collective
) -> torch.Tensor:
    width = x.shape[1:].numel()
    flat = x.contiguous().view(-1)
    pieces = list(torch.split(flat, [n * width for n in sent]))
    found = collective.all_to_all(pieces, [n * width for n in arriving])
    # Not -1: rows may be of no numbers.
    return torch.cat(found).view(sum(arriving), *x.shape[1:])
