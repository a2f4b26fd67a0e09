"""`plan_memory`: the memory of a training step on one rank, and the settings that would fit a budget.

The figures are exact for the tensors of torch's operators; scratch memory inside kernels mostly does not
count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.options.sync import shard_state
from ringspark.estimators.training.settings.byte_sizes import parse_bytes
from ringspark.estimators.training.settings.memory import Memory
from ringspark.estimators.training.settings.network import Objects
from ringspark.estimators.training.settings.training import Training
from ringspark.estimators.training.settings.workers import Workers
from ringspark.extras.planning.memory.columns import columns_of
from ringspark.extras.planning.memory.planner import Planner
from ringspark.extras.planning.memory.report import MemoryPlan
from ringspark.extras.planning.planned_config import explain_failure, make_config
from ringspark.models import ModelSpec


def plan_memory(
    model: ModelSpec | nn.Module,
    batch: tuple[Any, Any],
    *,
    rows: int | None = None,
    optimizer: Any = Training.optimizer,
    loss: Any = Objects.loss,
    precision: str = Memory.precision,
    gradientCheckpointing: str | int | Sequence[str] = Memory.gradient_checkpointing,
    gradientAccumulation: int = Training.gradient_accumulation,
    activationOffload: str = Memory.activation_offload,
    activationCompression: str = Memory.activation_compression,
    sharding: str = "none",
    collective: str = Workers.collective,
    numWorkers: int = Workers.num_workers,
    useGpu: bool = Workers.use_gpu,
    parallelism: Mapping[str, Any] | None = None,
    budget: int | str | None = None,
) -> MemoryPlan:
    """Plans the bytes of one optimizer step on one worker, in steady state, without allocating anything.

    >>> from ringspark.models import ModelSpec
    >>> spec = ModelSpec("mlp", {"in_features": 32, "hidden": [4096] * 8, "out_features": 1})
    >>> rows = (((1024, 32), "float32"), ((1024,), "float32"))  # inputs, labels
    >>> plan = plan_memory(spec, rows, budget="1g")
    >>> print(plan.verdict)
    training needs 1.8 GiB per worker, the budget is 1.0 GiB; no other setting suits this network

    The keywords are the estimators' Params of the same names, with their defaults.

    Args:
        model: A spec, for which nothing is allocated, or a module, which is not changed.
        batch: (inputs, labels), each one column or a list with one column per argument of `forward` or per
            output. A column is an example tensor (also on "meta") or NumPy array, rows first, or
            (shape, dtype) such as ((1024, 32), "float32"). As in training, integers become int64 and
            other dtypes fp32.
        rows: Rows per worker and optimizer step, over all micro-batches; default: the columns' rows.
            Workers that share one replica of the network have the same rows.
        loss: A loss that the estimators accept; "auto" is cross entropy for integer labels, else mean
            squared error.
        parallelism: The mesh; the plan describes the rank that needs the most memory.
        budget: Bytes per worker, as an int or as Spark writes sizes ("4g"). If the plan does not fit,
            `suggest` holds up to three plans that fit.

    Raises:
        ValueError: A setting cannot be used, or the model cannot be run on these shapes without data.
    """
    inputs, labels = columns_of(batch, rows)
    config, objects = make_config(
        model,
        inputs,
        labels,
        optimizer,
        loss,
        workers=numWorkers,
        policy=gradientCheckpointing,
        parallelism=Mesh.of(parallelism or {}),
        use_gpu=useGpu,
        collective=collective,
        precision=precision,
        gradient_accumulation=gradientAccumulation,
        activation_offload=activationOffload,
        activation_compression=activationCompression,
        sync=shard_state(sharding),
        checkpoint_every_seconds=0.0,
    )
    limit = None if budget is None else parse_bytes(budget)
    with explain_failure(config, objects):
        return Planner(config, objects, inputs, labels).plan(limit)
