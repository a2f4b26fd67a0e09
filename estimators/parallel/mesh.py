"""The roles of the ranks: asked wherever a training deals with rows, random numbers or files.

A rank's number in the gang is for transport alone. Its place in the mesh decides which rows it reads, what it
draws, over which ranks sums of rows go, and which rank writes files. The mesh has one axis for each way to
spread a training; a rank is at one place of each:

- `data`: every rank has the whole network, or the same part of it, and reads different rows;
- `shard`: like `data`, and what `sharding` names is cut over these ranks alone: those along `data` have the
  same parts (hybrid sharding). Without this axis it is cut over all ranks whose gradients add up;
- `expert`: like `data`, and each rank has other experts of a mixture-of-experts layer, for the rows of all;
- `pipeline`: each rank has some of the blocks; the rows pass from one to the next;
- `sequence`: each rank has a part of every row, and the whole network;
- `tensor`: each rank has a part of every matrix, and all rows of the others.

Ranks that differ in `pipeline`, `sequence` or `tensor` alone read the same rows: they are one copy of the
network, and know the same losses.

Invariant: ranks are numbered along `AXES`, the last axis fastest, so that ranks that talk most are
neighbours, which are on one host. The first rank is in the last stage of the pipeline, where the losses are
known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective

# From the outermost to the innermost.
AXES = ("pipeline", "data", "shard", "expert", "sequence", "tensor")
# Along these, ranks read different rows.
ROWS = ("data", "shard", "expert")
# Along these, ranks hold parts of one network for the same rows.
MODEL = ("pipeline", "sequence", "tensor")
# Along these, ranks hold other weights.
_PARTS = ("pipeline", "expert", "tensor")


@dataclass(frozen=True)
class Sharers:
    """The ranks that sum the gradients of one parameter, as a sharding sees them.

    Attributes:
        all: All of them.
        parts: Those over which state is cut: each has another part.
        copies: Those that have the same part as this rank.
    """

    all: Collective = field(default_factory=LocalCollective)
    parts: Collective = field(default_factory=LocalCollective)
    copies: Collective = field(default_factory=LocalCollective)


@dataclass(frozen=True, kw_only=True)
class RankMesh:
    """One rank's place among all.

    Attributes:
        world: Collective of all ranks, for what all must do alike: stop, skip a step, load a checkpoint.
        data: Collective of the ranks that read different rows of one global batch, including this one.
            Losses and metrics are summed over it.
        sizes: Number of places on each axis; the product is the number of ranks.
        places: This rank's place on each axis.
        axes: Collective of the ranks that differ from this one on that axis alone.
        copy: Collective of the ranks that are one copy of the network together.
        gradients: Collective of the ranks whose gradients of this rank's parameters add up; those of
            experts add up over `expert_gradients`.
        expert_gradients: The same ranks without those that have other experts.
        sharers: How a sharding cuts the state of this rank's parameters; that of experts: `expert_sharers`.
        whole: Collective of the ranks that have all weights together: a copy, and those with other experts.
        holds_first: Whether this rank is among those whose weights a checkpoint takes: of the first copy.
    """

    world: Collective
    data: Collective
    sizes: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    axes: Mapping[str, Collective] = field(default_factory=dict)
    copy: Collective = field(default_factory=LocalCollective)
    gradients: Collective
    expert_gradients: Collective
    sharers: Sharers = field(default_factory=Sharers)
    expert_sharers: Sharers = field(default_factory=Sharers)
    whole: Collective = field(default_factory=LocalCollective)
    holds_first: bool = True

    @classmethod
    def of(cls, world: Collective, sizes: Mapping[str, int] | None = None) -> RankMesh:
        """Makes the mesh; without sizes, or with those of rows alone, all ranks read different rows.

        Runs on every rank.

        Args:
            sizes: Number of places on each axis; an axis that is not named has one.

        Raises:
            ValueError: The sizes do not make up the gang, or the collective has no parts.
        """
        full = {axis: (sizes or {}).get(axis, 1) for axis in AXES}
        if sizes is None:
            full["data"] = world.size
        if math.prod(full.values()) != world.size:
            raise ValueError(f"parallelism has {math.prod(full.values())} places for {world.size} workers")
        here = _places(full)[world.rank]
        if all(full[axis] == 1 for axis in AXES if axis != "data"):
            alone = {axis: LocalCollective() if axis != "data" else world for axis in AXES}
            return cls(
                world=world,
                data=world,
                sizes=full,
                places=here,
                axes=alone,
                gradients=world,
                expert_gradients=world,
                sharers=Sharers(world, world, LocalCollective()),
                expert_sharers=Sharers(world, world, LocalCollective()),
            )
        if not hasattr(world, "part"):
            raise ValueError(
                f"parallelism needs collective 'torch', got {world.name!r}; set collective='torch', or give "
                "all workers to 'data'"
            )
        made = _Maker(world, full)
        parts = ("pipeline", "expert", "sequence", "tensor")
        return cls(
            world=world,
            data=made.over(ROWS),
            sizes=full,
            places=here,
            axes={axis: made.over((axis,)) for axis in AXES},
            copy=made.over(MODEL),
            gradients=made.over((*ROWS, "sequence")),
            expert_gradients=made.over(("data", "shard", "sequence")),
            sharers=made.sharers((*ROWS, "sequence")),
            expert_sharers=made.sharers(("data", "shard", "sequence")),
            whole=made.over(parts),
            holds_first=all(here[axis] == 0 for axis in AXES if axis not in parts),
        )

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of every global batch, from 0 to `data_size - 1`."""
        return self.data.rank

    @property
    def data_size(self) -> int:
        """Number of shares into which a global batch is dealt."""
        return self.data.size

    @property
    def writes(self) -> bool:
        """Whether this rank writes the run's files and decides by its clock; exactly one rank does."""
        return self.world.rank == 0

    @property
    def num_parts(self) -> int:
        """Number of ranks that write a checkpoint, each its part of the network."""
        return math.prod(self.sizes.get(axis, 1) for axis in _PARTS)

    @property
    def part(self) -> int | None:
        """Number of the part of a checkpoint that this rank writes; None for a rank that writes none."""
        if self.num_parts == 1:
            return 0 if self.writes else None
        return self.part_of(self.whole.rank) if self.holds_first and not self.places["sequence"] else None

    def part_of(self, rank: int) -> int:
        """Returns the part that a rank of `whole` writes, whose place on 'sequence' is the first."""
        inner = self.sizes.get("tensor", 1)
        return rank // (inner * self.sizes.get("sequence", 1)) * inner + rank % inner

    @property
    def cuts_network(self) -> bool:
        """Whether a rank has less than the whole network, or less than whole rows."""
        return any(self.sizes.get(axis, 1) > 1 for axis in (*MODEL, "expert"))

    @property
    def stage(self) -> int:
        """This rank's stage of the pipeline: 0 gets the rows, and the last one has the losses."""
        return self.sizes.get("pipeline", 1) - 1 - self.places.get("pipeline", 0)

    @property
    def drawing_rank(self) -> int:
        """Number by which a rank draws: other rows, other tokens and other blocks draw other numbers.

        Ranks along 'tensor' draw alike, for what they drop must be the same where all have it.
        """
        num_stages = self.sizes.get("pipeline", 1)
        part = num_stages - 1 - self.stage + num_stages * self.places.get("sequence", 0)
        return self.data_rank + self.data_size * part

    @property
    def has_losses(self) -> bool:
        """Whether this rank sees what the network returns."""
        return self.places.get("pipeline", 0) == 0


