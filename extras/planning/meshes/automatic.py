"""`parallelism="auto"`: chooses the mesh on the driver before any worker starts.

A small network uses data parallelism without planning. For other networks all meshes are planned. The plan
uses a measured step if a step takes at most a few seconds on this machine, otherwise an estimate.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.nn.modules.batchnorm import _BatchNorm

from ringspark.estimators import user_code
from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.memory.available import Available, find_host_limit
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.training.build import build_module
from ringspark.estimators.training.check.probe import probe
from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.model_parallel.mesh_check import check_mesh
from ringspark.extras.planning.exchange_time import Link
from ringspark.extras.planning.memory.columns import shard_columns
from ringspark.extras.planning.memory.measured_ranks import MeasuredRanks, on_one_worker
from ringspark.extras.planning.meshes.candidates import candidates
from ringspark.extras.planning.meshes.machine import MOST_RANKS, GivenHardware, calibration_rows
from ringspark.extras.planning.meshes.plan import plan_meshes
from ringspark.extras.planning.planned_config import first_error_line, network_name
from ringspark.extras.planning.work import ASSUMED, OperatorRates, Work
from ringspark.models.generators import keep_shared_generators
from ringspark.models.process_state import fork_generators
from ringspark.pipelines import ShardManifest

# Parameters of a network that needs no plan, in bytes: reducing its gradients costs less than sharding it.
SMALL_BYTES = 4 << 20
# Steps of all rows on one worker with a longer estimate are not measured.
MOST_SECONDS = 2.0
_REPEATS = 3
# GPUs are not measured on the driver: assume 50 TFLOP/s and 1 TB/s.
_GPU = OperatorRates(launch=5e-6, flop=2e-14, byte=1e-12)
_GPU_LINK = Link(alpha=2e-5, beta=2e-11)
# Assumed between workers on other machines: 10 Gbit/s, 0.05 ms.
_NETWORK = Link.of_network(gigabits_per_second=10, milliseconds=0.05)


@dataclass(frozen=True)
class ChosenMesh:
    """A config with the chosen mesh, and the reason for the choice: a sentence, or the planner's table."""

    config: TrainConfig
    explanation: str


def _keep_mesh(config: TrainConfig, begun: TrainConfig) -> ChosenMesh | None:
    """Returns the resumed run's mesh, or None if numWorkers changed."""
    if begun.num_workers != config.num_workers:
        return None
    accumulation = begun.gradient_accumulation
    try:
        config = replace(config, parallelism=begun.parallelism, gradient_accumulation=accumulation)
    except ValueError:
        return None  # a changed setting excludes the mesh
    name = " x ".join(f"{a} {n}" for a, n in begun.axes.items() if n > 1) or "one worker"
    return ChosenMesh(config, f"{name} is kept from the resumed run")


