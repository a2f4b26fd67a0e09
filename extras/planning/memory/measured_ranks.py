"""Measures the ranks of a training on fake tensors, under several settings and meshes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringspark.estimators.memory.shares import checkpoint_writers, shard_group_size
from ringspark.estimators.options.mesh import MODEL_AXES, Mesh
from ringspark.estimators.training.build import build_empty
from ringspark.estimators.training.checkpoint.shards import deal_parameters
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning.memory.columns import BatchColumn
from ringspark.extras.planning.memory.cut_network import CutNetwork, cut_network
from ringspark.extras.planning.memory.cut_plan import peak_of_steps, steps_of
from ringspark.extras.planning.memory.meter import Peak
from ringspark.extras.planning.memory.rank_step import RankBytes, measure_ranks
from ringspark.extras.planning.memory.sharing import count_checkpoint
from ringspark.extras.planning.memory.step import initialize_lazy_layers
from ringspark.extras.planning.work import Work


@dataclass(frozen=True, kw_only=True)
class FullestRank:
    """The rank that needs most memory.

    Attributes:
        peak: Its peak, with the part "checkpoint".
        copied: Bytes that a checkpoint copies.
    """

    rank: RankBytes
    peak: Peak
    copied: int


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One replica of the network with a mesh: its shards, and a micro-batch and an update of each rank."""

    network: CutNetwork
    ranks: Sequence[RankBytes]

    def find_fullest(self, config: TrainConfig, num_micro: int) -> FullestRank:
        """Returns the rank that needs most in a step of `num_micro` micro-batches.

        Raises ValueError if the pipeline's schedule has no flush.
        """
        whole, found = self.network.whole, []
        for rank, steps in zip(self.ranks, steps_of(config, self.network.owners, num_micro), strict=True):
            copied = rank.parts["parameters"] + rank.parts["optimizer_state"]
            if (writers := checkpoint_writers(config)) > 1:
                sizes = dict(whole.named_parameters(remove_duplicate=False))
                loads = [0] * writers
                for name, part in deal_parameters(whole, writers).items():
                    loads[part] += sizes[name].nbytes
                copied = copied * max(loads) // sum(loads)
            peak = peak_of_steps(rank, steps, config)
            peak = peak.with_parts(checkpoint=count_checkpoint(config, copied))
            found.append(FullestRank(rank=rank, peak=peak, copied=copied))
        return max(found, key=lambda each: each.peak.total)


def on_one_worker(config: TrainConfig) -> TrainConfig:
    """Returns the config for one worker that takes a step in one micro-batch."""
    mesh = Mesh(plan=config.parallelism.plan)
    return replace(config, num_workers=1, parallelism=mesh, gradient_accumulation=1, min_workers=None)


class MeasuredRanks:
    """Measures each combination of settings, mesh and rows once.

    Args:
        config: The settings. Methods also take configs with another mesh or other memory settings.
        inputs, labels: Columns with any number of rows.

    Attributes:
        empty: The network on `meta`.
    """

    def __init__(
        self,
        config: TrainConfig,
        objects: UserObjects,
        inputs: Sequence[BatchColumn],
        labels: Sequence[BatchColumn],
    ) -> None:
        self.config, self.objects, self.inputs, self.labels = config, objects, inputs, labels
        self.num_rows = labels[0].shape[0]
        self.empty = build_empty(config, objects)
        initialize_lazy_layers(self.empty, inputs, objects)
        self._cuts: dict[str, CutNetwork] = {}
        self._ranks: dict[str, list[RankBytes]] = {}
        self._updates: dict[str, list[RankBytes]] = {}

    def measure(self, config: TrainConfig, rows: int) -> Replica:
        """Measures a micro-batch of `rows` rows; `config` has the mesh and the number of micro-batches.

        Raises:
            Exception: Any error that `measure_ranks` raises. ValueError also if the network cannot be sharded
                in this way.
        """
        mesh = config.parallelism
        key = repr(({axis: mesh.size(axis) for axis in MODEL_AXES}, mesh.pipeline))
        if key not in self._cuts:
            self._cuts[key] = cut_network(self.empty, config.axes, mesh, self.inputs)
        network = self._cuts[key]
        # One run measures every type of sharding; from the second on, all micro-batches are alike.
        key = f"{key} {shard_group_size(config)}"
        rounds = min(2, config.gradient_accumulation)
        settings = {**vars(config.without_sharding()), "gradient_accumulation": rounds}
        whole = f"{key} {rows} {settings}"
        if whole not in self._ranks:
            inputs, labels = (
                [replace(c, shape=(self._scale(c.shape[0], rows), *c.shape[1:])) for c in columns]
                for columns in (self.inputs, self.labels)
            )
            known = self._updates.get(key)
            ranks = measure_ranks(config, self.objects, network, inputs, labels, known)
            self._ranks[whole] = self._updates[key] = ranks
        return Replica(network=network, ranks=self._ranks[whole])

    def measure_step(self, config: TrainConfig, num_micro: int) -> Replica:
        """Measures a step of all rows in `num_micro` micro-batches, of which the first may have a row more.

        Raises:
            Exception: As `measure`.
        """
        largest, num_larger = -(-self.num_rows // num_micro), self.num_rows % num_micro
        replica = later = self.measure(config, largest)
        if not num_larger:
            return replica
        # A single larger micro-batch is the first, which finds no gradients. A pipeline runs several at once.
        if num_larger == 1 and config.axes["pipeline"] == 1:
            later = self.measure(config, largest - 1)
        ranks = [
            replace(one, passes=other.passes, step_rows=-(-one.batch * self.num_rows // largest))
            for one, other in zip(replica.ranks, later.ranks, strict=True)
        ]
        return replace(replica, ranks=ranks)

    def work(self, rows: int) -> Work:
        """Returns the work of a step of `rows` rows on one worker."""
        (rank,) = self.measure(on_one_worker(self.config), rows).ranks
        return rank.first[0, True].work + rank.first[0, False].work + rank.update_work

    def _scale(self, length: int, rows: int) -> int:
        # A column of varying length has more values than rows.
        return max(1, -(-length * rows // self.num_rows))
