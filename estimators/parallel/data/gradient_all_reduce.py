"""All-reduces gradients: in one message for a small network, in buckets for a large one.

A bucket is sent when it is complete, while earlier layers still compute (Li et al. 2020, "PyTorch
Distributed"). Every rank sends every bucket once per step, in the same order, whatever rows it has.
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
from ringspark.estimators.parallel.base import GradientSync, MakeOptimizer, SyncSettings, share_weights
from ringspark.estimators.parallel.data.gradient_buckets import (
    BUCKET_BYTES,
    GradientBucket,
    split_into_buckets,
)
from ringspark.estimators.parallel.data.sparse_rows import split_parameters
from ringspark.estimators.parallel.mesh import RankMesh

Ranks = TypeVar("Ranks")

# Largest gradients that travel in one message. From 2 to 250 MiB, `slope --sweep` finds both ways within a
# tenth of each other if the ranks keep the cores of one host busy.
FLAT_BYTES = 32 << 20
# The same between CPUs of several hosts, and the smallest bucket there. Over links of 100 Mbit/s and 1
# Gbit/s, the benchmark `overlap` finds buckets of 1 MiB faster at 5 MB (1.02 to 1.39 times), and no
# difference at 1 MB.
NETWORK_FLAT_BYTES = 2 << 20
_LEAST_BUCKET_BYTES = 1 << 20
# The last bucket is complete when the backward pass ends, so at least 1 / _NUM_BUCKETS is not hidden.
_NUM_BUCKETS = 8


def choose_bucket_bytes(num_bytes: int, *, by_network: bool) -> int | None:
    """Returns the bytes at which a bucket is full; None if all gradients travel in one message."""
    if num_bytes <= (NETWORK_FLAT_BYTES if by_network else FLAT_BYTES):
        return None
    if not by_network:
        return BUCKET_BYTES
    return min(BUCKET_BYTES, max(_LEAST_BUCKET_BYTES, num_bytes // _NUM_BUCKETS))


class GradientAllReduce(GradientSync):
    """All-reduces gradients; a rank without rows in a step adds zeros."""

    takes_sparse = True

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        *,
        over: Callable[[str], Collective] | None = None,
        bucket_bytes: int | Literal["chosen"] | None = "chosen",
        measures_local: bool = False,
        prefix: str = "gradients",
    ) -> None:
        """Registers the parameters that the optimizer holds.

        Args:
            prefix: Start of the names of this object's all-reduces.
            over: Returns the collective of a parameter, by its name; None uses `collective` for all.
            bucket_bytes: Bytes of a full bucket; None for one message; 'chosen' calls `choose_bucket_bytes`.
        """
        super().__init__(module, optimizer)
        self._collective = collective
        self._measures_local = measures_local
        self._prefix = prefix
        self._squares: list[torch.Tensor] = []  # of this rank's buckets, before the all-reduce
        self._hooks: list[RemovableHandle] = []
        self._in_flight: list[Callable[[], None]] = []  # all-reduces, in the order of the buckets
        # True only in a step's last backward pass, so that a callback's backward pass sends nothing.
        self._reacts = False
        self._always = nullcontext()
        self._ranks_of, self._bucket_bytes = over or (lambda _: collective), bucket_bytes
        self.regroup()
        # An error keeps this object alive, and an all-reduce in flight would keep the connections open.
        for ranks in {id(ranks): ranks for ranks in (collective, *self._over)}.values():
            ranks.on_leave(self._in_flight.clear)

    @classmethod
    def prepare(
        cls, module: nn.Module, make_optimizer: MakeOptimizer, mesh: RankMesh, settings: SyncSettings
    ) -> GradientSync:
        share_weights(module, mesh)
        return synchronize(
            module, make_optimizer(module), mesh.gradients, measures_local=settings.noise_scale
        )

    def regroup(self) -> bool:
        self.remove_hooks()
        collective, bucket_bytes = self._collective, self._bucket_bytes
        trained, self._rows = split_parameters(self.network, self.optimizer, collective)
        if bucket_bytes == "chosen":
            by_network = all(
                p.device.type == "cpu" and collective.sends_at_once(p.device) for p in trained.values()
            )
            bucket_bytes = choose_bucket_bytes(num_bytes(trained.values()), by_network=by_network)
        dealt = split_by_ranks(trained, bucket_bytes, self._ranks_of)
        self._over = [ranks for ranks, _ in dealt]
        self._buckets = [GradientBucket(own) for _, own in dealt]
        if bucket_bytes is not None:
            for number, bucket in enumerate(self._buckets):
                for index, parameter in enumerate(bucket.parameters):
                    hook = partial(self._on_gradient, number, index)
                    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    self._hooks.append(handle)
        return True

    def remove_hooks(self) -> None:
        """Removes the hooks of the parameters, which keep this object and its buffers alive."""
        while self._hooks:
            self._hooks.pop().remove()

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        self._reacts = last
        return self._always

    def _on_gradient(self, number: int, index: int, _: torch.Tensor) -> None:
        """Marks a gradient as complete; sends the buckets that are now complete, in order."""
        if not self._reacts:
            return
        if number < len(self._in_flight):
            raise ValueError(
                "a parameter got a second gradient after its first was sent; checkpoint the layers with "
                "use_reentrant=False, which gives each parameter one gradient per backward pass"
            )
        awaited = self._buckets[number].awaited
        awaited.discard(index)
        if not awaited:
            self._collective.operations.ready(self._name(number))
        while len(self._in_flight) < len(self._buckets) and not self._buckets[len(self._in_flight)].awaited:
            self._send()

    def _send(self) -> None:
        number = len(self._in_flight)
        bucket = self._buckets[number]
        bucket.take()
        if self._measures_local:
            self._squares.append(bucket.square())
        self._in_flight.append(self._over[number].start_sum(bucket.buffer, self._name(number)))

    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        self._reacts = False
        while len(self._in_flight) < len(self._buckets):
            self._send()
        for bucket, wait in zip(self._buckets, self._in_flight, strict=True):
            wait()
            bucket.give()
            bucket.await_all()
        self._in_flight.clear()
        if self._measures_local:
            self._squares += self._rows.squares()
        self._rows.sum()
        if self._measures_local:
            self.local_square = torch.stack(self._squares).sum()
            self._squares.clear()

    def _name(self, number: int) -> str:
        return f"{self._prefix}.{number}"


def synchronize(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    collective: Collective,
    *,
    measures_local: bool = False,
    prefix: str = "gradients",
) -> GradientSync:
    if collective.size == 1:
        return GradientSync(module, optimizer)
    return GradientAllReduce(module, optimizer, collective, measures_local=measures_local, prefix=prefix)


def split_by_ranks(
    named: Mapping[str, nn.Parameter], num_bytes: int | None, over: Callable[[str], Ranks]
) -> list[tuple[Ranks, dict[str, nn.Parameter]]]:
    """Splits parameters into buckets, in the order in which they are sent.

    All parameters of a bucket are synchronized by the same ranks.
    """
    groups: dict[int, tuple[Ranks, dict[str, nn.Parameter]]] = {}
    for name, parameter in named.items():
        ranks = over(name)
        groups.setdefault(id(ranks), (ranks, {}))[1][name] = parameter
    dealt = [(ranks, own) for ranks, group in groups.values() for own in split_into_buckets(group, num_bytes)]
    if len(groups) > 1:
        # A bucket is complete when its layer nearest to the input is.
        order = {name: number for number, name in enumerate(named)}
        dealt.sort(key=lambda bucket: -min(order[name] for name in bucket[1]))
    return dealt
