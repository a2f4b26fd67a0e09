"""`plan_memory`: the memory of a training step on one rank, and the settings that would fit a budget.

The figures are exact for the tensors of torch's operators; scratch memory inside kernels mostly does not
count.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ringspark.estimators.memory.shares import shard_group_size, shares
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.options.sync import shard_state
from ringspark.estimators.training.build import build_empty
from ringspark.estimators.training.settings.byte_sizes import parse_bytes, show_bytes
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.settings.memory import Memory
from ringspark.estimators.training.settings.network import Objects
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.estimators.training.settings.training import Training
from ringspark.estimators.training.settings.workers import Workers
from ringspark.extras.planning.memory.columns import columns_of, shard_columns
from ringspark.extras.planning.memory.measured_ranks import MeasuredRanks
from ringspark.extras.planning.memory.report import DEFAULTS, MemoryPlan, changed_settings
from ringspark.extras.planning.memory.search import find_settings
from ringspark.extras.planning.planned_config import (
    explain_failure,
    first_error_line,
    make_config,
    network_name,
)
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest


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


class Planner(MeasuredRanks):
    """Makes memory plans; runs each step once, however many plans need it."""

    def plan(self, budget: int | None = None, budget_name: str = "the budget") -> MemoryPlan:
        """Returns the config's plan; if it exceeds the budget, the plan suggests settings that fit."""
        plan = self._plan_of(self.config, budget)
        if budget is None:
            return plan
        if plan.fits:
            return replace(plan, verdict=f"fits the budget of {show_bytes(budget)}")
        fitting, least = find_settings(self.config, self.num_rows, self._peak_of, budget)
        suggest = tuple(self._plan_of(other, budget) for other in fitting)
        verdict = (
            f"training needs {show_bytes(plan.peak)} per worker, {budget_name} is {show_bytes(budget)}"
            f"{self._remedy(plan, suggest, least)}"
        )
        return replace(plan, suggest=suggest, verdict=verdict)

    def _remedy(self, plan: MemoryPlan, suggest: tuple[MemoryPlan, ...], least: TrainConfig | None) -> str:
        if suggest:
            others = [
                f"{changed_settings(other.settings, plan.settings)} needs {show_bytes(other.peak)}"
                for other in suggest
            ]
            return f"; {', or '.join(others)}"
        if least is None:
            return "; no other setting suits this network"
        smallest = self._plan_of(least, None)
        changed = changed_settings(smallest.settings, plan.settings)
        return f", and no settings fit: {changed} still needs {show_bytes(smallest.peak)}"

    def _peak_of(self, config: TrainConfig) -> int | None:
        try:
            return self._plan_of(config, None).peak
        # Settings that do not suit the network (no kernel in 16 bits) are not suggested; the plan of the
        # config has already raised the network's own errors.
        except Exception:
            return None

    def _plan_of(self, config: TrainConfig, budget: int | None) -> MemoryPlan:
        if config.axes["expert"] > 1 and config.sync.sharding != "none":
            raise ValueError(
                f"the memory of a mesh over 'expert' with sharding={config.sync.sharding!r} cannot be "
                "planned; plan it with sharding='none', which needs more memory"
            )
        num_micro = min(config.gradient_accumulation, self.num_rows)
        fullest = self.measure_step(config, num_micro).find_fullest(config, num_micro)
        peak = fullest.peak
        names = [name for name in ("optimizer", *DEFAULTS, "collective", "numWorkers") if name in SETTINGS]
        share = shares(config.sync.sharding, shard_group_size(config))
        most: dict[str, Any] = {p: int(n * share.get(p, 1.0)) for p, n in fullest.rank.parts.items()}
        return MemoryPlan(
            # The Params that determine memory, by name.
            settings={name: getattr(config, SETTINGS[name].field) for name in names}
            | {"sharding": config.sync.sharding},
            rows=self.num_rows,
            peak=peak.total,
            at_peak=peak.parts,
            activations=peak.most_activations,
            batch=peak.parts["batch"],
            communication=peak.parts["communication"],
            checkpoint=fullest.copied,
            budget=budget,
            **most,
        )


def check_budget(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest, budget: int | None
) -> None:
    """Raises ValueError if a step needs more bytes per worker than `budget`. Runs on the driver."""
    if budget is None:
        return
    try:
        columns = shard_columns(config, manifest, config.most_rows)
        plan = Planner(config, objects, *columns).plan(budget, "memoryBudget")
    # A network that fails only on fake tensors must not end a fit.
    except Exception as error:
        warnings.warn(
            f"memoryBudget {show_bytes(budget)} could not be checked: model {network_name(config, objects)} "
            f"does not run without data: {first_error_line(error)}",
            UserWarning,
            stacklevel=8,
        )
        return
    if not plan.fits:
        raise ValueError(plan.verdict)


def plan_least(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest
) -> tuple[nn.Module, int, int]:
    """Plans one step on two rows, on fake tensors.

    Returns the network on `meta`, and lower bounds of the bytes of gradients and of optimizer state on a
    worker, without sharding.
    """
    whole = config.without_sharding()
    plain = replace(
        whole,
        use_gpu=False,
        # Without the axis `shard`, whose ranks gather the weights in each step.
        parallelism=whole.parallelism if config.cuts_network else Mesh(),
        precision="fp32",
        gradient_checkpointing="none",
        gradient_accumulation=1,
        activation_offload="none",
        activation_compression="none",
    )
    # The driver does not know the losses yet; any loss that uses all outputs suffices.
    losses = (lambda output, label: output,) * len(config.label_columns)
    try:
        planner = Planner(plain, replace(objects, losses=losses), *shard_columns(config, manifest, 2))
        plan = planner.plan()
    except MemoryError:
        raise
    # Code that fails only on fake tensors must not end a training: only the parameters count then.
    except Exception:
        return build_empty(config, objects), 0, 0
    return planner.empty, plan.gradients, plan.optimizer_state
