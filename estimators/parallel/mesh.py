"""The roles of the ranks: asked wherever a training deals with rows, random numbers or files.

A rank's number in the gang is for transport alone. Its place in the mesh decides which rows it reads, what it
draws, over which ranks sums of rows go, and which rank writes files. The only axis is data: every rank reads
different rows. An axis that cuts the network instead adds its collective here, and the code that asks stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringspark.estimators.collectives import Collective


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One rank's place among all.

    Attributes:
        world: Collective of all ranks, for what all must do alike: stop, skip a step, load a checkpoint.
        data: Collective of the ranks that read different rows of one global batch, including this one.
            Gradients, losses and metrics are summed over it.
    """

    world: Collective
    data: Collective

    @classmethod
    def of(cls, world: Collective) -> Mesh:
        """Makes the mesh in which all ranks read different rows."""
        return cls(world=world, data=world)

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
