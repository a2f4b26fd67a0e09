"""Checks columns, labels and losses against the data's manifest and the network's outputs."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np
import torch
from torch import nn

from ringspark.estimators.training.arguments import read_layout
from ringspark.estimators.training.check.probe import PROBE_ROWS
from ringspark.estimators.training.check.training import Trial
from ringspark.estimators.training.objective.deviance import check_range, family_of, find_power
from ringspark.estimators.training.objective.losses import resolve_loss, sees_network
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.pipelines import ShardManifest

# Smaller weights lose digits, or are 0, in float32.
_LEAST_WEIGHT = float(np.finfo(np.float32).tiny)

# Loss -> why it cannot be used: its targets are no class numbers, or its inputs are no logits.
NOT_FOR_CLASSES = {
    "BCELoss": "takes probabilities, but TorchClassifier's networks give logits",
    "KLDivLoss": "takes distributions as labels",
    "SoftMarginLoss": "takes the labels -1 and 1, but classes are 0 and 1",
    "HingeEmbeddingLoss": "takes the labels -1 and 1, but classes are 0 and 1",
    "MultiLabelMarginLoss": "takes several labels per row",
    "MultiLabelSoftMarginLoss": "takes several labels per row",
}


def check_losses(training: Trial) -> None:
    """Calls each loss once, to raise its errors before the gang starts."""
    trained = set(training.module.parameters())
    for head, output, labels in zip(training.heads, training.outputs, training.labels, strict=True):
        name = head.loss_name
        power = find_power(name)
        for split in training.manifest.stats.values() if power is not None else ():
            if head.label in split and (least := split[head.label].minimum) is not None:
                check_range(head.label, name, least)
        if power is not None and (training.config.task == "classification" or (output < 0).any()):
            raise ValueError(
                f"loss {family_of(name)!r} compares the label with a positive mean, but model "
                f"{type(training.module).__name__} returns other numbers; use TorchRegressor, and end the "
                "network with torch.nn.Softplus or torch.exp, or set another loss"
            )
        if training.config.task == "classification" and (reason := NOT_FOR_CLASSES.get(name)):
            raise ValueError(f"loss {name!r} {reason}; take 'cross_entropy' or 'bce_with_logits'")
        own = set(head.loss.parameters()) if isinstance(head.loss, nn.Module) else set()
        _check_no_parameters(name, own - trained)
        if head.is_per_member or sees_network(head.loss):
            continue  # its loss takes outputs of training mode, and these are of evaluation mode
        output = output.detach().float().requires_grad_()
        try:
            rows = resolve_loss(head.loss)(output, labels)
            if rows.shape != (len(labels),):
                raise ValueError(
                    f"it must return one value per row, shape ({len(labels)},), got {tuple(rows.shape)}"
                )
        except Exception as error:
            given = f"output {tuple(output.shape)} and labelCol {head.label!r} {tuple(labels.shape)}"
            raise ValueError(
                f"loss {name!r} cannot take {given}: {type(error).__name__}: {error}; set another loss, "
                "or match the model's output to the label"
            ) from error
        _check_no_parameters(name, find_leaves(rows) - trained - {output})


def find_leaves(result: torch.Tensor) -> set[torch.Tensor]:
    """Returns the tensors for which a backward pass from `result` computes gradients."""
    found, waiting = set(), {result.grad_fn}
    known = {None, *waiting}
    while waiting:
        node: Any = waiting.pop()
        if hasattr(node, "variable"):
            found.add(node.variable)
        following = {after for after, _ in getattr(node, "next_functions", ())} - known
        known |= following
        waiting |= following
    return found


def _check_no_parameters(loss: str, parameters: Set[torch.Tensor]) -> None:
    trainable = [tuple(parameter.shape) for parameter in parameters if parameter.requires_grad]
    if trainable:
        raise ValueError(
            f"loss {loss!r} has {len(trainable)} trainable parameters, of shapes {trainable[:5]}, which no "
            "optimizer holds; make them parameters of the model and let the loss take (module, inputs, "
            "outputs, labels), or call requires_grad_(False) on them"
        )


def check_columns(config: TrainConfig, manifest: ShardManifest) -> None:
    """Raises ValueError if there are no training rows, or a column has values that no network can take."""
    read_layout(manifest, config.input_columns)
    names = dict.fromkeys(manifest.column_of(name).name for name in config.columns)
    if manifest.select("train").num_rows == 0:
        raise ValueError(f"the shards at {manifest.uri} hold no training rows; check the filter before fit")
    for split, columns in manifest.stats.items():
        for name in names:
            if name not in columns:
                continue
            stats = columns[name]
            if stats.nans or stats.infs:
                values = f"{stats.nans} NaN" if stats.nans else f"{stats.infs} infinite"
                raise ValueError(
                    f"column {name!r} has {values} values in the {split} rows; "
                    "filter or replace them before fit"
                )
            largest = max(abs(stats.minimum or 0), abs(stats.maximum or 0))
            if largest > float(np.finfo(np.float32).max):
                raise ValueError(
                    f"column {name!r} holds values up to {largest:.3g} in the {split} rows, but networks "
                    "compute in float32, which ends at 3.4e38; scale the column before fit"
                )
    if config.weight_column is not None:
        _check_weights(config.weight_column, manifest)


def _check_weights(name: str, manifest: ShardManifest) -> None:
    manifest.column(name)  # refuses an array of a column
    for split, columns in manifest.stats.items():
        stats = columns[name]
        if stats.minimum is not None and stats.minimum < 0:
            raise ValueError(f"weightCol {name!r} must not be negative, got {stats.minimum}; drop these rows")
        if stats.rows and stats.maximum is not None and stats.maximum < _LEAST_WEIGHT:
            reason = (
                "is 0",
                "which leaves nothing to average; leave the column out or give some rows a weight",
            )
            if stats.maximum:
                least = f"networks compute in float32, which begins at {_LEAST_WEIGHT:.3g}"
                reason = f"is at most {stats.maximum:g}", f"but {least}; multiply the weights by a constant"
            raise ValueError(f"weightCol {name!r} {reason[0]} in all {split} rows, {reason[1]}")


def check_classes(training: Trial) -> None:
    head, model, shape = training.heads[0], type(training.module).__name__, training.shapes[0]
    label, loss = head.label, head.loss
    if len(shape) > 2:
        raise ValueError(
            f"model {model} must return (batch, classes) logits, got {tuple(shape)} for {PROBE_ROWS} rows; "
            "flatten or pool the other dimensions"
        )
    is_binary = len(shape) == 1 or shape[1] == 1
    name = loss if isinstance(loss, str) else type(loss).__name__
    if is_binary and name in ("cross_entropy", "CrossEntropyLoss", "NLLLoss"):
        raise ValueError(
            f"loss {name!r} needs one logit per class, model {model} gives one; "
            "set loss='bce_with_logits' or give the model 2 outputs"
        )
    # An ensemble of binary networks returns one logit per member.
    per_member = isinstance(loss, str) and loss.startswith("bce_with_logits")
    num_classes = 2 if per_member or is_binary else shape[1]
    for split, columns in training.manifest.stats.items():
        stats = columns[label]
        if not stats.rows:
            continue
        if stats.fractional:
            raise ValueError(
                f"labelCol {label!r} must hold whole class numbers, {stats.fractional} {split} rows do not; "
                "index it with StringIndexer or use TorchRegressor"
            )
        low, high = int(stats.minimum), int(stats.maximum)  # type: ignore[arg-type]
        # The statistics hold only the smallest label; another one below 0 fails in its batch.
        low = 0 if low == head.ignored else low
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"labelCol {label!r} must lie in 0..{num_classes - 1} for the {num_classes} classes of model "
                f"{model}, got {low}..{high} in the {split} rows; use StringIndexer or widen the model"
            )


def check_regression(training: Trial) -> None:
    label, shape = training.heads[0].label, training.shapes[0]
    row_shape = training.manifest.array(label).shape
    label_shape = (PROBE_ROWS, *row_shape)
    if training.config.quantiles and not row_shape:
        label_shape = (PROBE_ROWS, len(training.config.quantiles))
    squeezed = shape[:-1] if len(shape) == len(label_shape) + 1 and shape[-1] == 1 else shape
    if squeezed != label_shape:
        wanted = f"(batch, {', '.join(map(str, row_shape))})" if row_shape else "(batch,) or (batch, 1)"
        raise ValueError(
            f"model {type(training.module).__name__} must return {wanted} for labelCol {label!r}, "
            f"got {tuple(shape)} for {PROBE_ROWS} rows; change the model's last layer"
        )
