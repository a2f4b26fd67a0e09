"""ZeRO stages 1 and 2: each rank keeps the optimizer state, and the gradients, of a part of the network.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". The sum of
all gradients goes to the ranks part by part (reduce-scatter), each rank steps its own part, and all get the
new weights (all-gather). This sends as many bytes as the all-reduce of data parallelism, which is these two
in one.

Stage 1 exchanges when the step's last backward pass is over, so all gradients are in memory until then. In
stage 2 they leave during the backward pass, bucket by bucket, once per micro-batch. So a rank never holds
more than its part and about two buckets, but sends as many times the bytes as there are micro-batches.

Over a mesh with an axis `shard` the parts are those of that axis. Ranks along `data` have the same ones, and
sum them once a step (Zhao et al. 2023, "PyTorch FSDP", hybrid sharding).

Invariant: every rank sends every bucket in the same order, in as many rounds as there may be micro-batches,
whatever rows it has and whichever parameters they use. Weights are equal to the bit after each step,
because one rank computes each element and copies it to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.base import GradientSync, MakeOptimizer, PlainSync, Scaler
from ringspark.estimators.parallel.data.data_parallel import DataParallel
from ringspark.estimators.parallel.exchange import Exchange
from ringspark.estimators.parallel.layout import ModelLayout, layout_of
from ringspark.estimators.parallel.mesh import Sharers
from ringspark.estimators.parallel.optimizer_state import OptimizerState, check_known
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
        rounds = exchange.micro_batches if self.during_backward else None
        return ShardedSync(module, optimizer, [whole_gang(collective)], rounds)


class ShardedGradients(ShardedOptimizer):
    """ZeRO 2: every rank holds all weights, and the gradients and optimizer state of its part."""

    during_backward = True


@dataclass(frozen=True)
class Sharing:
    """The ranks that share some of the parameters.

    Attributes:
        sharers: The ranks.
        wants: Whether the parameter called so is among them.
        equal_along: Axes of the mesh along which ranks have the same parameters, or parts of the same ones:
            one of these ranks tells their norm.
    """

    sharers: Sharers
    wants: Callable[[str], bool] = lambda name: True
    equal_along: tuple[str, ...] = ("expert", "sequence")


def whole_gang(collective: Collective) -> Sharing:
    """Returns that all ranks share all parameters, each with another part."""
    return Sharing(Sharers(all=collective, parts=collective))


@dataclass
class _Dealt:
    """Parameters that the same ranks share, and what of their gradients has been exchanged.

    Attributes:
        summed: Sum of the gradients in this rank's range of each bucket, of the rounds so far.
        had: Number of rounds in which this rank had a gradient, by parameter.
    """

    sharing: Sharing
    shard: Shard
    summed: list[torch.Tensor | None] = field(default_factory=list)
    had: list[float] = field(default_factory=list)

    def restart(self) -> None:
        self.summed = [None] * len(self.shard.buckets)
        self.had = [0.0] * len(self.shard.parameters)


class ShardedSync(PlainSync):
    """Sums gradients into parts, steps this rank's part, and shares the weights."""

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        sharings: Sequence[Sharing],
        rounds: int | None,
        bucket_bytes: int | None = None,
        *,
        reacts: bool = True,
    ) -> None:
        """Deals the parameters out to the ranks.

        Args:
            sharings: Who shares which parameters; each parameter is in one of them. The first one's ranks
                are all that meet.
            rounds: Number of micro-batches per step, each exchanged during its backward pass; None for one
                exchange per step, after the last backward pass.
            reacts: Whether buckets leave in the backward pass; if not, after it.
        """
        super().__init__(network, optimizer)
        self.ranks_differ = True
        options = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
        dealt = [
            _Dealt(s, Shard(network, optimizer, s.sharers.parts, wants=s.wants, **options)) for s in sharings
        ]
        self._dealt = [own for own in dealt if own.shard.parameters]
        self._collective = sharings[0].sharers.all
        self._device = next(network.parameters()).device
        # All buckets in the order in which they leave.
        self._order = [(own, bucket) for own in self._dealt for bucket in range(len(own.shard.buckets))]
        for own in self._dealt:
            own.restart()
        self._rounds = rounds or 1
        self._during_backward = rounds is not None
        # The bucket that travels, if one does. An error keeps this object, but must not keep connections.
        self._under_way: list[tuple[_Dealt, int, Callable[[], torch.Tensor]]] = []
        for ranks in {id(own.shard.collective): own.shard.collective for own in self._dealt}.values():
            ranks.on_leave(self._under_way.clear)
        self._in_step = self._reacts = False
        self._start_round()
        self._round = 0
        if self._during_backward and reacts:
            for own in self._dealt:
                for index, parameter in enumerate(own.shard.parameters):
                    hook = partial(self._on_gradient, own, index)
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _start_round(self) -> None:
        self._next = 0  # number of the next bucket to send
        self._ready: set[tuple[int, int]] = set()

    def _on_gradient(self, own: _Dealt, index: int, parameter: torch.Tensor) -> None:
        """Notes that a gradient is complete; sends the buckets that are now complete, in order."""
        if not self._reacts:
            return
        self._ready.add((id(own), index))
        while self._next < len(self._order) and self._is_complete(*self._order[self._next]):
            self._send()

    def _is_complete(self, own: _Dealt, bucket: int) -> bool:
        return all((id(own), slot.index) in self._ready for slot in own.shard.buckets[bucket].slots)

    def _send(self) -> None:
        """Begins the exchange of the next bucket, and ends that of the one before it."""
        own, bucket = self._order[self._next]
        self._next += 1
        with torch.no_grad():
            gradients, present = own.shard.flat_gradients(bucket)
        for index in present:
            own.had[index] = 1.0
        started = own.shard.collective.start_reduce_scatter(gradients, own.shard.buckets[bucket].counts)
        self._receive()
        self._under_way.append((own, bucket, started))

    def _receive(self) -> None:
        if not self._under_way:
            return
        own, bucket, wait = self._under_way.pop()
        part, known = wait(), own.summed[bucket]
        own.summed[bucket] = part if known is None else known.add_(part)

    def _end_round(self) -> None:
        """Exchanges the remaining buckets of this backward pass; a missing gradient counts as zeros."""
        while self._next < len(self._order):
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
            for parameter in self._parameters():
                parameter.grad = None

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for own in self._dealt for parameter in own.shard.parameters]

    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        self._begin_step()
        # A rank with fewer rows had fewer micro-batches, or none.
        while self._round < self._rounds:
            self._end_round()
        had, late = self._ask()
        if late:
            # A gradient came again after its bucket had left, as with a reentrant checkpoint.
            self._end_round()
            had, _ = self._ask()
        for own, counts in zip(self._dealt, had, strict=True):
            copies = own.sharing.sharers.copies
            for bucket, part in enumerate(own.summed):
                assert part is not None
                own.shard.set_gradients(bucket, copies.all_reduce(part) if copies.size > 1 else part, counts)
            own.restart()
        self._round = 0
        self._in_step = False

    def _ask(self) -> tuple[list[list[float]], bool]:
        """Returns how many ranks had a gradient, by parameter, and whether a rank has gradients left."""
        late = any(p.grad is not None for p in self._parameters())
        found, total_late = [], 0.0
        for own in self._dealt:
            mine = torch.tensor([*own.had, float(late)], device=self._device)
            *had, count = own.sharing.sharers.all.all_reduce(mine).tolist()
            found.append(had)
            total_late += count
        # Every sharing's ranks are among the first one's, which all have to know.
        if len(self._dealt) > 1:
            total_late = self._collective.all_reduce(torch.tensor([total_late], device=self._device)).item()
        return found, bool(total_late)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> None:
        layout = layout_of(self.network)
        total = torch.zeros(1, dtype=torch.double, device=self._device)
        for own in self._dealt:
            square = own.shard.collective.all_reduce(self._square(own, layout))
            if layout is not None and any(layout.mesh.places[axis] for axis in own.sharing.equal_along):
                continue  # another rank that knows the same sum tells it to the other parts of the network
            total += square
        if layout is not None:
            total = layout.mesh.whole.all_reduce(total.cpu())  # as whoever shards nothing sums it there
        norm = total[0].sqrt()
        # The same formula as in nn.utils.clip_grad_norm_.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for own in self._dealt:
            for tensor in own.shard.held.values():
                if tensor.grad is not None:
                    tensor.grad.mul_(factor.to(tensor.grad.device, tensor.grad.dtype))

    def _square(self, own: _Dealt, layout: ModelLayout | None) -> torch.Tensor:
        """Returns the squared norm of this rank's pieces, (1,), without those that another rank has too."""
        names, square = own.shard.names, torch.zeros(1, dtype=torch.double, device=self._device)
        for piece, tensor in own.shard.held.items():
            # Where ranks have parts of the network, each element counts once over all of them.
            if tensor.grad is not None and (layout is None or layout.counts(names[piece.index], ["tensor"])):
                square += torch.linalg.vector_norm(tensor.grad).double().square().to(self._device)
        return square

    def step(self, scaler: Scaler) -> None:
        for own in self._dealt:
            own.shard.follow()
        with without_empty_groups(self.optimizer):
            scaler.step(self.optimizer)
        for own, bucket in self._order:
            own.shard.share(bucket)

    def optimizer_state(self) -> OptimizerState:
        found: OptimizerState = {}
        for own in self._dealt:
            # Of those that have the same parts, the first ones gather them.
            if own.sharing.sharers.copies.rank == 0:
                found |= gather_state(own.shard, self.optimizer)
        return {name: found[name] for name in sorted(found)}

    def load_optimizer_state(self, state: OptimizerState) -> None:
        check_known(state, [name for own in self._dealt for name in own.shard.names])
        for own in self._dealt:
            load_state(own.shard, self.optimizer, state)
