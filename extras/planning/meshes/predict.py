"""Plans every mesh of a training with its fastest number of micro-batches that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ringspark.estimators.memory.budget import first_error_line
from ringspark.estimators.memory.columns import BatchColumn
from ringspark.estimators.memory.step import initialize_lazy_layers
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.training.finetuning.freezing import apply_finetuning
from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning.meshes.axes import Spreadable
from ringspark.extras.planning.meshes.candidates import Candidate, candidates, micro_batches, with_mesh
from ringspark.extras.planning.meshes.machine import Machine
from ringspark.extras.planning.meshes.profile import Profile, Profiles
from ringspark.extras.planning.meshes.report import MeshPlan
from ringspark.extras.planning.meshes.step_time import predict_step_time
from ringspark.extras.planning.meshes.work import Work
from ringspark.models import ModelSpec
from ringspark.models.meta_device import build_on_meta, copy_to_meta

# Rows -> work of a whole step on one worker.
StepWork = Callable[[int], Work]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training to plan.

    Attributes:
        settings: The given settings.
        config: The settings for one worker; `batch_size` counts the rows of a step over all workers.
        objects: The user's objects.
        inputs, labels: Columns of all rows of a step.
        network: The network on `meta`.
        profiles: Measurements of the network on meta tensors.
    """

    settings: TrainConfig
    config: TrainConfig
    objects: UserObjects
    inputs: Sequence[BatchColumn]
    labels: Sequence[BatchColumn]
    network: nn.Module
    profiles: Profiles

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        objects: UserObjects,
        inputs: Sequence[BatchColumn],
        labels: Sequence[BatchColumn],
    ) -> Training:
        """Builds the network on `meta`."""
        settings = config
        mesh = Mesh(plan=config.parallelism.plan)
        config = replace(config, num_workers=1, parallelism=mesh, gradient_accumulation=1, min_workers=None)
        if config.model is not None:
            network = build_on_meta(ModelSpec.from_json(config.model).build)
        else:
            network = copy_to_meta(objects.module)
        apply_finetuning(network, config)
        initialize_lazy_layers(network, inputs, objects)
        profiles = Profiles(config, objects, network, inputs, labels)
        return cls(
            settings=settings,
            config=config,
            objects=objects,
            inputs=inputs,
            labels=labels,
            network=network,
            profiles=profiles,
        )

    def spreadable(self) -> Spreadable:
        """Returns the argument of `AXIS_RULES`."""
        return Spreadable(config=self.settings, network=self.network)

    def step_work(self) -> StepWork:
        """Returns the work of a step of the whole network on one worker.

        Raises:
            Exception: The network does not run on meta tensors.
        """
        alone = self.profiles.of(Candidate(sizes={}))
        return lambda rows: alone.pass_work(rows) + alone.many[0].update_work


def plan_meshes(
    training: Training, workers: int, machine: Machine, memory: int | None, num_micro: int | None
) -> tuple[MeshPlan, ...]:
    """Plans all meshes, in the order of `ParallelismPlan.meshes`.

    Args:
        memory: Memory of a worker for tensors in bytes; None for no limit.
        num_micro: Micro-batches per step; None chooses.
    """
    best: dict[tuple[tuple[str, int], ...], MeshPlan] = {}
    for candidate in candidates(training.spreadable(), workers, interleaves=machine.crowding(workers) == 1):
        plan = _plan_candidate(training, workers, candidate, machine, memory, num_micro)
        key = tuple(sorted(candidate.sizes.items()))
        best[key] = plan if key not in best else min(best[key], plan, key=_rank)
    return tuple(sorted(best.values(), key=_rank))


def _rank(plan: MeshPlan) -> tuple[int, float]:
    if plan.fits:
        return 0, plan.step_seconds
    return (1, plan.peak) if plan.peak else (2, 0)


def _plan_candidate(
    training: Training,
    workers: int,
    candidate: Candidate,
    machine: Machine,
    memory: int | None,
    num_micro: int | None,
) -> MeshPlan:
    """Plans one mesh with its best number of micro-batches."""
    if candidate.refusal:
        return MeshPlan(sizes=candidate.sizes, options=candidate.options, refusal=candidate.refusal)
    try:
        if cuts := training.profiles.cuts(candidate):
            candidate = replace(candidate, options={**candidate.options, "cuts": cuts})
        profile = training.profiles.of(candidate)
    # A network that cannot be sharded can still be trained.
    except Exception as error:
        refusal = str(error) if isinstance(error, ValueError) else first_error_line(error)
        return MeshPlan(sizes=candidate.sizes, options=candidate.options, refusal=refusal)
    copies = candidate.size("data") * candidate.size("shard") * candidate.size("expert")
    rows = training.config.batch_size // copies
    plans = [
        _plan_micro(training.settings, workers, candidate, profile, machine, memory, count)
        for count in micro_batches(candidate, rows, num_micro)
    ]
    if not plans:
        refusal = f"a replica has {rows:,} rows per step for {num_micro:,} micro-batches"
        return MeshPlan(sizes=candidate.sizes, options=candidate.options, refusal=refusal)
    return _measure_peak(training, workers, candidate, min(plans, key=_rank), memory)


def _measure_peak(
    training: Training, workers: int, candidate: Candidate, plan: MeshPlan, memory: int | None
) -> MeshPlan:
    """Returns the plan with its peak measured for its number of rows, not interpolated."""
    if not plan.peak:
        return plan
    config = with_mesh(training.settings, workers, candidate.parallelism, plan.num_micro)
    rows = -(-config.batch_size // (config.num_copies * plan.num_micro))
    peak = training.profiles.exact_peak(candidate, config, rows)
    return replace(plan, peak=peak.total, at_peak=peak.parts, refusal=_memory_refusal(peak.total, memory))


def _memory_refusal(peak: int, memory: int | None) -> str:
    """Returns why a peak does not fit, or ""."""
    if memory is None or peak <= memory:
        return ""
    return f"needs {show_bytes(peak)} per worker, {show_bytes(memory)} are available"


def _plan_micro(
    config: TrainConfig,
    workers: int,
    candidate: Candidate,
    profile: Profile,
    machine: Machine,
    memory: int | None,
    num_micro: int,
) -> MeshPlan:
    try:
        config = with_mesh(config, workers, candidate.parallelism, num_micro)
    except ValueError as error:
        return MeshPlan(sizes=candidate.sizes, options=candidate.options, refusal=str(error))
    rows = -(-config.batch_size // (config.num_copies * num_micro))
    peak = profile.peak(config, rows)
    time = predict_step_time(config, profile, machine)
    return MeshPlan(
        sizes=candidate.sizes,
        options=candidate.options,
        num_micro=num_micro,
        peak=peak.total,
        at_peak=peak.parts,
        step_seconds=time.total,
        exposed_seconds=time.exposed,
        bubble=time.bubble,
        refusal=_memory_refusal(peak.total, memory),
    )
