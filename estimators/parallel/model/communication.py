"""Exchanges inside a network, each with the exchange that its gradient needs.

All ranks of the collective call these in the same order, forward and backward. A value is *whole* where all
ranks hold the same tensor, *partial* where the whole is the sum of the ranks', and *cut* where each rank
holds one part along a dimension. The gradient of a whole value is whole too: all ranks compute the same loss.

Invariant: a backward pass either consists of these functions, so that it is differentiable too, or it refuses
second derivatives. It refuses if ranks hold different shards of a gradient: a loss made from these gradients
would differ between ranks.

Shoeybi et al. 2019, "Megatron-LM", call `copied` f and `summed` g; Korthikanti et al. 2022 call `joined` and
`scattered` with partial gradients g-bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.cut import length_of_part


def copied(x: torch.Tensor, collective: Collective) -> torch.Tensor:
    """Takes a whole value into a part of the network: the gradients of the parts are summed."""
    return _run(_Copied, x, collective)


def summed(x: torch.Tensor, collective: Collective) -> torch.Tensor:
    """Makes a partial value whole, by an all-reduce; the gradient of every part is that of the whole."""
    return _run(_Summed, x, collective)


def part_of_whole(x: torch.Tensor, dim: int, collective: Collective) -> torch.Tensor:
    """Takes this rank's part of a whole value; the gradient is gathered."""
    return _run(_Part, x, collective, dim)


def joined(x: torch.Tensor, dim: int, collective: Collective, whole: int | None = None) -> torch.Tensor:
    """Makes a cut value whole, by an all-gather; of the whole gradient each rank takes its part.

    Args:
        whole: Length of the whole along `dim`; None asks the ranks, which is one exchange more.
    """
    return _run(_Joined, x, collective, dim, whole)


def joined_for_parts(
    x: torch.Tensor, dim: int, collective: Collective, whole: int | None = None
) -> torch.Tensor:
    """Like `joined`, for a whole that different ranks use differently: its gradients are reduce-scattered."""
    return _run(_JoinedForParts, x, collective, dim, whole)


def scattered(x: torch.Tensor, dim: int, collective: Collective) -> torch.Tensor:
    """Sums a partial value and leaves each rank its part, by a reduce-scatter; the gradient is gathered."""
    return _run(_Scattered, x, collective, dim)


def exchanged(
    x: torch.Tensor, sent: Sequence[int], arriving: Sequence[int], collective: Collective
) -> torch.Tensor:
    """Sends each rank its rows of `x` by an all-to-all; the gradients of the rows go back.

    Args:
        x: (rows, ...), those for rank 0 first.
        sent: Number of rows for each rank; may be 0.
        arriving: Number of rows from each rank.

    Returns:
        The rows that arrived, in the order of ranks.
    """
    return _run(_Exchanged, x, collective, tuple(sent), tuple(arriving))


def scaled_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns `x` as it is, and multiplies its gradient; nothing is exchanged."""
    result: torch.Tensor = _ScaledGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return result


def cut_along(x: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    """Returns a view of a rank's part of `x` along a dimension."""
    begin = sum(length_of_part(x.shape[dim], r, size) for r in range(rank))
    return x.narrow(dim, begin, length_of_part(x.shape[dim], rank, size))


def _run(function: Any, x: torch.Tensor, collective: Collective, *options: Any) -> torch.Tensor:
    if collective.size == 1:
        return x
    result: torch.Tensor = function.apply(x, collective, *options)
    return result


def _gather(x: torch.Tensor, dim: int, collective: Collective, whole: int | None = None) -> torch.Tensor:
    """Joins the ranks' tensors, which are alike but for the length of `dim`, by `length_of_part`."""
    first = x.movedim(dim, 0).contiguous()
    if whole is None:
        told = torch.tensor([len(first)])
        lengths = [int(n) for n in collective.all_gather(told, [1] * collective.size)]
    else:
        lengths = [length_of_part(whole, rank, collective.size) for rank in range(collective.size)]
    width = first.shape[1:].numel()
    pieces = collective.all_gather(first.reshape(-1), [n * width for n in lengths])
    # Not -1: there may be no rows.
    joined_pieces = torch.cat([p.view(n, *first.shape[1:]) for n, p in zip(lengths, pieces, strict=True)])
    return joined_pieces.movedim(0, dim).contiguous()


def _scatter(x: torch.Tensor, dim: int, collective: Collective) -> torch.Tensor:
    """Sums the ranks' tensors, and returns this rank's part of the sum."""
    first = x.movedim(dim, 0).contiguous()
    size = collective.size
    lengths = [length_of_part(len(first), rank, size) for rank in range(size)]
    width = first.shape[1:].numel()
    flat = collective.start_reduce_scatter(first.view(-1), [n * width for n in lengths])()
    return flat.view(lengths[collective.rank], *first.shape[1:]).movedim(0, dim).contiguous()


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collective: Collective) -> torch.Tensor:
        ctx.collective = collective
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return summed(gradient, ctx.collective), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collective: Collective) -> torch.Tensor:
        ctx.collective = collective
        return collective.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return copied(gradient, ctx.collective), None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collective: Collective, dim: int) -> torch.Tensor:
        ctx.collective, ctx.dim, ctx.whole = collective, dim, x.shape[dim]
        return cut_along(x, dim, collective.rank, collective.size).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return joined(gradient, ctx.dim, ctx.collective, ctx.whole), None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, collective: Collective, dim: int, whole: int | None
    ) -> torch.Tensor:
        ctx.collective, ctx.dim = collective, dim
        return _gather(x, dim, collective, whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return part_of_whole(gradient, ctx.dim, ctx.collective), None, None, None


class _JoinedForParts(_Joined):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _scatter(gradient, ctx.dim, ctx.collective), None, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collective: Collective, dim: int) -> torch.Tensor:
        ctx.collective, ctx.dim, ctx.whole = collective, dim, x.shape[dim]
        return _scatter(x, dim, collective)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _gather(gradient, ctx.dim, ctx.collective, ctx.whole), None, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, collective: Collective, sent: tuple[int, ...], arriving: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.collective, ctx.sent, ctx.arriving = collective, sent, arriving
        return _rows_exchanged(x, sent, arriving, collective)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return exchanged(gradient, ctx.arriving, ctx.sent, ctx.collective), None, None, None


def _rows_exchanged(
    x: torch.Tensor, sent: Sequence[int], arriving: Sequence[int], collective: Collective
) -> torch.Tensor:
    width = x.shape[1:].numel()
    flat = x.contiguous().view(-1)
    pieces = list(torch.split(flat, [n * width for n in sent]))
    found = collective.all_to_all(pieces, [n * width for n in arriving])
    # Not -1: rows may be of no numbers.
    return torch.cat(found).view(sum(arriving), *x.shape[1:])
