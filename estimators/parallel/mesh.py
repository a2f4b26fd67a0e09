"""The mesh of ranks, which decides on each rank's rows, random numbers and files.

A rank has one coordinate on each axis:

- `data`: ranks have equal weights and read different rows;
- `shard`: like `data`, and `sync=Zero(...)` shards its state over these ranks only (hybrid sharding).
  Without this axis, all ranks that all-reduce their gradients share the state;
- `expert`: like `data`, but each rank has different experts and computes them for the rows of all ranks;
- `pipeline`: each rank has some of the blocks, and the rows pass from rank to rank;
- `sequence`: each rank has all weights and a part of every row;
- `tensor`: each rank has a shard of every matrix.

Ranks that differ only in `pipeline`, `sequence` or `tensor` form one replica: they read the same rows.

Invariant: ranks are numbered along `AXES`, the last axis fastest, so the ranks that communicate most are
neighbours on one host. The first rank is in the last stage of the pipeline, which computes the losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.options.mesh import AXES, MODEL_AXES

# Along these axes, ranks read different rows.
ROWS = ("data", "shard", "expert")
# Along these axes, ranks form one replica.
MODEL = ("pipeline", "sequence", "tensor")
# Along these axes, ranks hold different weights.
_WEIGHTS = ("pipeline", "expert", "tensor")


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that all-reduce the gradients of one parameter.

    Attributes:
        shards: Ranks with different shards of the state.
        replicas: Ranks with the same shard as this rank.
    """

    all: Collective = field(default_factory=LocalCollective)
    shards: Collective = field(default_factory=LocalCollective)
    replicas: Collective = field(default_factory=LocalCollective)


