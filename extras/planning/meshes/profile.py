"""Work, messages and memory of each rank of one replica, interpolated between two measured numbers of rows.

Work, messages and kept bytes are linear in the rows. The peak is the largest of several linear sums, so
between the two measured numbers of rows the interpolation is never below it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ringspark.estimators.memory.columns import BatchColumn
from ringspark.estimators.memory.meter import Peak
from ringspark.estimators.memory.sharing import (
    communication_bytes,
    reduces_during_backward,
    reduces_in_buckets,
)
from ringspark.estimators.parallel.model.fake_collective import Message
from ringspark.estimators.parallel.model.pipeline.actions import Steps
from ringspark.estimators.parallel.model.pipeline.partition import partition_by_cost
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning.meshes.axes import PLANNED_AXES
from ringspark.extras.planning.meshes.candidates import Candidate, with_mesh
from ringspark.extras.planning.meshes.cut_network import CutNetwork, cut_network, link_costs
from ringspark.extras.planning.meshes.cut_plan import steps_of
from ringspark.extras.planning.meshes.rank_step import RankBytes, measure_ranks
from ringspark.extras.planning.meshes.schedule_peak import peak_of_steps
from ringspark.extras.planning.meshes.work import Work
from ringspark.models.chain import links_of

# Ratio of the two measured numbers of rows.
_SPAN = 16


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One replica of a network on its ranks.

    Attributes:
        config: The config of the measurement, for one replica.
        network: The sharded network.
        rows: The two measured numbers of rows of a micro-batch, ascending.
        few, many: Measurements of each rank with the smaller and the larger number.
    """

    config: TrainConfig
    network: CutNetwork
    rows: tuple[int, int]
    few: Sequence[RankBytes]
    many: Sequence[RankBytes]

    def work(self, rank: int, stage: int, is_forward: bool, rows: float) -> Work:
        """Returns the work of a pass."""
        few, many = (side[rank].passes[stage, is_forward].work for side in (self.few, self.many))
        return Work(
            launches=many.launches,
            flops=round(self._at(few.flops, many.flops, rows)),
            num_bytes=round(self._at(few.num_bytes, many.num_bytes, rows)),
        )

    def messages(self, rank: int, stage: int, is_forward: bool, rows: float) -> dict[str, list[Message]]:
        """Returns the communication inside the network in a pass, by axis."""
        few, many = (side[rank].passes[stage, is_forward].messages for side in (self.few, self.many))
        return {
            axis: [
                Message(large.kind, round(self._at(small.num_bytes, large.num_bytes, rows)))
                for small, large in zip(few[axis], many[axis], strict=True)
            ]
            for axis in many
        }

    def arriving(self, rank: int, stage: int, rows: float) -> float:
        """Returns the bytes that a stage receives from another rank per micro-batch."""
        return self._at(self.few[rank].arriving[stage], self.many[rank].arriving[stage], rows)

    def pass_work(self, rows: float) -> Work:
        """Returns the work of both passes of all stages."""
        total = Work()
        for rank, measured in enumerate(self.many):
            for stage, is_forward in measured.passes:
                total += self.work(rank, stage, is_forward, rows)
        return total

    def peak(self, config: TrainConfig, rows: int) -> Peak:
        """Returns the peak of the rank that needs most.

        Args:
            config: The config with the whole mesh and the number of micro-batches.
            rows: Rows of a micro-batch.
        """
        peaks = []
        by_rank = steps_of(config, self.network.owners, config.gradient_accumulation)
        for part, few, many, steps in zip(self.network.parts, self.few, self.many, by_rank, strict=True):
            small, large = (_peak(own, config, part.module, steps) for own in (few, many))
            parts = {part: round(self._at(n, large.parts[part], rows)) for part, n in small.parts.items()}
            peaks.append(Peak(total=sum(parts.values()), parts=parts))
        return max(peaks, key=lambda peak: peak.total)

    def _at(self, few: float, many: float, rows: float) -> float:
        low, high = self.rows
        return many if low == high else few + (many - few) * (rows - low) / (high - low)


