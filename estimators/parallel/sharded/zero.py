"""ZeRO stages 1 and 2: each rank keeps the optimizer state, and the gradients, of a part of the network.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". The sum of
all gradients goes to the ranks part by part (reduce-scatter), each rank steps its own part, and all get the
new weights (all-gather). This sends as many bytes as the all-reduce of data parallelism, which is these two
in one.

Stage 1 exchanges when the step's last backward pass is over, so all gradients are in memory until then. In
stage 2 they leave during the backward pass, bucket by bucket, once per micro-batch. So a rank never holds
more than its part and about two buckets, but sends as many times the bytes as there are micro-batches.

Invariant: every rank sends every bucket in the same order, in as many rounds as there may be micro-batches,
whatever rows it has and whichever parameters they use. Weights are equal to the bit after each step,
because one rank computes each element and copies it to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.base import GradientSync, MakeOptimizer, PlainSync, Scaler
from ringspark.estimators.parallel.data.data_parallel import DataParallel
from ringspark.estimators.parallel.exchange import Exchange
from ringspark.estimators.parallel.model.layout import layout_of
from ringspark.estimators.parallel.optimizer_state import OptimizerState
from ringspark.estimators.parallel.sharded.piece_state import gather_state, load_state
from ringspark.estimators.parallel.sharded.pieces import Shard, without_empty_groups


class ShardedOptimizer:
    """ZeRO 1: every rank holds all weights, and the optimizer state of its part."""

    during_backward = False

    def prepare(
        self, module: nn.Module, make_optimizer: MakeOptimizer, collective: Collective, exchange: Exchange
    ) -> GradientSync:
        if collective.size == 1:
            return DataParallel().prepare(module, make_optimizer, collective, exchange)
        with torch.no_grad():
            collective.broadcast(list(module.state_dict().values()))
        # Made over all parameters, so that groups and settings are the same as without sharding.
        optimizer = make_optimizer(module)
        return ShardedSync(
            module, optimizer, collective, exchange.micro_batches if self.during_backward else None
        )


class ShardedGradients(ShardedOptimizer):
    """ZeRO 2: every rank holds all weights, and the gradients and optimizer state of its part."""

    during_backward = True


class ShardedSync(PlainSync):
    """Sums gradients into parts, steps this rank's part, and shares the weights."""

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        rounds: int | None,
        bucket_bytes: int | None = None,
    ) -> None:
        """Deals the parameters out to the ranks.

        Args:
            rounds: Number of micro-batches per step, each exchanged during its backward pass; None for one
                exchange per step, after the last backward pass.
        """
        super().__init__(network, optimizer)
        self.ranks_differ = True
        options = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
        self._shard = Shard(network, optimizer, collective, **options)
        self._collective = collective
        self._rounds = rounds or 1
        self._during_backward = rounds is not None
        self._parts: list[torch.Tensor | None] = [None] * len(self._shard.buckets)
        self._had = [0.0] * len(self._shard.parameters)
        # The bucket that travels, if one does. An error keeps this object, but must not keep connections.
        self._under_way: list[tuple[int, Callable[[], torch.Tensor]]] = []
        collective.on_leave(self._under_way.clear)
        self._in_step = self._reacts = False
        self._start_round()
        self._round = 0
        if self._during_backward:
            for index, parameter in enumerate(self._shard.parameters):
                hook = partial(self._on_gradient, index)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _start_round(self) -> None:
        self._next = 0  # index of the next bucket to send
        self._ready: set[int] = set()

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Notes that a gradient is complete; sends the buckets that are now complete, in order."""
        if not self._reacts:
            return
        self._ready.add(index)
        buckets = self._shard.buckets
        while self._next < len(buckets) and all(s.index in self._ready for s in buckets[self._next].slots):
            self._send()

    def _send(self) -> None:
        """Begins the exchange of the next bucket, and ends that of the one before it."""
        bucket, self._next = self._next, self._next + 1
        with torch.no_grad():
            gradients, present = self._shard.flat_gradients(bucket)
        for index in present:
            self._had[index] = 1.0
        started = self._collective.start_reduce_scatter(gradients, self._shard.buckets[bucket].counts)
        self._receive()
        self._under_way.append((bucket, started))

    def _receive(self) -> None:
        if not self._under_way:
            return
        bucket, wait = self._under_way.pop()
        part, known = wait(), self._parts[bucket]
        self._parts[bucket] = part if known is None else known.add_(part)

    def _end_round(self) -> None:
        """Exchanges the remaining buckets of this backward pass; a missing gradient counts as zeros."""
        while self._next < len(self._shard.buckets):
            self._send()
        self._receive()
        self._start_round()
        self._round += 1

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        self._begin_step()
        return self._own_round() if self._during_backward else nullcontext()

    @contextmanager
    def _own_round(self) -> Iterator[None]:
        self._reacts = True
        yield
        self._reacts = False
        self._end_round()

    def _begin_step(self) -> None:
        """Drops what a callback's own backward pass left; the optimizer holds parts and zeroes only those."""
        if not self._in_step:
            self._in_step = True
            for parameter in self._shard.parameters:
                parameter.grad = None

    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        self._begin_step()
        # A rank with fewer rows had fewer micro-batches, or none.
        while self._round < self._rounds:
            self._end_round()
        *had, late = self._ask()
        if late:
            # A gradient came again after its bucket had left, as with a reentrant checkpoint.
            self._end_round()
            *had, _ = self._ask()
        for bucket, part in enumerate(self._parts):
            assert part is not None
            self._shard.set_gradients(bucket, part, had)
        self._parts = [None] * len(self._parts)
        self._had = [0.0] * len(self._had)
        self._round = 0
        self._in_step = False

    def _ask(self) -> list[float]:
        """Returns how many ranks had a gradient, by parameter; then how many ranks have gradients left."""
        late = any(p.grad is not None for p in self._shard.parameters)
        device = self._shard.parameters[0].device
        mine = torch.tensor([*self._had, float(late)], device=device)
        return self._collective.all_reduce(mine).tolist()

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> None:
        layout, names = layout_of(self.network), self._shard.names
        # Where ranks have parts of the network, each element counts once over all of them.
        counted = [
            tensor.grad
            for piece, tensor in self._shard.held.items()
            if tensor.grad is not None and (layout is None or layout.counts(names[piece.index], ["tensor"]))
        ]
        norms = [torch.linalg.vector_norm(g).double() for g in counted]
        device = self._shard.parameters[0].device
        square = sum(
            (n.square().to(device) for n in norms), torch.zeros((), dtype=torch.double, device=device)
        )
        square = self._collective.all_reduce(square.reshape(1))
        if layout is not None:
            # Of those that share the pieces, and know one sum by now, one tells it to the other parts.
            places = layout.mesh.places
            tells = places["expert"] == places["sequence"] == 0
            square = layout.mesh.whole.all_reduce(square if tells else torch.zeros_like(square))
        norm = square[0].sqrt()
        # The same formula as in nn.utils.clip_grad_norm_.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in self._held_gradients():
            gradient.mul_(factor.to(gradient.device, gradient.dtype))

    def _held_gradients(self) -> list[torch.Tensor]:
        return [t.grad for t in self._shard.held.values() if t.grad is not None]

    def step(self, scaler: Scaler) -> None:
        with without_empty_groups(self.optimizer):
            scaler.step(self.optimizer)
        for bucket in range(len(self._shard.buckets)):
            self._shard.share(bucket)

    def optimizer_state(self) -> OptimizerState:
        return gather_state(self._shard, self.optimizer, self._collective)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        load_state(self._shard, self.optimizer, state)
