"""Sums gradients over the ranks: in one exchange for a small network, in the backward pass for a large one.

A small network pays for the number of exchanges, not for their bytes, so all its gradients travel in one
buffer after the step's last backward pass. The gradients of a large one travel in buckets, each as soon as
it is complete, while the layers before it still compute (Li et al. 2020, "PyTorch Distributed"); between
ranks that share memory, after the pass, because there it is the same cores that would send.

Invariant: every rank sends every bucket once a step, in the same order, whatever rows it has and whichever
parameters they use. A bucket that is not complete in the backward pass leaves after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.parallel.base import PlainSync
from ringspark.estimators.parallel.data.gradient_buckets import GradientBucket, deal
from ringspark.estimators.parallel.data.sparse_rows import SparseRows, sparse_parameters
from ringspark.estimators.parallel.sharded.shard_layout import BUCKET_BYTES

# Gradients of at most so many bytes travel in one exchange. From 2 to 250 MiB, `slope --sweep` finds both
# ways within a tenth of each other where the ranks keep the cores of one host busy; over a slower link,
# what takes long to send should overlap with the backward pass.
FLAT_BYTES = 32 << 20


class SummedGradients(PlainSync):
    """Gradients summed by the collective; a rank without rows in a step adds zeros."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        *,
        over: Callable[[str], Collective] | None = None,
        flat_bytes: int = FLAT_BYTES,
        bucket_bytes: int = BUCKET_BYTES,
        measures_local: bool = False,
    ) -> None:
        """Deals the gradients out to buckets.

        Args:
            over: Returns the collective over which the gradient of the parameter called so is summed; None:
                `collective` for all.
            flat_bytes: Gradients of at most so many bytes travel together, after the backward pass.
            bucket_bytes: Size at which a bucket of larger ones is full.
            measures_local: Whether `local_square` is wanted.
        """
        super().__init__(module, optimizer)
        self._collective = collective
        self._measures_local = measures_local
        self._squares: list[torch.Tensor] = []  # of this rank's buckets, before the ranks sum them
        held = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        trained = {name: p for name, p in module.named_parameters() if p in held}
        tables = sparse_parameters(module)
        self._rows = SparseRows({n: p for n, p in tables.items() if n in trained}, optimizer, collective)
        trained = {name: p for name, p in trained.items() if name not in tables}
        # Rows that travel by themselves have no place in the sums of squares.
        self._measures_local = self._measures_local and not tables
        is_flat = num_bytes(trained.values()) <= flat_bytes
        dealt = [
            (ranks, own)
            for ranks, named in _by_collective(trained, collective, over)
            for own in deal(named, None if is_flat else bucket_bytes)
        ]
        if over is not None:
            # A bucket is complete when its layer nearest to the input is.
            place = {name: number for number, name in enumerate(trained)}
            dealt.sort(key=lambda bucket: -min(place[name] for name in bucket[1]))
        self._over = [ranks for ranks, _ in dealt]
        self._buckets = [GradientBucket(own) for _, own in dealt]
        self._sums: list[Callable[[], None]] = []  # that the ranks exchange now, in the order of the buckets
        # An error keeps this object alive, and an exchange under way would keep the connections open.
        for ranks in {id(ranks): ranks for ranks in (collective, *self._over)}.values():
            ranks.on_leave(self._sums.clear)
        self._reacts = False  # to gradients: only in a step's last backward pass, not in a callback's own
        self._always = nullcontext()
        if not is_flat:
            for number, bucket in enumerate(self._buckets):
                for index, parameter in enumerate(bucket.parameters):
                    hook = partial(self._on_gradient, number, index)
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        self._reacts = last
        return self._always

    def _on_gradient(self, number: int, index: int, _: torch.Tensor) -> None:
        """Notes that a gradient is complete; sends the buckets that are now complete, in order."""
        if not self._reacts:
            return
        if number < len(self._sums):
            raise ValueError(
                "a gradient came again after it was exchanged; checkpoint the model's layers with "
                "use_reentrant=False, which gives each parameter one gradient per backward pass"
            )
        self._buckets[number].awaited.discard(index)
        while len(self._sums) < len(self._buckets) and not self._buckets[len(self._sums)].awaited:
            self._send()

    def _send(self) -> None:
        """Begins the exchange of the next bucket."""
        number = len(self._sums)
        bucket = self._buckets[number]
        bucket.take()
        if self._measures_local:
            self._squares.append(bucket.square())
        self._sums.append(self._over[number].start_sum(bucket.buffer, f"gradients.{number}"))

    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        self._reacts = False
        while len(self._sums) < len(self._buckets):
            self._send()
        for bucket, wait in zip(self._buckets, self._sums, strict=True):
            wait()
            bucket.give()
            bucket.await_all()
        self._sums.clear()
        self._rows.sum()
        if self._measures_local:
            self.local_square = torch.stack(self._squares).sum()
            self._squares.clear()


def _by_collective(
    named: Mapping[str, nn.Parameter], collective: Collective, over: Callable[[str], Collective] | None
) -> list[tuple[Collective, dict[str, nn.Parameter]]]:
    """Returns the parameters of each collective, in their order."""
    found: dict[int, tuple[Collective, dict[str, nn.Parameter]]] = {}
    for name, parameter in named.items():
        ranks = collective if over is None else over(name)
        found.setdefault(id(ranks), (ranks, {}))[1][name] = parameter
    return list(found.values())
