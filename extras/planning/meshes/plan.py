"""`plan_parallelism`: predicts memory and time for every mesh of a number of workers, and chooses a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ringspark.estimators.options.checked import AtLeast1, check
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.options.sync import shard_state
from ringspark.estimators.training.settings import training as settings
from ringspark.estimators.training.settings.byte_sizes import parse_bytes
from ringspark.estimators.training.settings.memory import Memory
from ringspark.estimators.training.settings.network import Objects
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.extras.planning.exchange_time import Link
from ringspark.extras.planning.memory.columns import columns_of
from ringspark.extras.planning.memory.measured_ranks import MeasuredRanks
from ringspark.extras.planning.meshes.machine import GivenHardware
from ringspark.extras.planning.meshes.predict import plan_meshes
from ringspark.extras.planning.meshes.report import ParallelismPlan
from ringspark.extras.planning.planned_config import check_hardware, explain_failure, make_config
from ringspark.extras.planning.work import ASSUMED
from ringspark.models import ModelSpec


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
