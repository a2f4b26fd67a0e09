"""Makes a training's config for a planner, from a network and a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from ringspark.estimators.training.check.driver import check_names
from ringspark.estimators.training.objective.losses import default_loss
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.settings.training import Training
from ringspark.extras.planning.memory.columns import BatchColumn
from ringspark.models import ModelSpec


def make_config(
    model: ModelSpec | nn.Module,
    inputs: Sequence[BatchColumn],
    labels: Sequence[BatchColumn],
    optimizer: Any,
    loss: Any,
    **settings: Any,
) -> tuple[TrainConfig, UserObjects]:
    """Returns the config of one worker; the batch has as many rows as the columns.

    `settings` are other fields of the config.

    Raises:
        ValueError: A setting is wrong.
    """
    losses = list(loss) if isinstance(loss, list | tuple) else [loss] * len(labels)
    losses = [
        ("cross_entropy" if label.dtype == torch.int64 else default_loss("any", 1))
        if isinstance(entry, str) and entry == "auto"
        else entry
        for entry, label in zip(losses, labels, strict=True)
    ]
    config = TrainConfig(
        shards_uri="",
        run_uri="",
        model=model.to_json() if isinstance(model, ModelSpec) else None,
        input_columns=tuple(f"input {i}" for i in range(len(inputs))),
        label_columns=tuple(f"label {i}" for i in range(len(labels))),
        losses=tuple(entry if isinstance(entry, str) else type(entry).__name__ for entry in losses),
        loss_weights=(1.0,) * len(labels),
        optimizer=optimizer if isinstance(optimizer, str) else Training.optimizer,
        batch_size=labels[0].shape[0],
        reader="arrow",
        **cast(Any, settings),
    )
    objects = UserObjects(
        module=None if isinstance(model, ModelSpec) else model,
        losses=tuple(None if isinstance(entry, str) else entry for entry in losses),
        optimizer=None if isinstance(optimizer, str) else optimizer,
    )
    check_names(config, objects)
    return replace(config, num_workers=1), objects
