"""`parallelism="auto"`: the planner's choice on the driver, before any worker starts.

A small network is trained in whole copies without more ado: what its gradients cost is less than what any
exchange inside it would. For others all meshes are planned; where the workers run on this machine, and a step
takes seconds at most, it is measured, and estimated by its operations otherwise.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.nn.modules.batchnorm import _BatchNorm

from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.memory.available import Available, find_host_limit
from ringspark.estimators.memory.budget import first_error_line, network_name
from ringspark.estimators.memory.columns import column_of
from ringspark.estimators.memory.planner import Planner
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.training.build import build_module
from ringspark.estimators.training.check.mesh import check_mesh
from ringspark.estimators.training.check.probe import probe
from ringspark.estimators.training.settings.byte_sizes import show_bytes
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning.exchange_time import Link
from ringspark.extras.planning.meshes.candidates import Candidate, candidates
from ringspark.extras.planning.meshes.found_machine import (
    ASSUMED,
    found_machine,
    given_machine,
    rehearsed_rows,
)
from ringspark.extras.planning.meshes.machine import Machine, Rates
from ringspark.extras.planning.meshes.predict import StepWork, Training, plan_meshes
from ringspark.extras.planning.meshes.rehearsal import MOST_RANKS
from ringspark.extras.planning.meshes.report import ParallelismPlan
from ringspark.models.generators import keep_shared_generators
from ringspark.models.process_state import fork_generators
from ringspark.pipelines import ShardManifest

_logger = logging.getLogger(__name__)

# Parameters of a network that is not worth a look.
SMALL_BYTES = 4 << 20
# Of a step of all rows on one worker, estimated: longer ones are not measured.
MOST_SECONDS = 2.0
_REPEATS = 3
# Of GPUs, which no driver measures: 50 thousand billion operations, a thousand billion bytes a second.
_GPU = Rates(launch=5e-6, flop=2e-14, byte=1e-12)
_GPU_LINK = Link(alpha=2e-5, beta=2e-11)
# Between workers whose hosts are not known: 10 Gbit/s, a twentieth of a millisecond.
_NETWORK = Link.of_network(gigabits_per_second=10, milliseconds=0.05)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A config with a mesh.

    Attributes:
        told: Why it has this mesh: a sentence, or the planner's table.
    """

    config: TrainConfig
    told: str


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
) -> Choice:
    """Returns the config with the mesh to train with. Runs on the driver.

    Args:
        config: Config with resolved losses, as `check_training` returns it, with whole copies on all workers.
        begun: Settings with which the run was begun; as many workers keep its mesh.
        budget: Bytes of a worker for tensors, as the user set them.
        limits: What is known of a worker's memory, if the user set nothing.
        chooses_micro: Whether `gradientAccumulation` may be chosen with the mesh.
        is_here: Whether the workers run on this machine.

    Raises:
        ValueError: No mesh fits; the sentence says what the smallest needs.
    """
    choice = _kept(config, begun) if begun is not None else None
    if choice is None:
        # A user's network may draw numbers where it is made or run, and Spark uses this process again.
        with fork_generators(), keep_shared_generators():
            choice = _chosen(config, objects, manifest, begun, budget, limits, chooses_micro, is_here)
    _logger.info("parallelism='auto': %s", choice.told)
    return choice


def _kept(config: TrainConfig, begun: TrainConfig) -> Choice | None:
    """Returns the mesh of a run that goes on; None if it has another number of workers by now."""
    if begun.num_workers != config.num_workers:
        return None
    accumulation = begun.gradient_accumulation
    try:
        config = replace(config, parallelism=begun.parallelism, gradient_accumulation=accumulation)
    except ValueError:
        return None  # another setting has changed that refuses it
    return Choice(config=config, told=f"{_words(begun)}, with which the run was begun, is kept")


def _words(config: TrainConfig) -> str:
    return " x ".join(f"{a} {n}" for a, n in config.axes.items() if n > 1) or "one worker"