# A user's network may draw numbers when it is built or run, and Spark uses this process again.
@fork_generators()
@keep_shared_generators()
def choose_parallelism(
    config: TrainConfig,
    objects: UserObjects,
    manifest: ShardManifest,
    *,
    begun: TrainConfig | None = None,
    budget: int | None = None,
    limits: Sequence[Available | None] = (),
    chooses_micro: bool = True,
    is_here: bool = True,
) -> ChosenMesh:
    """Returns the config with the chosen mesh. Runs on the driver.

    Args:
        begun: Settings of the run to resume. If its number of workers is the same, its mesh is kept.
        budget: Memory of a worker for tensors, in bytes, if the user set it. If it is None, the smallest of
            `limits` is used.
        chooses_micro: Whether to choose `gradientAccumulation` too.
        is_here: Whether the workers run on the driver's machine.

    Raises:
        ValueError: No mesh fits. The message says how much memory the smallest mesh needs.
    """
    if begun is not None and (kept := _keep_mesh(config, begun)) is not None:
        return kept
    workers = config.num_workers
    if workers == 1:
        return ChosenMesh(config, "one worker has the whole network")
    known = [limit.num_bytes for limit in limits if limit is not None]
    memory = min(known, default=None) if budget is None else budget
    columns = shard_columns(config, manifest, config.batch_size)
    try:
        network = MeasuredRanks(config, objects, *columns)
        if explanation := _explain_without_plan(network, memory):
            return ChosenMesh(config, explanation)
        step_work = network.work(config.batch_size)
    # A network that fails only on meta tensors can still use data parallelism.
    except Exception as error:
        warnings.warn(
            f"parallelism='auto' uses data parallelism: model {network_name(config, objects)} does not run "
            f"without data: {first_error_line(error)}; set parallelism yourself to shard it",
            UserWarning,
            stacklevel=7,
        )
        return ChosenMesh(config, "data parallelism: the network does not run without data")
    micro = None if chooses_micro else config.gradient_accumulation
    if begun is not None:
        # Part of the run's identity, because it changes the batches of batch normalization.
        micro = begun.gradient_accumulation
    elif any(isinstance(layer, _BatchNorm) for layer in network.empty.modules()):
        # Micro-batches change the statistics of batch normalization, so only the user sets them.
        micro = config.gradient_accumulation

    rates, link = (_GPU, _GPU_LINK) if config.use_gpu else (ASSUMED, _NETWORK)
    machine = GivenHardware(link=link).make_machine(network, workers, rates, {}, link)
    plan = plan_meshes(network, workers, machine, "assumed", memory, micro)
    # With at most one mesh that fits, a measurement changes nothing.
    if sum(mesh.fits for mesh in plan.meshes) > 1 and _is_worth_measuring(network, step_work, workers):
        # Workers elsewhere are assumed to have cores like this machine's, one per worker.
        given = GivenHardware() if is_here else GivenHardware(link=_NETWORK, cores_per_host=workers)
        machine = given.measure_machine(network, workers, _REPEATS)
        plan = plan_meshes(network, workers, machine, "measured here", memory, micro)
    if plan.chosen is None:
        raise ValueError(f"parallelism='auto' found no mesh: {plan.verdict}")
    chosen = replace(config, parallelism=Mesh.of(plan.best), gradient_accumulation=plan.chosen.num_micro)
    try:
        if chosen.cuts_network:
            module = build_module(chosen, user_code.copy(objects))
            probe(module, chosen, manifest, objects)  # initializes lazy layers
            check_mesh(chosen, objects, manifest, module)
    except ValueError as error:
        warnings.warn(f"parallelism='auto' uses data parallelism: {error}", UserWarning, stacklevel=7)
        return ChosenMesh(config, f"data parallelism: {error}")
    return ChosenMesh(chosen, plan.table())


def _explain_without_plan(network: MeasuredRanks, memory: int | None) -> str:
    """Returns the reason why no plan is needed and data parallelism is used; "" if a plan is needed."""
    config = network.config
    meshes = candidates(config, network.empty, config.num_workers)
    others = [mesh for mesh in meshes if mesh.options or "tensor" in mesh.sizes]
    if all(mesh.refusal for mesh in others):
        return f"data parallelism: no other mesh is possible, because {others[0].refusal}"
    count = num_bytes(network.empty.parameters())
    if count > SMALL_BYTES:
        return ""
    num_micro = config.gradient_accumulation
    rows = -(-config.batch_size // (config.num_workers * num_micro))
    if (
        memory is not None
        and network.measure(config, rows).find_fullest(config, num_micro).peak.total > memory
    ):
        return ""
    return f"data parallelism: the network is small, {show_bytes(count)}"


def _is_worth_measuring(network: MeasuredRanks, step_work: Work, workers: int) -> bool:
    """Returns whether to measure a step on this machine.

    True on CPUs if a step is short enough and its memory fits into this machine.
    """
    config = on_one_worker(network.config)
    if config.use_gpu or ASSUMED.seconds(step_work) > MOST_SECONDS:
        return False
    limit = find_host_limit(1)
    peak = network.measure(config, calibration_rows(config.batch_size)[1]).find_fullest(config, 1).peak
    return limit is None or 2 * min(workers, MOST_RANKS) * peak.total <= limit.num_bytes
