"""Measures the ranks of a training on fake tensors, under several settings and meshes.

The memory of a step is added up from the passes that a rank runs, in the order of its schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringspark.estimators.memory.shares import checkpoint_writers, shard_group_size
from ringspark.estimators.options.mesh import MODEL_AXES, Mesh
from ringspark.estimators.training.build import build_empty
from ringspark.estimators.training.checkpoint.shards import deal_parameters
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.model_parallel.pipeline.actions import Arrival, PassType, Steps, with_arrivals
from ringspark.extras.model_parallel.pipeline.orders import Orders, naive
from ringspark.extras.model_parallel.pipeline.schedules import schedule_of
from ringspark.extras.model_parallel.pipeline.transfers import SENDS_IN_FLIGHT
from ringspark.extras.planning.memory.columns import BatchColumn
from ringspark.extras.planning.memory.cut_network import CutNetwork, cut_network
from ringspark.extras.planning.memory.meter import Peak
from ringspark.extras.planning.memory.rank_step import RankBytes, measure_ranks
from ringspark.extras.planning.memory.sharing import (
    communication_bytes,
    reduces_during_backward,
    reduces_in_buckets,
)
from ringspark.extras.planning.memory.step import LEAVING, initialize_lazy_layers
from ringspark.extras.planning.work import Work


def steps_of(config: TrainConfig, owners: Sequence[int], num_micro: int) -> list[Steps]:
    """Returns each rank's actions in a step and the arrivals of values from other ranks."""
    orders = orders_of(config, num_micro)
    return [list(orders[0])] if len(owners) == 1 else with_arrivals(orders, owners)


def orders_of(config: TrainConfig, num_micro: int) -> Orders:
    """Returns each rank's actions in a step of a pipeline.

    Raises:
        ValueError: The schedule has no flush, so one step overlaps with the next.
    """
    num_ranks, way = config.axes["pipeline"], config.parallelism.pipeline
    if num_ranks == 1:
        return naive(1, 1, num_micro)
    schedule = schedule_of(way.schedule, way.virtual)
    if schedule.order is None:
        raise ValueError(
            f"the memory of pipeline schedule {way.schedule!r}, whose steps overlap, cannot be planned; plan "
            "it as '1f1b', and add a copy of the stage's weights for each step of delay"
        )
    return schedule.orders_by_rank(num_ranks, way.virtual, num_micro)


def peak_of_steps(rank: RankBytes, steps: Steps, config: TrainConfig) -> Peak:
    """Returns the peak memory of a rank's step; `config.parallelism` has all axes of the mesh.

    At any moment a rank holds the tensors that forward passes saved for later backward passes, received
    values, gradients that are not sent yet, and the temporary tensors of the running pass.
    """
    sharding = config.sync.sharding
    peaks_of = LEAVING if reduces_during_backward(config) else sharding
    # All rows of the step stay in memory until its end.
    rows = rank.step_rows or rank.batch * len({step.micro for step in steps})
    held, ended, on_their_way, sent, most = 0, 0, 0, 0, 0
    highest = Peak(parts={})
    begun: set[int] = set()
    for step in steps:
        if isinstance(step, Arrival):
            on_their_way += rank.arriving[step.stage] if step.is_forward else rank.returning[step.stage]
            continue
        kind, stage, _ = step
        found = rank.passes if stage in begun else rank.first
        one, forward_kept = found[stage, kind is PassType.FORWARD], found[stage, True].kept
        if kind in (PassType.BACKWARD, PassType.WEIGHT):
            held -= forward_kept
        # The measured pass includes its received values.
        if kind is not PassType.WEIGHT:
            on_their_way -= rank.arriving[stage] if kind is PassType.FORWARD else rank.returning[stage]
        extra = held + ended + on_their_way + min(sent, SENDS_IN_FLIGHT) * rank.arriving[stage]
        peak = one.peaks[peaks_of]
        most = max(most, peak.most_activations + extra)
        peak = peak.with_parts(activations=peak.parts["activations"] + extra, batch=rows)
        highest = max(highest, peak, key=lambda found: found.total)
        if kind is PassType.FORWARD:
            held += forward_kept
        if kind in (PassType.BACKWARD, PassType.INPUT):
            sent += rank.arriving[stage] > 0
        if kind in (PassType.BACKWARD, PassType.WEIGHT):
            ended += forward_kept + one.kept
            begun.add(stage)
    update = rank.update[sharding]
    in_passes = highest.with_parts(optimizer_state=update.parts.get("optimizer_state", 0))
    update = update.with_parts(batch=rows)
    if reduces_in_buckets(config):
        update = update.with_parts(gradients=0)
    peak = max(in_passes, update, key=lambda found: found.total)
    peak = replace(peak, most_activations=max(most, update.most_activations))
    return peak.with_parts(communication=communication_bytes(config, rank.module))


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
        """Returns the rank that needs most in a step of `num_micro` micro-batches."""
        whole, found = self.network.whole, []
        for rank, steps in zip(self.ranks, steps_of(config, self.network.owners, num_micro), strict=True):
            copied = rank.parts["parameters"] + rank.parts["optimizer_state"]
            if (writers := checkpoint_writers(config)) > 1:
                sizes = dict(whole.named_parameters(remove_duplicate=False))
                loads = [0] * writers
                for name, part in deal_parameters(whole, writers).items():
                    loads[part] += sizes[name].nbytes
                copied = copied * max(loads) // sum(loads)
            # With a GPU the copy is in the memory of the host.
            checkpoint = copied if config.writes_checkpoints and not config.use_gpu else 0
            peak = peak_of_steps(rank, steps, config).with_parts(checkpoint=checkpoint)
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
        """Measures a step of all rows in `num_micro` micro-batches; the first may have a row more."""
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
