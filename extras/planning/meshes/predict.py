"""Plans every mesh of a training; chooses for each the fastest number of micro-batches that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.planning.memory.budget import first_error_line
from ringspark.extras.planning.memory.meter import Peak
from ringspark.extras.planning.meshes.candidates import candidates, micro_batches, with_mesh
from ringspark.extras.planning.meshes.machine import Machine
from ringspark.extras.planning.meshes.profile import Profile, Training
from ringspark.extras.planning.meshes.report import MeshPlan, name_options
from ringspark.extras.planning.meshes.step_time import predict_step_time


def plan_meshes(
    training: Training, workers: int, machine: Machine, memory: int | None, num_micro: int | None
) -> tuple[MeshPlan, ...]:
    """Plans all meshes; the result has the order of `ParallelismPlan.meshes`.

    Args:
        memory: Memory of a worker for tensors, in bytes; None means no limit.
        num_micro: Micro-batches per step; None chooses the number for each mesh.
    """
    planner = _Planner(training, workers, machine, memory)
    best: dict[tuple[tuple[str, int], ...], MeshPlan] = {}
    # Ranks that share cores leave no bubbles to fill.
    interleaves = machine.crowding(workers) == 1
    for mesh in candidates(training.settings, training.network, workers, interleaves=interleaves):
        plan = planner.plan(mesh, num_micro)
        key = tuple(sorted(mesh.sizes.items()))
        best[key] = plan if key not in best else min(best[key], plan, key=_rank)
    return tuple(sorted(best.values(), key=_rank))


def _rank(plan: MeshPlan) -> tuple[int, float]:
    if plan.fits:
        return 0, plan.step_seconds
    return (1, plan.peak) if plan.peak else (2, 0)


@dataclass(frozen=True)
class _Planner:
    training: Training
    workers: int
    machine: Machine
    memory: int | None

    def plan(self, mesh: MeshPlan, num_micro: int | None) -> MeshPlan:
        """Plans one mesh, with its best number of micro-batches."""
        if mesh.refusal:
            return mesh
        try:
            if cuts := self.training.cuts(mesh.sizes, mesh.options):
                mesh = replace(mesh, options={**mesh.options, "cuts": cuts})
            profile = self.training.profile(mesh.sizes, mesh.options)
        # A network that cannot be sharded can still be trained.
        except Exception as error:
            refusal = str(error) if isinstance(error, ValueError) else first_error_line(error)
            return replace(mesh, refusal=refusal)
        copies = mesh.sizes.get("data", 1) * mesh.sizes.get("shard", 1) * mesh.sizes.get("expert", 1)
        rows = self.training.config.batch_size // copies
        plans = [self._plan_micro(mesh, profile, n) for n in micro_batches(mesh, rows, num_micro)]
        if not plans:
            refusal = f"{rows:,} rows per replica and step are too few for {num_micro or 1:,} micro-batches"
            return replace(mesh, refusal=refusal)
        plan = min(plans, key=_rank)
        if not plan.peak:
            return plan
        # The chosen plan's peak is measured for its number of rows, not interpolated.
        config, rows = self._config(mesh, plan.num_micro)
        return self._with_peak(plan, self.training.exact_peak(profile, config, rows))

    def _plan_micro(self, mesh: MeshPlan, profile: Profile, num_micro: int) -> MeshPlan:
        try:
            config, rows = self._config(mesh, num_micro)
        except ValueError as error:
            return replace(mesh, refusal=str(error))
        time = predict_step_time(config, profile, self.machine)
        plan = replace(
            mesh,
            num_micro=num_micro,
            step_seconds=time.total,
            exposed_seconds=time.exposed,
            bubble=time.bubble,
        )
        return self._with_peak(plan, profile.peak(config, rows))

    def _config(self, mesh: MeshPlan, num_micro: int) -> tuple[TrainConfig, int]:
        """Returns the config with the mesh, and the number of rows of its largest micro-batch."""
        config = with_mesh(
            self.training.settings, self.workers, name_options(mesh.sizes, mesh.options), num_micro
        )
        return config, -(-config.batch_size // (config.num_copies * num_micro))

    def _with_peak(self, plan: MeshPlan, peak: Peak) -> MeshPlan:
        refusal = ""
        if self.memory is not None and peak.total > self.memory:
            needed, available = show_bytes(peak.total), show_bytes(self.memory)
            refusal = f"needs {needed} per worker, {available} are available"
        return replace(plan, peak=peak.total, at_peak=peak.parts, refusal=refusal)
