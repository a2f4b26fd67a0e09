"""ZeRO stages 1 and 2: each rank keeps the optimizer state, and the gradients, of a shard of the network.

Rajbhandari et al. 2020. With an axis `shard` in the mesh, ranks along `data` have the same shards (hybrid
sharding: Zhao et al. 2023, "PyTorch FSDP"). All ranks send the same buckets in the same order; a rank without
gradients sends zeros. One rank updates a shard and sends it to the others, so weights are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from ringspark.estimators.parallel.base import (
    GradientSync,
    MakeOptimizer,
    Scaler,
    SyncSettings,
    share_weights,
)
from ringspark.estimators.parallel.data.gradient_all_reduce import GradientAllReduce
from ringspark.estimators.parallel.layout import ModelLayout, layout_of
from ringspark.estimators.parallel.mesh import RankMesh, ShardGroup
from ringspark.estimators.parallel.optimizer_state import (
    NO_PARAMETER,
    OptimizerState,
    RootOf,
    check_known,
    common_state,
    first_rank,
    load_common,
)
from ringspark.estimators.parallel.sharded.optimizer_shards import gather_state, load_state
from ringspark.estimators.parallel.sharded.parameter_shards import ShardedParameters, hide_empty_groups


@dataclass(frozen=True)
class SyncGroup:
    """Parameters that the same ranks synchronize.

    Attributes:
        wants: (parameter name) -> whether the parameter belongs to the group.
        equal_along: Axes along which ranks hold the same values. Only one rank per axis adds these values to
            the gradient norm.
    """

    shard_group: ShardGroup
    wants: Callable[[str], bool] = lambda name: True
    equal_along: tuple[str, ...] = ("expert", "sequence")


@dataclass
class _GroupState:
    """The parameters of one `SyncGroup`, and their gradients in the present step.

    Attributes:
        summed: For each bucket, the sum of the ranks' gradients in the part that this rank updates.
        had: For each parameter, 1.0 if this rank had a gradient in this step, else 0.0.
    """

    group: SyncGroup
    shard: ShardedParameters
    summed: list[torch.Tensor | None] = field(default_factory=list)
    had: list[float] = field(default_factory=list)

    def restart(self) -> None:
        self.summed = [None] * len(self.shard.buckets)
        self.had = [0.0] * len(self.shard.parameters)


class ZeroSync(GradientSync):
    """ZeRO 1: reduce-scatters gradients, updates this rank's shard, and all-gathers the weights."""

    during_backward = False

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[SyncGroup],
        rounds: int | None,
        bucket_bytes: int | None = None,
        *,
        reacts: bool = True,
    ) -> None:
        """Shards the parameters.

        Args:
            groups: Each parameter is in one group. The first group includes the ranks of all groups.
            rounds: Number of micro-batches per step if gradients are sent for each micro-batch. With None,
                gradients are sent once per step, after the last backward pass.
            bucket_bytes: Size of a bucket; None takes the default.
            reacts: Whether gradients are sent during the backward pass instead of after it.
        """
        self._states: list[_GroupState] = []
        super().__init__(network, optimizer)
        self.ranks_differ = True
        options = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
        for group in groups:
            ranks = group.shard_group.shards
            shard = ShardedParameters(network, optimizer, ranks, wants=group.wants, **options)
            if shard.parameters:
                self._states.append(_GroupState(group, shard))
        self._collective = groups[0].shard_group.all
        self._device = next(network.parameters()).device
        # All buckets in the order in which they are sent.
        self._order = [(own, bucket) for own in self._states for bucket in range(len(own.shard.buckets))]
        for own in self._states:
            own.restart()
        self._rounds = rounds or 1
        self._during_backward = rounds is not None
        # The bucket in flight, if any. An error keeps this object, but must not keep connections.
        self._in_flight: list[tuple[_GroupState, int, Callable[[], torch.Tensor]]] = []
        for ranks in {id(own.shard.collective): own.shard.collective for own in self._states}.values():
            ranks.on_leave(self._in_flight.clear)
        self._in_step = self._reacts = False
        self._start_round()
        self._round = 0
        if self._during_backward and reacts:
            for own in self._states:
                for index, parameter in enumerate(own.shard.parameters):
                    hook = partial(self._on_gradient, own, index)
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @classmethod
    def prepare(
        cls, module: nn.Module, make_optimizer: MakeOptimizer, mesh: RankMesh, settings: SyncSettings
    ) -> GradientSync:
        if mesh.gradients.size == 1:
            return GradientAllReduce.prepare(module, make_optimizer, mesh, settings)
        share_weights(module, mesh)
        # Made of all parameters, so that groups and settings are the same as without sharding.
        return cls.synchronize(module, make_optimizer(module), mesh, settings)

    @classmethod
    def synchronize(
        cls, module: nn.Module, optimizer: torch.optim.Optimizer, mesh: RankMesh, settings: SyncSettings
    ) -> GradientSync:
        return cls(module, optimizer, [SyncGroup(mesh.shard_group)], cls.num_rounds(settings))

    @classmethod
    def num_rounds(cls, settings: SyncSettings) -> int | None:
        """Returns how many times per step gradients are sent; None for once, after the last pass."""
        return settings.micro_batches if cls.during_backward else None

    def held(self) -> set[nn.Parameter]:
        return super().held() | set(self._parameters())

    def _start_round(self) -> None:
        self._next = 0  # number of the next bucket to send
        self._ready: set[tuple[int, int]] = set()

    def _on_gradient(self, own: _GroupState, index: int, parameter: torch.Tensor) -> None:
        """Marks a gradient as complete; sends the buckets that are now complete, in order."""
        if not self._reacts:
            return
        self._ready.add((id(own), index))
        while self._next < len(self._order):
            first, bucket = self._order[self._next]
            if any((id(first), slot.index) not in self._ready for slot in first.shard.buckets[bucket].slots):
                break
            self._send()

    def _send(self) -> None:
        own, bucket = self._order[self._next]
        self._next += 1
        with torch.no_grad():
            gradients, present = own.shard.flat_gradients(bucket)
        for index in present:
            own.had[index] = 1.0
        started = own.shard.collective.start_reduce_scatter(gradients, own.shard.buckets[bucket].counts)
        self._receive()
        self._in_flight.append((own, bucket, started))

    def _receive(self) -> None:
        if not self._in_flight:
            return
        own, bucket, wait = self._in_flight.pop()
        part, known = wait(), own.summed[bucket]
        own.summed[bucket] = part if known is None else known.add_(part)

    def _end_round(self) -> None:
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
        if not self._in_step:
            self._in_step = True
            for parameter in self._parameters():
                parameter.grad = None

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for own in self._states for parameter in own.shard.parameters]

    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        self._begin_step()
        # A rank with fewer rows had fewer micro-batches, or none.
        while self._round < self._rounds:
            self._end_round()
        had, late = self._ask()
        if late:
            # A gradient came again after its bucket was sent, as with a reentrant checkpoint.
            self._end_round()
            had, _ = self._ask()
        for own, counts in zip(self._states, had, strict=True):
            copies = own.group.shard_group.replicas
            for bucket, part in enumerate(own.summed):
                assert part is not None
                own.shard.set_gradients(bucket, copies.all_reduce(part) if copies.size > 1 else part, counts)
            own.restart()
        self._round = 0
        self._in_step = False

    def _ask(self) -> tuple[list[list[float]], bool]:
        """Returns how many ranks had a gradient, per parameter, and whether any rank has unsent gradients."""
        late = any(p.grad is not None for p in self._parameters())
        found, total_late = [], 0.0
        for own in self._states:
            mine = torch.tensor([*own.had, float(late)], device=self._device)
            *had, count = own.group.shard_group.all.all_reduce(mine).tolist()
            found.append(had)
            total_late += count
        # The first group has all ranks, and all of them must know.
        if len(self._states) > 1:
            total_late = self._collective.all_reduce(torch.tensor([total_late], device=self._device)).item()
        return found, bool(total_late)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> None:
        layout = layout_of(self.network)
        total = torch.zeros(1, dtype=torch.double, device=self._device)
        for own in self._states:
            square = own.shard.collective.all_reduce(self._square(own, layout))
            if layout is not None and any(layout.mesh.coordinates[axis] for axis in own.group.equal_along):
                continue  # another rank adds the same sum
            total += square
        if layout is not None:
            total = layout.mesh.holders.all_reduce(total.cpu())  # on the CPU, as without sharding
        norm = total[0].sqrt()
        # The same formula as in nn.utils.clip_grad_norm_.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for own in self._states:
            for tensor in own.shard.held.values():
                if tensor.grad is not None:
                    tensor.grad.mul_(factor.to(tensor.grad.device, tensor.grad.dtype))

    def _square(self, own: _GroupState, layout: ModelLayout | None) -> torch.Tensor:
        names, square = own.shard.names, torch.zeros(1, dtype=torch.double, device=self._device)
        for piece, tensor in own.shard.held.items():
            # Each element counts once over all ranks.
            if tensor.grad is not None and (
                layout is None or layout.is_counted(names[piece.index], ["tensor"])
            ):
                square += torch.linalg.vector_norm(tensor.grad).double().square().to(self._device)
        return square

    def step(self, scaler: Scaler) -> None:
        for own in self._states:
            own.shard.follow_memory()
        with hide_empty_groups(self.optimizer):
            scaler.step(self.optimizer)
        for own, bucket in self._order:
            own.shard.all_gather(bucket)

    def optimizer_state(self, root_of: RootOf = first_rank) -> OptimizerState:
        found: OptimizerState = {}
        for own in self._states:
            # The first replica gathers its state.
            if own.group.shard_group.replicas.rank == 0:
                found |= gather_state(own.shard, self.optimizer, root_of)
        if common := common_state(self.optimizer):
            found[NO_PARAMETER] = common
        return {name: found[name] for name in sorted(found)}

    def load_optimizer_state(self, state: OptimizerState) -> None:
        check_known(state, [NO_PARAMETER, *(name for own in self._states for name in own.shard.names)])
        load_common(self.optimizer, state.get(NO_PARAMETER, {}))
        for own in self._states:
            load_state(own.shard, self.optimizer, state)


class ZeroGradientSync(ZeroSync):
    """ZeRO 2: a rank also keeps only its shard of the gradients."""

    during_backward = True
