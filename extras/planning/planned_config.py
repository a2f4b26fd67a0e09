"""Makes a training's config for a planner, from a network and a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from ringspark.estimators.options.checked import AtLeast1, check
from ringspark.estimators.training.check.driver import check_names
from ringspark.estimators.training.objective.losses import default_loss
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.settings.memory import Memory
from ringspark.estimators.training.settings.training import Training
from ringspark.extras.planning.memory.columns import BatchColumn
from ringspark.models import ModelSpec


def make_config(
    model: ModelSpec | nn.Module,
    inputs: Sequence[BatchColumn],
    labels: Sequence[BatchColumn],
    optimizer: Any,
    loss: Any,
    *,
    workers: int = 1,
    policy: str | int | Sequence[str] = Memory.gradient_checkpointing,
    **settings: Any,
) -> tuple[TrainConfig, UserObjects]:
    """Returns the config of a training in which each worker has the rows of the columns.

    `policy` is `gradientCheckpointing`; `settings` are other fields of the config.

    Raises:
        ValueError: A setting is wrong.
    """
    losses = list(loss) if isinstance(loss, list | tuple) else [loss] * len(labels)
    for index, (entry, label) in enumerate(zip(losses, labels, strict=False)):
        if isinstance(entry, str) and entry == "auto":
            losses[index] = "cross_entropy" if label.dtype == torch.int64 else default_loss("any", 1)
    config = TrainConfig(
        shards_uri="",
        run_uri="",
        model=model.to_json() if isinstance(model, ModelSpec) else None,
        input_columns=tuple(f"input {i}" for i in range(len(inputs))),
        label_columns=tuple(f"label {i}" for i in range(len(labels))),
        losses=tuple(entry if isinstance(entry, str) else type(entry).__name__ for entry in losses),
        loss_weights=(1.0,) * len(labels),
        optimizer=optimizer if isinstance(optimizer, str) else Training.optimizer,
        batch_size=labels[0].shape[0] * workers,
        num_workers=workers,
        gradient_checkpointing=str(policy) if isinstance(policy, str | int) else tuple(policy),
        reader="arrow",
        **cast(Any, settings),
    )
    objects = UserObjects(
        module=None if isinstance(model, ModelSpec) else model,
        losses=tuple(None if isinstance(entry, str) else entry for entry in losses),
        optimizer=None if isinstance(optimizer, str) else optimizer,
    )
    check_names(config, objects)
    return config, objects


def check_hardware(
    repeats: int,
    workers_per_host: int | None,
    cores_per_host: int | None,
    step_seconds: Mapping[int, float] | None,
) -> None:
    check(AtLeast1, repeats, "repeats")
    if step_seconds is not None and (
        len(step_seconds) < 2 or not all(n > 0 and 0 < s < math.inf for n, s in step_seconds.items())
    ):
        raise ValueError(
            "stepSeconds must map at least two numbers of rows to seconds above 0, got "
            f"{dict(step_seconds)!r}"
        )
    for name, value in {"workersPerHost": workers_per_host, "coresPerHost": cores_per_host}.items():
        check(AtLeast1 | None, value, name)


@contextmanager
def explain_failure(config: TrainConfig, objects: UserObjects) -> Iterator[None]:
    """Raises ValueError if the network fails inside the context, where it runs without data."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"model {network_name(config, objects)} cannot be planned without data: "
            f"{first_error_line(error)}; check the batch's shapes, and that no shape in forward depends on "
            "values"
        ) from error


def first_error_line(error: Exception) -> str:
    """Returns the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def network_name(config: TrainConfig, objects: UserObjects) -> str:
    return ModelSpec.from_json(config.model).target if config.model else type(objects.module).__name__