def _peak(rank: RankBytes, config: TrainConfig, module: nn.Module, steps: Steps) -> Peak:
    """Returns a rank's peak with the communication buffers of the whole mesh."""
    rank = replace(
        rank,
        communication=communication_bytes(config, module),
        in_buckets=reduces_in_buckets(config),
        leaves=reduces_during_backward(config),
    )
    return peak_of_steps(rank, steps, config.sync.sharding)


class Profiles:
    """Measures each sharding of a network once.

    Args:
        inputs, labels: Columns of all rows of a step over all workers.
    """

    def __init__(
        self,
        config: TrainConfig,
        objects: UserObjects,
        empty: nn.Module,
        inputs: Sequence[BatchColumn],
        labels: Sequence[BatchColumn],
    ) -> None:
        self._config, self._objects, self._empty = config, objects, empty
        self._inputs, self._labels = inputs, labels
        # Keeps the profiles alive, because `_exact` uses their ids.
        self._found: dict[tuple[object, ...], Profile] = {}
        self._exact: dict[tuple[int, int], Profile] = {}

    def cuts(self, candidate: Candidate) -> list[str]:
        """Returns the first links of all stages except the first, balanced by the links' costs."""
        stages = candidate.size("pipeline") * candidate.options.get("virtual", 1)
        if stages == 1:
            return []
        rows = max(1, self._config.batch_size // stages)
        bounds = partition_by_cost(links_of(self._empty), stages, link_costs(self._empty, self._inputs, rows))
        return [links_of(self._empty)[begin].name for begin in bounds[1:-1]]

    def of(self, candidate: Candidate) -> Profile:
        """Returns the profile of a candidate.

        Raises:
            Exception: Like `measure_ranks`; ValueError if the network cannot be sharded that way.
        """
        sizes = dict(candidate.sizes)
        if self._config.sync.sharding == "none":
            # Without sharding, the number of replicas changes nothing.
            sizes = {axis: size for axis, size in sizes.items() if axis in PLANNED_AXES[1:]}
        key = (*sorted(sizes.items()), repr(sorted(candidate.options.items())))
        if key not in self._found:
            self._found[key] = self._measure(sizes, candidate.options)
        return self._found[key]

    def exact_peak(self, candidate: Candidate, config: TrainConfig, rows: int) -> Peak:
        """Returns the result of `Profile.peak`, measured with `rows` rows instead of interpolated."""
        profile = self.of(candidate)
        if rows in profile.rows:
            return profile.peak(config, rows)
        if (id(profile), rows) not in self._exact:
            own = self._ranks(profile.config, profile.network, rows, profile.few)
            self._exact[id(profile), rows] = replace(profile, rows=(rows, rows), few=own, many=own)
        return self._exact[id(profile), rows].peak(config, rows)

    def _measure(self, sizes: Mapping[str, int], options: Mapping[str, Any]) -> Profile:
        config = with_mesh(self._config, math.prod(sizes.values()), {**sizes, **options}, 1)
        # A pipeline has at least two micro-batches.
        most = -(-self._config.batch_size // (2 if sizes.get("pipeline", 1) > 1 else 1))
        counts = max(1, most // _SPAN), most
        network = cut_network(self._empty, config.axes, config.parallelism, self._inputs)
        first = self._ranks(config, network, counts[0], None)
        second = self._ranks(config, network, counts[1], first)
        return Profile(config=config, network=network, rows=counts, few=first, many=second)

    def _ranks(
        self, config: TrainConfig, network: CutNetwork, rows: int, known: Sequence[RankBytes] | None
    ) -> list[RankBytes]:
        inputs, labels = (self._columns(side, rows) for side in (self._inputs, self._labels))
        return measure_ranks(config, self._objects, network, inputs, labels, known)

    def _columns(self, columns: Sequence[BatchColumn], rows: int) -> list[BatchColumn]:
        share = rows / self._config.batch_size
        return [
            BatchColumn(shape=(max(1, round(c.shape[0] * share)), *c.shape[1:]), dtype=c.dtype)
            for c in columns
        ]
