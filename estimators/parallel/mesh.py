"""What each rank of a gang is for: asked wherever a training deals with rows, random numbers or files.

A rank's number in the gang is for transport alone. Which rows a rank reads, what it draws, over whom sums of
rows go and who writes files follow from its place in the mesh. The one axis is data: every rank reads rows of
its own. An axis that cuts the network instead adds its collective here, and those who ask stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringspark.estimators.collectives import Collective


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One rank's place among all.

    Attributes:
        world: All ranks. What all must do alike goes over it: stop, skip a step, take up a checkpoint.
        data: The ranks that read different rows of one global batch, this one among them. Gradients, losses
            and metrics are summed over it.
    """

    world: Collective
    data: Collective

    @classmethod
    def of(cls, world: Collective) -> Mesh:
        """The mesh whose ranks all read rows of their own."""
        return cls(world=world, data=world)

    @property
    def data_rank(self) -> int:
        """Which of `data_size` shares of every global batch this rank reads."""
        return self.data.rank

    @property
    def data_size(self) -> int:
        """Into how many shares a global batch is dealt."""
        return self.data.size

    @property
    def writes(self) -> bool:
        """Whether this rank writes the run's files and decides by its clock; one rank of the world does."""
        return self.world.rank == 0