def _chosen(
    config: TrainConfig,
    objects: UserObjects,
    manifest: ShardManifest,
    begun: TrainConfig | None,
    budget: int | None,
    limits: Sequence[Available | None],
    chooses_micro: bool,
    is_here: bool,
) -> Choice:
    workers = config.num_workers
    if workers == 1:
        return Choice(config=config, told="one worker has the whole network")
    known = [limit.num_bytes for limit in limits if limit is not None]
    memory = min(known, default=None) if budget is None else budget
    inputs, labels = (
        [column_of(manifest, name, config.batch_size) for name in names]
        for names in (config.input_columns, config.label_columns)
    )
    try:
        training = Training.of(config, objects, inputs, labels)
        if told := _needs_no_plan(config, objects, training, manifest, memory):
            return Choice(config=config, told=told)
        work = training.step_work()
    # A network that fails only on tensors without numbers trains in whole copies all the same.
    except Exception as error:
        warnings.warn(
            f"parallelism='auto' takes whole copies: model {network_name(config, objects)} does not run "
            f"without data: {first_error_line(error)}; set parallelism yourself to share it",
            UserWarning,
            stacklevel=6,
        )
        return Choice(
            config=config, told="the network does not run without data, so every worker has all of it"
        )
    micro = None if chooses_micro else config.gradient_accumulation
    if begun is not None:
        # A part of the run's identity, on which batches of batch normalisation depend.
        micro = begun.gradient_accumulation
    elif any(isinstance(layer, _BatchNorm) for layer in training.network.modules()):
        # Smaller micro-batches change the statistics of batch normalization, so only the user chooses them.
        micro = config.gradient_accumulation

    def planned(machine: Machine, facts: str) -> ParallelismPlan:
        meshes = plan_meshes(training, workers, machine, memory, micro)
        return ParallelismPlan(
            workers=workers, rows=config.batch_size, meshes=meshes, memory=memory, facts=facts
        )

    # Where at most one fits, there is nothing to measure.
    plan = planned(*_estimated(training, work, workers))
    if sum(mesh.fits for mesh in plan.meshes) > 1 and _is_measured(training, work, workers):
        plan = planned(*_measured(training, work, workers, is_here))
    if plan.chosen is None:
        raise ValueError(f"parallelism='auto' found none: {plan.verdict}")
    chosen = replace(config, parallelism=Mesh.of(plan.best), gradient_accumulation=plan.chosen.num_micro)
    try:
        if chosen.cuts_network:
            module = build_module(chosen, objects)
            probe(module, chosen, manifest, objects)  # initializes lazy layers
            check_mesh(chosen, objects, manifest, module)
    except ValueError as error:
        warnings.warn(f"parallelism='auto' takes whole copies: {error}", UserWarning, stacklevel=6)
        return Choice(config=config, told=f"whole copies are chosen: {error}")
    return Choice(config=chosen, told=plan.table())


def _needs_no_plan(
    config: TrainConfig,
    objects: UserObjects,
    training: Training,
    manifest: ShardManifest,
    memory: int | None,
) -> str:
    """Returns why whole copies are the choice without a plan; "" if it takes one."""
    others = [
        c for c in candidates(training.spreadable(), config.num_workers) if c.options or "tensor" in c.sizes
    ]
    if all(candidate.refusal for candidate in others):
        return f"whole copies are chosen: no other mesh can be, {others[0].refusal}"
    count = num_bytes(training.network.parameters())
    if count > SMALL_BYTES:
        return ""
    rows = -(-config.batch_size // config.num_workers)
    inputs, labels = (
        [column_of(manifest, name, rows) for name in names]
        for names in (config.input_columns, config.label_columns)
    )
    if memory is not None and Planner(config, objects, inputs, labels).plan().peak > memory:
        return ""
    return f"whole copies are chosen: the network is small, {show_bytes(count)}"


def _estimated(training: Training, work: StepWork, workers: int) -> tuple[Machine, str]:
    if training.config.use_gpu:
        return given_machine(_GPU, work, None, _GPU_LINK, None, workers, None, None)
    return given_machine(ASSUMED, work, None, _NETWORK, None, workers, None, None)


def _is_measured(training: Training, work: StepWork, workers: int) -> bool:
    """Whether a step is worth measuring: on CPUs, where it is not too long, and this machine can hold it."""
    if training.config.use_gpu or ASSUMED.seconds(work(training.config.batch_size)) > MOST_SECONDS:
        return False
    return _has_room(training, workers)


def _measured(training: Training, work: StepWork, workers: int, is_here: bool) -> tuple[Machine, str]:
    if is_here:
        return found_machine(training, work, workers, _REPEATS)
    # The workers' cores are like this machine's, and each has its own.
    return found_machine(training, work, workers, _REPEATS, link=_NETWORK, cores_per_host=workers)


def _has_room(training: Training, workers: int) -> bool:
    """Whether this machine can hold the whole network's step on all ranks that would measure it."""
    limit = find_host_limit(1)
    alone = training.profiles.of(Candidate(sizes={}))
    peak = alone.peak(training.config, rehearsed_rows(training.config.batch_size)[1])
    return limit is None or 2 * min(workers, MOST_RANKS) * peak.total <= limit.num_bytes
