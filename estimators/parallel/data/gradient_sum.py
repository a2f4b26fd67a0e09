"""Sums gradients over the ranks: in one exchange for a small network, in the backward pass for a large one.

A small network pays for the number of exchanges, not for their bytes, so all its gradients travel in one
buffer after the step's last backward pass. The gradients of a large one travel in buckets, each as soon as
it is complete, while the layers before it still compute (Li et al. 2020, "PyTorch Distributed"); between
ranks that share memory, after the pass, because there it is the same cores that would send. So over a
network it takes far fewer bytes to be a large network.

Invariant: every rank sends every bucket once a step, in the same order, whatever rows it has and whichever
parameters they use. A bucket that is not complete in the backward pass leaves after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.parallel.base import PlainSync
from ringspark.estimators.parallel.data.gradient_buckets import BUCKET_BYTES, GradientBucket, deal
from ringspark.estimators.parallel.data.sparse_rows import SparseRows, sparse_parameters

Ranks = TypeVar("Ranks")

# Gradients of at most so many bytes travel in one exchange. From 2 to 250 MiB, `slope --sweep` finds both
# ways within a tenth of each other where the ranks keep the cores of one host busy.
FLAT_BYTES = 32 << 20
# The same between processors of several hosts, and the least bytes of a bucket there. Over links of 100
# Mbit/s and 1 Gbit/s, the benchmark `overlap` finds buckets of 1 MiB faster at 5 MB (1.02 to 1.39 times), and
# nothing beyond its noise at 1 MB.
NETWORK_FLAT_BYTES = 2 << 20
_LEAST_BUCKET_BYTES = 1 << 20
# The last bucket is complete when the backward pass ends, so of k equal ones a k-th is not hidden at best.
_NUM_BUCKETS = 8


def bucket_bytes_of(num_bytes: int, *, by_network: bool) -> int | None:
    """Returns at how many bytes a bucket is full; None if all gradients travel in one exchange.

    Args:
        num_bytes: Bytes of all gradients.
        by_network: Whether they are on processors that send while they compute.
    """
    if num_bytes <= (NETWORK_FLAT_BYTES if by_network else FLAT_BYTES):
        return None
    if not by_network:
        return BUCKET_BYTES
    return min(BUCKET_BYTES, max(_LEAST_BUCKET_BYTES, num_bytes // _NUM_BUCKETS))


class SummedGradients(PlainSync):
    """Gradients summed by the collective; a rank without rows in a step adds zeros."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        *,
        over: Callable[[str], Collective] | None = None,
        bucket_bytes: int | Literal["chosen"] | None = "chosen",
        measures_local: bool = False,
    ) -> None:
        """Ties the gradients of the parameters that the optimizer holds.

        Args:
            over: Returns the collective over which the gradient of the parameter called so is summed; None:
                `collective` for all.
            bucket_bytes: Bytes at which a bucket is full; None for one exchange after the backward pass;
                "chosen" for what `bucket_bytes_of` says.
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
        if bucket_bytes == "chosen":
            by_network = all(
                p.device.type == "cpu" and collective.sends_at_once(p.device) for p in trained.values()
            )
            bucket_bytes = bucket_bytes_of(num_bytes(trained.values()), by_network=by_network)
        dealt = deal_by_ranks(trained, bucket_bytes, over or (lambda _: collective))
        self._over = [ranks for ranks, _ in dealt]
        self._buckets = [GradientBucket(own) for _, own in dealt]
        self._sums: list[Callable[[], None]] = []  # that the ranks exchange now, in the order of the buckets
        # An error keeps this object alive, and an exchange under way would keep the connections open.
        for ranks in {id(ranks): ranks for ranks in (collective, *self._over)}.values():
            ranks.on_leave(self._sums.clear)
        self._reacts = False  # to gradients: only in a step's last backward pass, not in a callback's own
        self._always = nullcontext()
        self._hooks: list[RemovableHandle] = []
        if bucket_bytes is not None:
            for number, bucket in enumerate(self._buckets):
                for index, parameter in enumerate(bucket.parameters):
                    hook = partial(self._on_gradient, number, index)
                    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    self._hooks.append(handle)

    def remove_hooks(self) -> None:
        """Removes the hooks of the parameters, which keep this object and its buffers alive."""
        for hook in self._hooks:
            hook.remove()

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
        awaited = self._buckets[number].awaited
        awaited.discard(index)
        if not awaited:
            self._collective.operations.ready(_name(number))
        while len(self._sums) < len(self._buckets) and not self._buckets[len(self._sums)].awaited:
            self._send()

    def _send(self) -> None:
        """Begins the exchange of the next bucket."""
        number = len(self._sums)
        bucket = self._buckets[number]
        bucket.take()
        if self._measures_local:
            self._squares.append(bucket.square())
        self._sums.append(self._over[number].start_sum(bucket.buffer, _name(number)))

    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        self._reacts = False
        while len(self._sums) < len(self._buckets):
            self._send()
        for bucket, wait in zip(self._buckets, self._sums, strict=True):
            wait()
            bucket.give()
            bucket.await_all()
        self._sums.clear()
        if self._measures_local:
            self._squares += self._rows.squares()
        self._rows.sum()
        if self._measures_local:
            self.local_square = torch.stack(self._squares).sum()
            self._squares.clear()


def _name(number: int) -> str:
    """Returns the name of a bucket's sum."""
    return f"gradients.{number}"


def deal_by_ranks(
    named: Mapping[str, nn.Parameter], num_bytes: int | None, over: Callable[[str], Ranks]
) -> list[tuple[Ranks, dict[str, nn.Parameter]]]:
    """Deals parameters out to buckets that each travel among the same ranks, in the order of leaving.

    Args:
        num_bytes: Like that of `deal`.
        over: Returns the ranks that sum the gradient of the parameter called so.
    """
    groups: dict[int, tuple[Ranks, dict[str, nn.Parameter]]] = {}
    for name, parameter in named.items():
        ranks = over(name)
        groups.setdefault(id(ranks), (ranks, {}))[1][name] = parameter
    dealt = [(ranks, own) for ranks, group in groups.values() for own in deal(group, num_bytes)]
    if len(groups) > 1:
        # A bucket is complete when its layer nearest to the input is.
        place = {name: number for number, name in enumerate(named)}
        dealt.sort(key=lambda bucket: -min(place[name] for name in bucket[1]))
    return dealt
