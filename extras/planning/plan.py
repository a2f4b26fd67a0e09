"""`plan_scaling`: predicts step time, efficiency and cost on 1 to 1,024 workers.

    step(n) = crowding(n) * (fixed + rows(n) * row + exposed exchange(n))

`fixed` is the time of a step without rows, `row` the time per row, and `rows(n)` the number of rows per
worker. The exposed exchange is the part of the all-reduce that the backward pass does not hide. `crowding` is
the number of ranks per core of a host, at least 1. The prediction leaves out reading, validation, checkpoints
and stragglers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le
from torch import nn

from ringspark.estimators import user_code
from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.options.checked import check
from ringspark.estimators.training.build import build_module
from ringspark.estimators.training.settings.memory import Memory
from ringspark.estimators.training.settings.network import Objects
from ringspark.estimators.training.settings.training import Training
from ringspark.extras.planning.calibration import Calibration
from ringspark.extras.planning.exchange_time import Link, hierarchical_seconds, ring_seconds
from ringspark.extras.planning.fit import WORKERS
from ringspark.extras.planning.memory.columns import columns_of
from ringspark.extras.planning.planned_config import check_hardware, make_config
from ringspark.extras.planning.report import Predicted, ScalingPlan
from ringspark.extras.planning.work import count_layers
from ringspark.models import ModelSpec

# Bytes of the measured all-reduces.
_SMALL_BYTES, _LARGEST_BYTES = 1 << 10, 64 << 20
# Share of the backward pass in the computation; it can hide communication.
_BACKWARD_SHARE = 2 / 3


def plan_scaling(
    model: ModelSpec | nn.Module,
    batch: tuple[Any, Any],
    workers: Sequence[int] = WORKERS,
    *,
    rows: int | None = None,
    batchSize: int | None = None,
    optimizer: Any = Training.optimizer,
    loss: Any = Objects.loss,
    precision: str = Memory.precision,
    collective: str = "torch",
    stepSeconds: Mapping[int, float] | None = None,
    link: Link | None = None,
    hostLink: Link | None = None,
    workersPerHost: int | None = None,
    coresPerHost: int | None = None,
    hierarchical: bool = False,
    compression: float = 1.0,
    overlap: float = 0.0,
    pricePerWorkerHour: float | None = None,
    gangSize: int = 2,
    repeats: int = 7,
) -> ScalingPlan:
    """Predicts the time of a training step on each number of workers.

    A calibration run on `gangSize` processes of this machine measures everything that is not given.

    Args:
        model: A spec or a module; a module is not changed.
        batch: (inputs, labels) of one worker, as for `plan_memory`.
        rows: Rows per worker and step; None takes the number of rows in `batch`.
        batchSize: Rows per step over all workers; None gives each worker `rows`.
        optimizer: Name or factory, as for the estimators.
        loss: As for the estimators; "auto" is cross entropy for integer labels, otherwise mean squared error.
        stepSeconds: Seconds of a step on one worker, by its number of rows, for at least two numbers of
            rows; None measures them.
        link: Link between the ranks of a host, or between all ranks if there is no `hostLink`; None measures
            it.
        workersPerHost: Workers per host; None puts all workers on one host.
        coresPerHost: Number of workers that a host runs at full speed: its cores or devices. None means all.
        hierarchical: Whether the ranks of a host reduce among themselves first; otherwise one ring connects
            all ranks.
        compression: Compression ratio of all messages, or only of messages between hosts if `hierarchical`.
        overlap: Share of the all-reduce, 0 to 1, that runs during the backward pass; the hidden time is at
            most the backward pass's time. A training measures the share: `communication_hidden` in
            `summary.history`.
        pricePerWorkerHour: Price in any currency. If it is None, costs are in worker-seconds.
        repeats: Number of measurements; their median is used.

    Raises:
        ValueError: An argument is wrong.
        WorkerError: A process of the calibration run failed.
    """
    inputs, labels = columns_of(batch, rows)
    own_rows = labels[0].shape[0]
    workers = _check_workers(workers, batchSize)
    check(Annotated[float, Ge(1)], compression, "compression")
    check(Annotated[float, Ge(0), Le(1)], overlap, "overlap")
    check(Annotated[int, Ge(2)], gangSize, "gangSize")
    check_hardware(repeats, workersPerHost, coresPerHost, stepSeconds)
    if hierarchical and (hostLink is None or workersPerHost is None):
        raise ValueError(
            "hierarchical=True needs hostLink and workersPerHost; without them, all workers count as one host"
        )
    config, objects = make_config(
        model, inputs, labels, optimizer, loss, precision=precision, collective=collective
    )
    module = build_module(config, user_code.copy(objects))
    gradient_bytes = num_bytes(p for p in module.parameters() if p.requires_grad)
    if stepSeconds is None or link is None:
        largest = max(own_rows, math.ceil((batchSize or 0) / workers[0]))
        found = Calibration(
            config=config,
            objects=user_code.dumps(objects),
            inputs=inputs,
            labels=labels,
            rows=(max(1, largest // 4), largest) if largest > 1 else (1, 2),
            repeats=repeats,
            sizes=(_SMALL_BYTES, max(2 * _SMALL_BYTES, min(gradient_bytes, _LARGEST_BYTES))),
            for_meshes=False,
        ).run(gangSize)
        stepSeconds = found.step_seconds if stepSeconds is None else stepSeconds
        link = found.inside[gangSize] if link is None else link
    fixed, per_row = _fit_line(stepSeconds)

    def exchange(n: int) -> float:
        if hostLink is not None and workersPerHost is not None and n > workersPerHost:
            if hierarchical:
                return hierarchical_seconds(n, workersPerHost, gradient_bytes, link, hostLink, compression)
            return ring_seconds(n, gradient_bytes / compression, hostLink)
        return ring_seconds(n, gradient_bytes / (1 if hierarchical else compression), link)

    def predict(n: int, alone: float | None) -> Predicted:
        own = own_rows if batchSize is None else batchSize / n
        on_host = min(n, workersPerHost or n)
        # Ranks of one host also communicate by its cores.
        crowding = max(1.0, on_host / coresPerHost) if coresPerHost else 1.0
        compute = crowding * (fixed + own * per_row)
        seconds = crowding * exchange(n) if n > 1 else 0.0
        exposed = seconds - min(overlap * seconds, _BACKWARD_SHARE * compute)
        rate = own / (compute + exposed)
        hourly = 3600.0 if pricePerWorkerHour is None else pricePerWorkerHour
        return Predicted(
            workers=n,
            rows=own,
            compute_seconds=compute,
            exchange_seconds=seconds,
            exposed_seconds=exposed,
            efficiency=1.0 if alone is None else rate / alone,
            cost=1e6 / rate / 3600 * hourly,
        )

    try:
        work = count_layers(module, [column.empty("meta") for column in inputs])
    # A forward whose shapes depend on values can be trained, but not counted.
    except Exception:
        work = None
    one = predict(1, None)
    return ScalingPlan(
        predictions=tuple(predict(n, one.rows / one.step_seconds) for n in workers),
        step_seconds=dict(stepSeconds),
        fixed_seconds=fixed,
        row_seconds=per_row,
        link=link,
        host_link=hostLink,
        gradient_bytes=gradient_bytes,
        network=work,
        has_price=pricePerWorkerHour is not None,
    )


def _fit_line(step_seconds: Mapping[int, float]) -> tuple[float, float]:
    """Returns the seconds of a step without rows, and the seconds per row; neither is below 0."""
    # The line goes through the most rows, whose time is the most precise.
    few, many = min(step_seconds), max(step_seconds)
    slope = max(0.0, (step_seconds[many] - step_seconds[few]) / (many - few))
    slope = min(slope, step_seconds[many] / many)
    return max(0.0, step_seconds[many] - many * slope), slope


def _check_workers(workers: Sequence[int], batch_size: int | None) -> list[int]:
    found = sorted({*workers}) if all(isinstance(n, int) and n >= 1 for n in workers) else []
    if not found:
        raise ValueError(f"workers must be whole numbers of at least 1, got {workers!r}")
    if batch_size is not None:
        found = [n for n in found if n <= batch_size]
        if not found:
            raise ValueError(
                f"batchSize must give each worker a row, got {batch_size} for {min(workers)} workers"
            )
    return found
