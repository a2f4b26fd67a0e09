"""Sums gradients with `hvd.DistributedOptimizer` (Sergeev and Del Balso 2018).

It hooks every parameter's gradient, so the reduction of one layer runs while the layers before it still
compute. Gradients are summed, not averaged: each rank's loss is already its share of the global mean, so the
sum is right even if ranks hold different numbers of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import num_bytes, peer_errors
from ringspark.estimators.parallel.base import PlainSync, Scaler


class HorovodSync(PlainSync):
    """Gradients summed by `hvd.DistributedOptimizer`.

    A parameter without a gradient on this rank, for example because the rank has no rows in this step,
    takes part with zeros: Horovod submits it in `synchronize`. If no rank had a gradient, the sum is all
    zeros on every rank. From the first such step on, the ranks tell each other which of them had a
    gradient, along with the gradients; until then that costs nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        micro_batches: int,
    ) -> None:
        import horovod.torch as hvd

        for parameter in module.parameters():
            # Horovod refuses other gradients, and a gradient has the layout of its parameter.
            parameter.data = parameter.data.contiguous()
        distributed = _distribute(module, optimizer, micro_batches, hvd)
        super().__init__(module, distributed)
        self._distributed = distributed
        self._hvd = hvd
        self._traffic = collective.traffic
        self._asks = False
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._held = [p for p in held if p.requires_grad]
        self._gradient_bytes = num_bytes(self._held)

    def reduce(self) -> None:
        present = [p.grad is not None for p in self._held]
        with peer_errors("summing the gradients"):
            asked = self._ask(present) if self._asks else None
            self._distributed.synchronize()
            # Every rank sees the same sums, so all of them begin to ask at once.
            if asked is None and any(_all_zero([p.grad for p in self._held])):
                self._asks = True
                asked = self._ask(present)
            counts = self._hvd.synchronize(asked).tolist() if asked is not None else []
        self._traffic.all_reduce(self._gradient_bytes)
        for parameter, count in zip(self._held, counts, strict=False):
            if not count:
                parameter.grad = None

    def _ask(self, present: list[bool]) -> Any:
        """Begins to count the ranks that had a gradient, parameter by parameter.

        The counts are fp32 and have a fixed name, so that Horovod sends them together with the gradients.
        """
        self._traffic.all_reduce(4 * len(present))
        counts = torch.tensor(present, dtype=torch.float32)
        return self._hvd.allreduce_async_(counts, op=self._hvd.Sum, name="ringspark.had_gradient")

    def step(self, scaler: Scaler) -> None:
        with self._distributed.skip_synchronize():
            scaler.step(self._distributed)


def _all_zero(gradients: list[torch.Tensor | None]) -> list[bool]:
    """Returns, for each gradient, whether all its elements are zero; False for sparse and empty ones."""
    dense = [g for g in gradients if g is not None and not g.is_sparse and g.numel()]
    if not dense:
        return []
    # The first element rules most gradients out: one small copy from the device instead of a pass over all.
    first = torch.stack([g[(0,) * g.dim()].float() for g in dense]).tolist()
    return [not f and not bool(g.any()) for f, g in zip(first, dense, strict=True)]


def _distribute(module: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int, hvd: Any) -> Any:
    """Makes Horovod's form of `optimizer`, and copies everything that its maker put into it.

    Horovod makes a new optimizer of the same class from the groups alone. Anything that the constructor
    keeps elsewhere would fall back to defaults, such as Adagrad's first accumulator in its state.
    """
    try:
        distributed = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=[(n, p) for n, p in module.named_parameters() if p.requires_grad],
            op=hvd.Sum,
            backward_passes_per_step=micro_batches,
        )
    except TypeError as error:
        raise ValueError(
            f"optimizer {type(optimizer).__name__} must be constructible from its parameter groups alone "
            f"under collective 'horovod', got {error}; give its other arguments defaults, or set "
            "collective='torch'"
        ) from error
    # A user's scheduler may have wrapped `step` of the instance; that `step` would bypass Horovod's.
    kept = {key: value for key, value in vars(optimizer).items() if key != "step"}
    vars(distributed).update(kept)
    return distributed
