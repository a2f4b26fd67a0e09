"""Whether this model, these settings and this data go together: asked on the driver, before a gang.

Everything here reads the manifest (schema and statistics of the one writing pass) and runs the
module once on two rows of zeros; no data is read.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from ringspark.estimators.collectives import collective_class
from ringspark.estimators.training.config import TrainConfig, UserObjects, segment_policy
from ringspark.estimators.training.losses import LOSSES, default_loss
from ringspark.estimators.training.optimizers import OPTIMIZERS, check_name
from ringspark.estimators.training.schedules import SCHEDULES
from ringspark.models import ModelSpec, apply_activation_checkpoint
from ringspark.pipelines import ShardManifest, check_engine

PROBE_ROWS = 2


def check_names(config: TrainConfig, objects: UserObjects) -> None:
    """Refuses unknown names of optimizer, schedule, loss and collective.

    Raises:
        ValueError: One sentence with the known names.
    """
    if objects.optimizer is None:
        check_name("optimizer", config.optimizer, OPTIMIZERS)
    if objects.lr_schedule is None:
        check_name("lrSchedule", config.lr_schedule, SCHEDULES)
    if objects.loss is None and config.loss != "auto":
        check_name("loss", config.loss, LOSSES)
    collective_class(config.collective)
    check_engine(config.reader)


def build_module(config: TrainConfig, objects: UserObjects) -> nn.Module:
    """The module at its start: from the spec, or a copy of the user's own."""
    if config.model is not None:
        return ModelSpec.from_json(config.model).build()
    if objects.module is None:
        raise ValueError("model is not set; give a ModelSpec or an nn.Module")
    module: nn.Module = copy.deepcopy(objects.module)
    return module


def check_training(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest
) -> tuple[TrainConfig, int | None]:
    """Checks data and model against each other.

    Returns:
        The config with its loss named, and the module's output values per row (None where the
        output has no second dimension).

    Raises:
        ValueError: One sentence that names the column or the module, and the remedy.
    """
    check_names(config, objects)
    _check_columns(config, manifest)
    module = build_module(config, objects)
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(f"model {type(module).__name__} has no trainable parameters; unfreeze some")
    shape = _probe(module, config, manifest)
    if config.gradient_checkpointing != "none":
        apply_activation_checkpoint(module, segment_policy(config.gradient_checkpointing))
    width = shape[-1] if len(shape) > 1 else 1
    if objects.loss is None and config.loss == "auto":
        config = replace(config, loss=default_loss(config.task, width))
    if config.task == "classification":
        _check_classes(
            config, manifest, type(module).__name__, shape, config.loss.startswith("bce_with_logits")
        )
    elif config.task == "regression":
        _check_regression(config, manifest, type(module).__name__, shape)
    return config, int(np.prod(shape[1:])) if len(shape) > 1 else None


def _check_columns(config: TrainConfig, manifest: ShardManifest) -> None:
    known = [column.name for column in manifest.columns]
    wanted = [*config.input_columns, config.label_column]
    if config.weight_column is not None:
        wanted.append(config.weight_column)
    for name in wanted:
        if name not in known:
            raise ValueError(f"column {name!r} is not in the shards at {manifest.uri}; they have {known}")
        if not manifest.column(name).is_dense:
            kind = manifest.column(name).kind.tag
            raise ValueError(
                f"column {name!r} is {kind} in the shards at {manifest.uri}, but training takes "
                "one dense array a column; write it with Padded() or Vector(), or read it with open_reader"
            )
    if manifest.select("train").num_rows == 0:
        raise ValueError(f"the shards at {manifest.uri} hold no training rows; check the filter before fit")
    for split, columns in manifest.stats.items():
        for name in wanted:
            if name not in columns:
                continue
            stats = columns[name]
            for count, what in ((stats.nans, "NaN"), (stats.infs, "infinite")):
                if count:
                    raise ValueError(
                        f"column {name!r} has {count} {what} values in the {split} rows; "
                        "filter or replace them before fit"
                    )
    if config.weight_column is not None:
        minima = [columns[config.weight_column].minimum for columns in manifest.stats.values()]
        lowest = min((value for value in minima if value is not None), default=None)
        if lowest is not None and lowest < 0:
            raise ValueError(f"weightCol {config.weight_column!r} must not be negative, got {lowest}")