def _places(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Returns each rank's place on each axis, in rank order."""
    return [dict(zip(AXES, places, strict=True)) for places in product(*(range(sizes[a]) for a in AXES))]


def groups_over(sizes: Mapping[str, int], axes: Sequence[str]) -> list[list[int]]:
    """Returns the groups of ranks that differ on these axes alone; every rank is in one of them."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, places in enumerate(_places(sizes)):
        groups.setdefault(tuple(places[axis] for axis in AXES if axis not in axes), []).append(rank)
    return list(groups.values())


def share_of(sizes: Mapping[str, int], rank: int) -> tuple[int, int]:
    """Returns which share of a global batch a rank reads, and how many there are; makes no groups."""
    places = _places(sizes)[rank]
    index, number = 0, 1
    for axis in ROWS:
        index, number = index * sizes[axis] + places[axis], number * sizes[axis]
    return index, number


class _Maker:
    """Makes each group of ranks once, whatever roles it has."""

    def __init__(self, world: Collective, sizes: Mapping[str, int]) -> None:
        self._world = world
        self._sizes = sizes
        self._made: dict[str, Collective] = {}

    def sharers(self, axes: Sequence[str]) -> Sharers:
        """Returns the sharers of parameters whose gradients are summed over these axes."""
        if self._sizes["shard"] == 1:
            return Sharers(self.over(axes), self.over(axes), LocalCollective())
        others = [axis for axis in axes if axis != "shard"]
        return Sharers(self.over(axes), self.over(("shard",)), self.over(others))

    def over(self, axes: Sequence[str]) -> Collective:
        groups = groups_over(self._sizes, axes)
        if len(groups) == 1:
            return self._world
        if all(len(group) == 1 for group in groups):
            return LocalCollective()
        key = str(groups)
        if key not in self._made:
            part = self._world.part(groups)  # type: ignore[attr-defined]
            assert part is not None  # the groups hold every rank
            self._made[key] = part
        return self._made[key]
