"""Predicts work, messages and memory of each rank of one replica for any number of rows.

Two numbers of rows are measured, and all others are interpolated.

Work, messages and the bytes that stay after a pass are linear in the rows. The peak is the maximum of several
linear functions, so the peak is convex. Between the two measured numbers of rows, the interpolated peak is
therefore never too low.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringspark.estimators.memory.shares import checkpoint_writers
from ringspark.estimators.options.mesh import MODEL_AXES, Mesh
from ringspark.estimators.training.finetuning.freezing import tune
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.model_parallel.fake_collective import Message
from ringspark.extras.model_parallel.pipeline.partition import partition_by_cost
from ringspark.extras.planning.memory.columns import BatchColumn
from ringspark.extras.planning.memory.meter import Peak
from ringspark.extras.planning.memory.sharing import count_checkpoint
from ringspark.extras.planning.memory.step import initialize_lazy_layers
from ringspark.extras.planning.meshes.candidates import with_mesh
from ringspark.extras.planning.meshes.cut_network import CutNetwork, cut_network, link_costs
from ringspark.extras.planning.meshes.cut_plan import peak_of_steps, steps_of
from ringspark.extras.planning.meshes.rank_step import RankBytes, measure_ranks
from ringspark.extras.planning.meshes.report import name_options
from ringspark.extras.planning.meshes.work import Work
from ringspark.models import ModelSpec
from ringspark.models.chain import links_of
from ringspark.models.meta_device import build_on_meta, copy_to_meta

# Ratio of the two measured numbers of rows.
_SPAN = 16

# Rows -> work of a whole step on one worker.
StepWork = Callable[[int], Work]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements of one replica of a network, by rank.

    Attributes:
        config: Config of the training that was measured.
        rows: The two measured numbers of rows of a micro-batch, ascending.
        few, many: Measurements of each rank with the smaller and with the larger number of rows.
    """

    config: TrainConfig
    network: CutNetwork
    rows: tuple[int, int]
    few: Sequence[RankBytes]
    many: Sequence[RankBytes]

    def work(self, rank: int, stage: int, is_forward: bool, rows: float) -> Work:
        """Returns the work of one stage's forward or backward pass."""
        few, many = (side[rank].passes[stage, is_forward].work for side in (self.few, self.many))
        return Work(
            launches=many.launches,
            flops=round(self._at(few.flops, many.flops, rows)),
            num_bytes=round(self._at(few.num_bytes, many.num_bytes, rows)),
        )

    def messages(self, rank: int, stage: int, is_forward: bool, rows: float) -> dict[str, list[Message]]:
        """Returns the messages that a pass sends inside the network, by axis."""
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

    def peak(self, config: TrainConfig, rows: int) -> Peak:
        """Returns the peak of the rank that needs most memory; micro-batches have `rows` rows.

        `config.parallelism` has all axes of the mesh.
        """
        peaks = []
        by_rank = steps_of(config, self.network.owners, config.gradient_accumulation)
        for few, many, steps in zip(self.few, self.many, by_rank, strict=True):
            small, large = (peak_of_steps(own, steps, config) for own in (few, many))
            parts = {part: round(self._at(n, large.parts[part], rows)) for part, n in small.parts.items()}
            copied = many.parts["parameters"] + many.parts["optimizer_state"]
            parts["checkpoint"] = count_checkpoint(config, copied // checkpoint_writers(config))
            peaks.append(Peak(total=sum(parts.values()), parts=parts))
        return max(peaks, key=lambda peak: peak.total)

    def _at(self, few: float, many: float, rows: float) -> float:
        low, high = self.rows
        return many if low == high else few + (many - few) * (rows - low) / (high - low)


class Training:
    """A training to plan. It measures each sharding of its network once, on meta tensors.

    Args:
        settings: The user's settings. `batch_size` is the number of rows of a step over all workers.

    Attributes:
        config: The settings, changed to one worker.
        network: The network on `meta`.
    """

    def __init__(
        self,
        settings: TrainConfig,
        objects: UserObjects,
        inputs: Sequence[BatchColumn],
        labels: Sequence[BatchColumn],
    ) -> None:
        self.settings, self.objects, self.inputs, self.labels = settings, objects, inputs, labels
        mesh = Mesh(plan=settings.parallelism.plan)
        self.config = replace(
            settings, num_workers=1, parallelism=mesh, gradient_accumulation=1, min_workers=None
        )
        if settings.model is not None:
            self.network = build_on_meta(ModelSpec.from_json(settings.model).build)
        else:
            self.network = copy_to_meta(objects.module)
        tune(self.network, self.config.freeze, self.config.lora)
        initialize_lazy_layers(self.network, inputs, objects)
        # Keeps the profiles alive, because `_exact` uses their ids.
        self._found: dict[tuple[object, ...], Profile] = {}
        self._exact: dict[tuple[int, int], Profile] = {}

    def step_work(self) -> StepWork:
        """Returns a function from rows to the work of a step on one worker.

        Raises an error if the network does not run on meta tensors.
        """
        alone = self.profile({})
        update = alone.many[0].update_work
        return lambda rows: alone.work(0, 0, True, rows) + alone.work(0, 0, False, rows) + update

    def cuts(self, sizes: Mapping[str, int], options: Mapping[str, Any]) -> list[str]:
        """Returns the name of the first layer of every stage except stage 0.

        The layers are divided so that the stages' costs are balanced.
        """
        stages = sizes.get("pipeline", 1) * options.get("virtual", 1)
        if stages == 1:
            return []
        links, rows = links_of(self.network), max(1, self.config.batch_size // stages)
        bounds = partition_by_cost(links, stages, link_costs(self.network, self.inputs, rows))
        return [links[begin].name for begin in bounds[1:-1]]

    def profile(self, sizes: Mapping[str, int], options: Mapping[str, Any] | None = None) -> Profile:
        """Returns the profile of a mesh.

        Raises:
            Exception: Any error that `measure_ranks` raises. ValueError also if the network cannot be sharded
                in this way.
        """
        options = options or {}
        if self.config.sync.sharding == "none":
            # Without sharding, the number of replicas changes nothing.
            sizes = {axis: size for axis, size in sizes.items() if axis in MODEL_AXES}
        key = (*sorted(sizes.items()), repr(sorted(options.items())))
        if key not in self._found:
            self._found[key] = self._measure(sizes, options)
        return self._found[key]

    def exact_peak(self, profile: Profile, config: TrainConfig, rows: int) -> Peak:
        """Returns `profile.peak`, measured with a micro-batch of `rows` rows instead of interpolated."""
        if rows in profile.rows:
            return profile.peak(config, rows)
        if (id(profile), rows) not in self._exact:
            own = self._measure_ranks(profile.config, profile.network, rows, profile.few)
            self._exact[id(profile), rows] = replace(profile, rows=(rows, rows), few=own, many=own)
        return self._exact[id(profile), rows].peak(config, rows)

    def _measure(self, sizes: Mapping[str, int], options: Mapping[str, Any]) -> Profile:
        config = with_mesh(self.config, math.prod(sizes.values()), name_options(sizes, options), 1)
        # A pipeline has at least two micro-batches.
        most = -(-self.config.batch_size // (2 if sizes.get("pipeline", 1) > 1 else 1))
        counts = max(1, most // _SPAN), most
        network = cut_network(self.network, config.axes, config.parallelism, self.inputs)
        few = self._measure_ranks(config, network, counts[0], None)
        many = self._measure_ranks(config, network, counts[1], few)
        return Profile(config=config, network=network, rows=counts, few=few, many=many)

    def _measure_ranks(
        self, config: TrainConfig, network: CutNetwork, rows: int, known: Sequence[RankBytes] | None
    ) -> list[RankBytes]:
        share = rows / self.config.batch_size
        inputs, labels = (
            [replace(c, shape=(max(1, round(c.shape[0] * share)), *c.shape[1:])) for c in columns]
            for columns in (self.inputs, self.labels)
        )
        return measure_ranks(config, self.objects, network, inputs, labels, known)
