"""`plan_parallelism`: predicts memory and time for every mesh of a number of workers, and chooses a mesh.

Each mesh gets the fastest number of micro-batches that fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ringspark.estimators.options.checked import AtLeast1, check
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.options.sync import shard_state
from ringspark.estimators.training.settings import training as settings
from ringspark.estimators.training.settings.byte_sizes import parse_bytes, show_bytes
from ringspark.estimators.training.settings.memory import Memory
from ringspark.estimators.training.settings.network import Objects
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.extras.model_parallel.pipeline.partition import partition_by_cost
from ringspark.extras.planning.exchange_time import Link
from ringspark.extras.planning.memory.columns import columns_of
from ringspark.extras.planning.memory.cut_network import link_costs
from ringspark.extras.planning.memory.measured_ranks import MeasuredRanks
from ringspark.extras.planning.meshes.candidates import candidates, micro_batches, with_mesh
from ringspark.extras.planning.meshes.machine import GivenHardware, Machine
from ringspark.extras.planning.meshes.report import MeshPlan, ParallelismPlan, name_options
from ringspark.extras.planning.meshes.step_time import predict_step_time
from ringspark.extras.planning.planned_config import (
    check_hardware,
    explain_failure,
    first_error_line,
    make_config,
)
from ringspark.extras.planning.work import ASSUMED
from ringspark.models import ModelSpec
from ringspark.models.chain import links_of


def plan_parallelism(
    model: ModelSpec | nn.Module,
    batch: tuple[Any, Any],
    workers: int,
    memory: int | str | None = None,
    link: Link | Mapping[str, float] | None = None,
    *,
    rows: int | None = None,
    optimizer: Any = settings.Training.optimizer,
    loss: Any = Objects.loss,
    precision: str = Memory.precision,
    gradientCheckpointing: str | int | Sequence[str] = Memory.gradient_checkpointing,
    gradientAccumulation: int | None = None,
    sharding: str = "none",
    tensorPlan: Mapping[str, Any] | None = None,
    stepSeconds: Mapping[int, float] | None = None,
    hostLink: Link | Mapping[str, float] | None = None,
    workersPerHost: int | None = None,
    coresPerHost: int | None = None,
    repeats: int = 5,
) -> ParallelismPlan:
    """Predicts a step's memory and time for every mesh of a number of workers.

    >>> from ringspark.models import ModelSpec
    >>> spec = ModelSpec("mlp", {"in_features": 32, "hidden": [4096] * 4, "out_features": 1})
    >>> rows = (((64, 32), "float32"), ((64,), "float32"))  # inputs, labels of a step over all workers
    >>> link = {"alpha": 1e-4, "beta": 1e-9}
    >>> plan = plan_parallelism(spec, rows, 2, "700m", link, stepSeconds={16: 0.5, 64: 0.8})
    >>> plan.best
    {'tensor': 2}

    The axes are 'data', 'tensor', 'pipeline', 'sequence' and 'expert'. A calibration run on up to 8 processes
    of this machine measures everything that is not given. Memory is counted as in `plan_memory`, with the
    copy for a checkpoint, on the worker that needs most.

    Args:
        model: A spec or a module. For a spec no memory is allocated; a module is not changed.
        batch: (inputs, labels) of one step over all workers, in the form that `plan_memory` takes.
        memory: Memory of a worker for tensors, in bytes or as a Spark size ("4g"); None means no limit.
        link: Link between the workers of a host: a `Link`, or a dict of its "alpha" and "beta"; None measures
            it.
        rows: Rows per step over all workers; None takes the number of rows in `batch`.
        optimizer: Name or factory, as for the estimators.
        loss: As for the estimators; "auto" is cross entropy for integer labels, otherwise mean squared error.
        gradientAccumulation: Micro-batches per step; None chooses the number for each mesh.
        tensorPlan: Plan of tensor parallelism, for a network that has no plan of its own.
        stepSeconds: Seconds of a step of the whole network on one worker, by its number of rows, for at
            least two numbers of rows; None measures them.
        hostLink: Link between hosts; None if there is one host.
        workersPerHost: Workers per host; None puts all workers on one host.
        coresPerHost: Number of workers that a host runs at full speed: its cores or devices. None takes the
            cores of this machine, or all workers if nothing is measured.
        repeats: Number of measurements; their median is used.

    Raises:
        ValueError: An argument is wrong, or the network cannot run on tensors without data.
        WorkerError: A process of the calibration run failed.
    """
    check(AtLeast1, workers, "workers")
    check_hardware(repeats, workersPerHost, coresPerHost, stepSeconds)
    inputs, labels = columns_of(batch, rows)
    config, objects = make_config(
        model,
        inputs,
        labels,
        optimizer,
        loss,
        precision=precision,
        collective="torch",
        policy=gradientCheckpointing,
        sync=shard_state(sharding),
        parallelism=Mesh(plan=dict(tensorPlan) if tensorPlan else None),
    )
    if gradientAccumulation is not None:
        SETTINGS["gradientAccumulation"].check(gradientAccumulation)
    limit = None if memory is None else parse_bytes(memory)
    with explain_failure(config, objects):
        network = MeasuredRanks(config, objects, inputs, labels)
        network.work(config.batch_size)
    given = GivenHardware(
        link=_parse_link(link, "link"),
        between=_parse_link(hostLink, "hostLink"),
        step_seconds=stepSeconds,
        workers_per_host=workersPerHost,
        cores_per_host=coresPerHost,
    )
    if given.link is not None and stepSeconds is not None:
        machine, source = given.make_machine(network, workers, ASSUMED, {}, given.link), "given"
    else:
        machine, source = given.measure_machine(network, workers, repeats), "measured here"
    return plan_meshes(network, workers, machine, source, limit, gradientAccumulation)


def _parse_link(given: Link | Mapping[str, float] | None, name: str) -> Link | None:
    if given is None or isinstance(given, Link):
        return given
    if not isinstance(given, Mapping) or given.keys() != {"alpha", "beta"}:
        raise ValueError(
            f"{name} must be a Link, or a dict of seconds per message and per byte, such as "
            f"{{'alpha': 1e-4, 'beta': 1e-9}}, got {given!r}"
        )
    return Link(**given)


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
