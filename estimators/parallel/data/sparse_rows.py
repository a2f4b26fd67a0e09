"""Sums sparse gradients of embeddings (`sparse=True`): each rank sends the rows that its batch used."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.base import dense_values
from ringspark.estimators.parallel.data.gradient_buckets import norm_dtype

# Largest table with 32-bit indices.
_MAX_INT_ROWS = 1 << 31


def sparse_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained tables of the layers made with `sparse=True`, by name."""
    tables = {
        layer.weight
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }
    return {name: p for name, p in module.named_parameters() if p in tables and p.requires_grad}


def split_parameters(
    module: nn.Module, optimizer: torch.optim.Optimizer, collective: Collective
) -> tuple[dict[str, nn.Parameter], SparseRows]:
    """Returns the optimizer's parameters with dense gradients by name, and those with sparse gradients."""
    held = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    trained = {name: p for name, p in module.named_parameters() if p in held}
    tables = sparse_parameters(module)
    rows = SparseRows({n: p for n, p in tables.items() if n in trained}, optimizer, collective)
    return {name: p for name, p in trained.items() if name not in tables}, rows


class SparseRows:
    def __init__(
        self, named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, collective: Collective
    ) -> None:
        self._parameters = list(named.values())
        self._collective = collective
        # All other optimizers take dense gradients, and most take no sparse ones.
        self._stays_sparse = isinstance(optimizer, torch.optim.SparseAdam)

    @torch.no_grad()
    def sum(self) -> None:
        """Replaces the gradients by their sums, or None if no rank had one. Runs on every rank."""
        if not self._parameters:
            return
        own = [_rows_of(parameter) for parameter in self._parameters]
        # -1 means no gradient, which differs from a gradient without rows.
        lengths_here = torch.tensor([-1 if rows is None else len(rows[0]) for rows in own])
        counts = torch.stack(self._collective.all_gather(lengths_here, [len(own)] * self._collective.size))
        for number, (parameter, rows) in enumerate(zip(self._parameters, own, strict=True)):
            parameter.grad = None
            lengths = counts[:, number].tolist()
            if max(lengths) >= 0:
                parameter.grad = self._sum_rows(parameter, rows, [max(0, length) for length in lengths])

    @torch.no_grad()
    def are_finite(self) -> bool:
        values = dense_values([p.grad for p in self._parameters if p.grad is not None])
        return all(bool(torch.isfinite(v).all()) for v in values)

    @torch.no_grad()
    def squares(self) -> list[torch.Tensor]:
        """Returns the squared 2-norm of each of this rank's gradients, before `sum`."""
        values = dense_values([p.grad for p in self._parameters if p.grad is not None])
        return [torch.linalg.vector_norm(v, dtype=norm_dtype(v)).square() for v in values]

    def _sum_rows(
        self, parameter: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor] | None, lengths: list[int]
    ) -> torch.Tensor:
        width = parameter.shape[1]
        if rows is None:
            rows = torch.zeros(0, dtype=torch.int64, device=parameter.device), parameter.new_zeros(0, width)
        found = rows[0] if len(parameter) > _MAX_INT_ROWS else rows[0].int()
        indices = self._collective.all_gather(found, lengths)
        values = self._collective.all_gather(
            rows[1].contiguous().view(-1), [length * width for length in lengths]
        )
        if self._stays_sparse:
            gathered = torch.cat([value.view(-1, width) for value in values])
            where = torch.cat(indices).long()[None]
            shape = parameter.shape
            return torch.sparse_coo_tensor(where, gathered, shape, check_invariants=False).coalesce()
        total = torch.zeros_like(parameter)
        for index, value in zip(indices, values, strict=True):
            total.index_add_(0, index.long(), value.view(-1, width))
        return total


def _rows_of(parameter: nn.Parameter) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns indices, (rows,), and values, (rows, width), of a gradient; None if there is none."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        rows = gradient.coalesce()
        return rows.indices()[0], rows.values()
    # The table is also used densely, for example because it is tied to an output layer.
    found = torch.nonzero(gradient.ne(0).any(1)).view(-1)
    return found, gradient[found]