def _probe(module: nn.Module, config: TrainConfig, manifest: ShardManifest) -> tuple[int, ...]:
    """Shape of the output for two rows of zeros of the data's types."""
    inputs = []
    for name in config.input_columns:
        column = manifest.column(name)
        shape = (PROBE_ROWS, *column.row_shape)
        is_integer = np.dtype(column.dtype).kind in "iu"
        inputs.append(torch.zeros(shape, dtype=torch.int64 if is_integer else torch.float32))
    given = ", ".join(
        f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        for name, t in zip(config.input_columns, inputs, strict=True)
    )
    module.eval()
    try:
        with torch.no_grad():
            output = module(*inputs)
    except Exception as error:
        raise ValueError(
            f"model {type(module).__name__} cannot take the input columns [{given}]: "
            f"{type(error).__name__}: {error}; match the model's input size to the columns"
        ) from error
    finally:
        module.train()
    if not isinstance(output, torch.Tensor):
        raise ValueError(
            f"model {type(module).__name__} must return one tensor, got {type(output).__name__}; "
            "wrap it in a module that returns the logits or values"
        )
    if output.dim() == 0 or output.shape[0] != PROBE_ROWS:
        raise ValueError(
            f"model {type(module).__name__} must return one output per row, shape ({PROBE_ROWS}, ...) for "
            f"{PROBE_ROWS} rows, got {tuple(output.shape)}; keep the batch dimension first"
        )
    return tuple(output.shape)


def _check_classes(
    config: TrainConfig, manifest: ShardManifest, model: str, shape: tuple[int, ...], binary: bool
) -> None:
    label = config.label_column
    if manifest.column(label).row_shape:
        raise ValueError(f"labelCol {label!r} must hold one class number per row, got an array column")
    if len(shape) > 2:
        raise ValueError(
            f"model {model} must return (batch, classes) logits, got {tuple(shape)} for {PROBE_ROWS} rows; "
            "flatten or pool the other dimensions"
        )
    is_binary = len(shape) == 1 or shape[1] == 1
    if is_binary and config.loss == "cross_entropy":
        raise ValueError(
            f"loss 'cross_entropy' needs one logit per class, model {model} gives one; "
            "set loss='bce_with_logits' or give the model 2 outputs"
        )
    num_classes = 2 if binary or len(shape) == 1 or shape[1] == 1 else shape[1]
    for split, columns in manifest.stats.items():
        stats = columns[label]
        if not stats.rows:
            continue
        if stats.fractional:
            raise ValueError(
                f"labelCol {label!r} must hold whole class numbers, {stats.fractional} {split} rows do not; "
                "index it with StringIndexer or use TorchRegressor"
            )
        low, high = int(stats.minimum), int(stats.maximum)  # type: ignore[arg-type]
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"labelCol {label!r} must lie in 0..{num_classes - 1} for the {num_classes} classes of model "
                f"{model}, got {low}..{high} in the {split} rows; use StringIndexer or widen the model"
            )


def _check_regression(
    config: TrainConfig, manifest: ShardManifest, model: str, shape: tuple[int, ...]
) -> None:
    row_shape = manifest.column(config.label_column).row_shape
    label_shape = (PROBE_ROWS, *row_shape)
    squeezed = shape[:-1] if len(shape) == len(label_shape) + 1 and shape[-1] == 1 else shape
    if squeezed != label_shape:
        wanted = f"(batch, {', '.join(map(str, row_shape))})" if row_shape else "(batch,) or (batch, 1)"
        raise ValueError(
            f"model {model} must return {wanted} for labelCol {config.label_column!r}, "
            f"got {tuple(shape)} for {PROBE_ROWS} rows; change the model's last layer"
        )