@dataclass(frozen=True, kw_only=True)
class RankMesh:
    """One rank's coordinates and the collectives of its groups.

    Attributes:
        world: All ranks, for common decisions such as stopping or skipping a step.
        data: Ranks that read different rows of one global batch; this rank reads shard `data.rank`. Losses
            and metrics are summed over these ranks.
        sizes: Number of ranks along each axis.
        coordinates: This rank's coordinate on each axis.
        axes: For each axis, the ranks that differ from this one on that axis only.
        replica: Ranks of this rank's replica.
        gradients: Ranks that all-reduce the gradients of this rank's parameters, except experts.
        expert_gradients: Ranks that all-reduce the gradients of this rank's experts.
        shard_group: How `sync=Zero(...)` shards this rank's parameters, except experts.
        expert_shard_group: How `sync=Zero(...)` shards this rank's experts.
        holders: Ranks that together hold all weights: a replica, and the ranks with different experts.
        is_first_replica: Whether this rank is among the first `holders`, whose weights a checkpoint takes.
        shards_state: Whether `sync=Zero(...)` shards the state of the training over `shard_group`.
    """

    world: Collective
    data: Collective
    sizes: Mapping[str, int] = field(default_factory=dict)
    coordinates: Mapping[str, int] = field(default_factory=dict)
    axes: Mapping[str, Collective] = field(default_factory=dict)
    replica: Collective = field(default_factory=LocalCollective)
    gradients: Collective
    expert_gradients: Collective
    shard_group: ShardGroup = field(default_factory=ShardGroup)
    expert_shard_group: ShardGroup = field(default_factory=ShardGroup)
    holders: Collective = field(default_factory=LocalCollective)
    is_first_replica: bool = True
    shards_state: bool = False

    @classmethod
    def of(cls, world: Collective, sizes: Mapping[str, int] | None = None) -> RankMesh:
        """Makes the mesh; `sizes` of None means data parallelism. Runs on every rank."""
        full = {axis: (sizes or {}).get(axis, 1) for axis in AXES}
        if sizes is None:
            full["data"] = world.size
        assert math.prod(full.values()) == world.size
        here = _coordinates(full)[world.rank]
        # Axes of size 1 make equal groups, which share a collective.
        made: dict[str, Collective] = {}

        def over(*axes: str) -> Collective:
            groups = group_ranks(full, axes)
            if world.size == 1 and "data" in axes:
                return world
            if str(groups) not in made:
                made[str(groups)] = join_group(world, groups)
            return made[str(groups)]

        def shard_over(*axes: str) -> ShardGroup:
            if full["shard"] == 1:
                return ShardGroup(over(*axes), over(*axes))
            return ShardGroup(over(*axes), over("shard"), over(*(axis for axis in axes if axis != "shard")))

        holders = (*_WEIGHTS, "sequence")
        return cls(
            world=world,
            data=over(*ROWS),
            sizes=full,
            coordinates=here,
            axes={axis: over(axis) for axis in AXES},
            replica=over(*MODEL),
            gradients=over(*ROWS, "sequence"),
            expert_gradients=over("data", "shard", "sequence"),
            shard_group=shard_over(*ROWS, "sequence"),
            expert_shard_group=shard_over("data", "shard", "sequence"),
            holders=over(*holders),
            is_first_replica=all(here[axis] == 0 for axis in AXES if axis not in holders),
        )

    @property
    def writes(self) -> bool:
        """Whether this rank writes the run's files."""
        return self.world.rank == 0

    @property
    def num_checkpoint_parts(self) -> int:
        """Number of ranks that write a checkpoint, each its shard of the network or some tensors (ZeRO)."""
        if self.shards_state and not self.cuts_network:
            return self.shard_group.shards.size
        return math.prod(self.sizes.get(axis, 1) for axis in _WEIGHTS)

    @property
    def checkpoint_part(self) -> int | None:
        """Number of the checkpoint part that this rank writes, or None."""
        if self.num_checkpoint_parts == 1:
            return 0 if self.writes else None
        if not self.cuts_network:
            return None if self.shard_group.replicas.rank else self.shard_group.shards.rank
        is_writer = self.is_first_replica and not self.coordinates["sequence"]
        return self.checkpoint_part_of(self.holders.rank) if is_writer else None

    def checkpoint_part_of(self, rank: int) -> int:
        """Returns the number of the checkpoint part that `rank` writes.

        `rank` is a rank within `holders`, with coordinate 0 on the 'sequence' axis.
        """
        inner = self.sizes.get("tensor", 1)
        return rank // (inner * self.sizes.get("sequence", 1)) * inner + rank % inner

    @property
    def cuts_network(self) -> bool:
        """Whether a rank has less than the whole network, or less than whole rows."""
        return any(self.sizes.get(axis, 1) > 1 for axis in MODEL_AXES)

    @property
    def stage(self) -> int:
        """This rank's stage of the pipeline: stage 0 gets the rows, the last one has the losses."""
        return self.sizes.get("pipeline", 1) - 1 - self.coordinates.get("pipeline", 0)

    @property
    def random_stream(self) -> int:
        """Number of this rank's random stream; ranks with other rows, tokens or blocks have other streams.

        Ranks along 'tensor' share a stream: they hold the same values, so they must drop the same ones.
        """
        num_stages = self.sizes.get("pipeline", 1)
        part = num_stages - 1 - self.stage + num_stages * self.coordinates.get("sequence", 0)
        return self.data.rank + self.data.size * part


def _coordinates(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    return [dict(zip(AXES, place, strict=True)) for place in product(*(range(sizes[a]) for a in AXES))]


def group_ranks(sizes: Mapping[str, int], axes: Sequence[str]) -> list[list[int]]:
    """Returns the groups of ranks that differ on these axes only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, here in enumerate(_coordinates(sizes)):
        groups.setdefault(tuple(here[axis] for axis in AXES if axis not in axes), []).append(rank)
    return list(groups.values())


def join_group(world: Collective, groups: Sequence[Sequence[int]]) -> Collective:
    """Returns the collective of this rank's group; the groups hold every rank. Runs on every rank."""
    if all(len(ranks) == 1 for ranks in groups):
        return LocalCollective()
    if len(groups) == 1:
        return world
    part: Collective = world.part(groups)  # type: ignore[attr-defined]
    return part


def find_data_shard(sizes: Mapping[str, int], rank: int) -> tuple[int, int]:
    """Returns the index of a rank's shard of a global batch, and the number of shards."""
    here = _coordinates(sizes)[rank]
    index, number = 0, 1
    for axis in ROWS:
        index, number = index * sizes[axis] + here[axis], number * sizes[axis]
    return index, number
