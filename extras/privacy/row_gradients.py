"""Sums clipped gradients of single rows.

`torch.func` computes the gradient of each row as if it were alone in the batch. So no layer can let one row
change the gradient of another row, whatever the network does; opacus' hooks trust the layers instead. Layers
that `torch.func.vmap` cannot run, such as GRU, are run row by row.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.precision import autocast
from ringspark.estimators.training.step import Recipe
from ringspark.models.outputs import as_outputs
from ringspark.models.reports import collect_reports

_log = logging.getLogger(__name__)

# Most bytes of the gradients of single rows that are in memory at the same time.
MOST_BYTES = 64 << 20

Tensors = dict[str, torch.Tensor]


class RowGradients:
    """Computes the clipped gradient sums of one network; `max_norm` bounds each row's gradient."""

    def __init__(self, recipe: Recipe, network: nn.Module, max_norm: float, most_rows: int) -> None:
        """Takes the trained parameters; `most_rows` bounds the rows of one pass."""
        self._recipe, self._network, self._max_norm = recipe, network, max_norm
        self.parameters = {n: p for n, p in network.named_parameters() if p.requires_grad}
        row_bytes = sum(4 * p.numel() for p in self.parameters.values())
        self.most_rows = max(1, min(most_rows, MOST_BYTES // max(1, row_bytes)))
        self.has_layer_losses = False
        self.changed_buffers: set[str] = set()
        self._runs_together: bool | None = None

    def zeros(self) -> Tensors:
        return {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    def add(self, batch: Batch, sums: Tensors) -> None:
        """Adds the clipped gradients of the batch's rows to `sums`.

        A row without a finite gradient adds nothing, because an error would depend on a single row.
        """
        for part in batch.split(-(-batch.num_rows // self.most_rows)):
            gradients = self.of_rows(part)
            own = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients.values()]
            norms = torch.linalg.vector_norm(torch.stack(own), dim=0)  # (rows,)
            kept = norms.isfinite()
            if not kept.all():
                norms, gradients = norms[kept], {name: g[kept] for name, g in gradients.items()}
            factors = self._max_norm / norms.clamp(min=self._max_norm)
            for name, gradient in gradients.items():
                sums[name] += torch.tensordot(factors, gradient, dims=1)

    def of_rows(self, batch: Batch) -> Tensors:
        """Returns the gradient of each row's loss, (rows, ...) for each parameter."""
        if self._runs_together is None:
            self._runs_together = self._try_together(batch)
        return self._together(batch) if self._runs_together else self._in_turn(batch)

    def _loss(
        self,
        parameters: Mapping[str, torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        labels: tuple[torch.Tensor, ...],
        weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the loss of one row; the tensors have no dimension of rows."""
        recipe = self._recipe
        computing = autocast(recipe.config.precision, recipe.device)
        # Copies, because what a row writes into a buffer has neither a bound nor noise.
        buffers = {name: buffer.detach().clone() for name, buffer in self._network.named_buffers()}
        tensors = {**parameters, **buffers}
        # `vmap` cannot batch the fused kernels of attention.
        with computing, sdpa_kernel(SDPBackend.MATH), collect_reports() as reports:
            returned = functional_call(self._network, tensors, tuple(each[None] for each in inputs))
        self.has_layer_losses |= bool(reports.losses)
        # `functional_call` puts a buffer that the network replaced into `tensors`.
        self.changed_buffers |= {n for n, b in buffers.items() if tensors[n] is not b or b._version}
        outputs = tuple(output.float() for output in as_outputs(returned))
        rows = recipe.criterion.rows(outputs, tuple(label[None] for label in labels))
        loss = recipe.criterion.total(rows[0])
        return loss if weight is None else loss * weight

    def _together(self, batch: Batch) -> Tensors:
        parameters = {name: p.detach() for name, p in self.parameters.items()}
        dims = (None, 0, 0, None if batch.weight is None else 0)
        of_rows = vmap(grad(self._loss), in_dims=dims, randomness="different")
        found: Tensors = of_rows(parameters, batch.inputs, batch.labels, batch.weight)
        return found

    def _in_turn(self, batch: Batch) -> Tensors:
        rows, parameters = [], list(self.parameters.values())
        for row in range(batch.num_rows):
            weight = None if batch.weight is None else batch.weight[row]
            inputs, labels = (tuple(each[row] for each in given) for given in (batch.inputs, batch.labels))
            loss = self._loss(self.parameters, inputs, labels, weight)
            rows.append(torch.autograd.grad(loss, parameters, materialize_grads=True))
        stacked = [torch.stack(own) for own in zip(*rows, strict=True)]
        return dict(zip(self.parameters, stacked, strict=True))

    def find_other_leaf(self, batch: Batch) -> torch.Tensor | None:
        """Returns a weight that the loss of a row reads past the named parameters, so has no row gradient."""
        given = {name: p.detach().clone().requires_grad_() for name, p in self.parameters.items()}
        inputs, labels = (tuple(each[0] for each in values) for values in (batch.inputs, batch.labels))
        known, seen = {id(p) for p in given.values()}, set()
        waiting = [self._loss(given, inputs, labels, None).grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf: torch.Tensor | None = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                return leaf
            waiting += [each for each, _ in node.next_functions]
        return None

    def _try_together(self, batch: Batch) -> bool:
        """Returns whether `vmap` can run the network, tried on rows of zeros."""
        empty = Batch(
            inputs=tuple(torch.zeros_like(each[:1]) for each in batch.inputs),
            labels=tuple(torch.zeros_like(each[:1]) for each in batch.labels),
            weight=None,
        )
        try:
            with warnings.catch_warnings():
                # `vmap` loops over an operation that it cannot batch.
                warnings.filterwarnings("error", "There is a performance drop")
                self._together(empty)
        except (RuntimeError, NotImplementedError, UserWarning) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            _log.info("torch.func.vmap cannot run the network (%s); it runs row by row", error)
            return False
        return True
