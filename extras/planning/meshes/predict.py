"""Plans every mesh of a training; chooses for each the fastest number of micro-batches that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.extras.model_parallel.pipeline.partition import partition_by_cost
from ringspark.extras.planning.memory.budget import first_error_line
from ringspark.extras.planning.memory.cut_network import link_costs
from ringspark.extras.planning.memory.measured_ranks import MeasuredRanks
from ringspark.extras.planning.meshes.candidates import candidates, micro_batches, with_mesh
from ringspark.extras.planning.meshes.machine import Machine
from ringspark.extras.planning.meshes.report import MeshPlan, ParallelismPlan, name_options
from ringspark.extras.planning.meshes.step_time import predict_step_time
from ringspark.models.chain import links_of


def plan_meshes(
    network: MeasuredRanks,
    workers: int,
    machine: Machine,
    source: str,
    memory: int | None,
    num_micro: int | None,
) -> ParallelismPlan:
    """Plans all meshes.

    Args:
        source: Where the machine's numbers are from: "given", "assumed" or "measured here".
        memory: Memory of a worker for tensors, in bytes; None means no limit.
        num_micro: Micro-batches per step; None chooses the number for each mesh.
    """
    planner = _Planner(network, workers, machine, memory)
    best: dict[tuple[tuple[str, int], ...], MeshPlan] = {}
    # Ranks that share cores leave no bubbles to fill.
    interleaves = machine.crowding(workers) == 1
    for mesh in candidates(network.config, network.empty, workers, interleaves=interleaves):
        plan = planner.plan(mesh, num_micro)
        key = tuple(sorted(mesh.sizes.items()))
        best[key] = plan if key not in best else min(best[key], plan, key=_rank)
    return ParallelismPlan(
        workers=workers,
        rows=network.config.batch_size,
        meshes=tuple(sorted(best.values(), key=_rank)),
        memory=memory,
        facts=machine.describe(workers, source),
    )


def _rank(plan: MeshPlan) -> tuple[int, float]:
    if plan.fits:
        return 0, plan.step_seconds
    return (1, plan.peak) if plan.peak else (2, 0)


@dataclass(frozen=True)
class _Planner:
    network: MeasuredRanks
    workers: int
    machine: Machine
    memory: int | None

    def plan(self, mesh: MeshPlan, num_micro: int | None) -> MeshPlan:
        """Plans one mesh, with its best number of micro-batches."""
        if mesh.refusal:
            return mesh
        copies = mesh.sizes.get("data", 1) * mesh.sizes.get("shard", 1) * mesh.sizes.get("expert", 1)
        rows = self.network.config.batch_size // copies
        counts = micro_batches(mesh, rows, num_micro)
        if not counts:
            refusal = f"{rows:,} rows per replica and step are too few for {num_micro or 1:,} micro-batches"
            return replace(mesh, refusal=refusal)
        try:
            if cuts := self._cuts(mesh):
                mesh = replace(mesh, options={**mesh.options, "cuts": cuts})
            return min((self._plan_micro(mesh, count) for count in counts), key=_rank)
        # A network that cannot be sharded can still be trained.
        except Exception as error:
            return replace(mesh, refusal=first_error_line(error))

    def _cuts(self, mesh: MeshPlan) -> list[str]:
        """Returns the name of the first layer of every stage except stage 0; stages have balanced costs."""
        stages = mesh.sizes.get("pipeline", 1) * mesh.options.get("virtual", 1)
        if stages == 1:
            return []
        whole = self.network.empty
        links, rows = links_of(whole), max(1, self.network.config.batch_size // stages)
        bounds = partition_by_cost(links, stages, link_costs(whole, self.network.inputs, rows))
        return [links[begin].name for begin in bounds[1:-1]]

    def _plan_micro(self, mesh: MeshPlan, num_micro: int) -> MeshPlan:
        try:
            config = with_mesh(
                self.network.config, self.workers, name_options(mesh.sizes, mesh.options), num_micro
            )
            # The largest micro-batch counts.
            rows = -(-config.batch_size // (config.num_copies * num_micro))
            replica = self.network.measure(config, rows)
        except ValueError as error:
            return replace(mesh, refusal=str(error))
        peak, refusal = replica.find_fullest(config, num_micro).peak, ""
        if self.memory is not None and peak.total > self.memory:
            needed, available = show_bytes(peak.total), show_bytes(self.memory)
            refusal = f"needs {needed} per worker, {available} are available"
        plan = predict_step_time(mesh, config, replica, self.machine)
        return replace(plan, num_micro=num_micro, peak=peak.total, at_peak=peak.parts, refusal=refusal)
