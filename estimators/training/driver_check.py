"""Checks on the driver, before a gang starts, whether model, settings and data fit together.

The checks use the manifest (schema and statistics from writing the shards) and run the module once on two
rows of zeros; they read no data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ringspark.estimators.collectives import collective_class
from ringspark.estimators.names import check_name, nearest
from ringspark.estimators.training.checkpoint.tensor_file import check_state
from ringspark.estimators.training.feed import zeros
from ringspark.estimators.training.objective.heads import Head, ignored_label, make_heads, with_outputs
from ringspark.estimators.training.objective.losses import resolve_loss
from ringspark.estimators.training.objective.metrics import check_metrics
from ringspark.estimators.training.optimizers.build import build_optimizer
from ringspark.estimators.training.optimizers.late_compiler import do_without_compiler
from ringspark.estimators.training.optimizers.registry import OPTIMIZERS
from ringspark.estimators.training.optimizers.schedules import SCHEDULES, make_rates
from ringspark.estimators.training.probe import PROBE_ROWS, Shape, probe
from ringspark.estimators.training.settings.choices import Task
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects, segment_policy
from ringspark.models import ModelSpec, apply_activation_checkpoint
from ringspark.models.skeleton import copied
from ringspark.pipelines import ShardManifest, check_engine

# Losses whose targets are not class numbers, or whose inputs are not logits.
NOT_FOR_CLASSES = {
    "BCELoss": "takes probabilities, and TorchClassifier's networks give logits",
    "KLDivLoss": "takes distributions as labels",
    "SoftMarginLoss": "takes the labels -1 and 1, and classes are 0 and 1",
    "HingeEmbeddingLoss": "takes the labels -1 and 1, and classes are 0 and 1",
    "MultiLabelMarginLoss": "takes several labels a row",
    "MultiLabelSoftMarginLoss": "takes several labels a row",
}


def check_names(config: TrainConfig, objects: UserObjects) -> None:
    """Refuses unknown names of optimizer, schedule, losses, metrics, collective and reader.

    Raises:
        ValueError: A name is unknown; the error lists the known ones.
    """
    if objects.optimizer is None:
        check_name("optimizer", config.optimizer, OPTIMIZERS)
    if objects.lr_schedule is None:
        check_name("lrSchedule", config.lr_schedule, SCHEDULES)
    for index in range(len(config.label_columns)):
        loss = objects.loss(config, index)
        if isinstance(loss, str) and loss != "auto":
            resolve_loss(loss)
    check_metrics(config.metrics, config.task)
    collective_class(config.collective)
    check_engine(config.reader)


def build_module(config: TrainConfig, objects: UserObjects) -> nn.Module:
    """Returns the untrained module, built from the spec or copied from the user's own."""
    if config.model is not None:
        return ModelSpec.from_json(config.model).build()
    if objects.module is None:
        raise ValueError("model is not set; give a ModelSpec or an nn.Module")
    return copied(objects.module)


def own_optimizer(config: TrainConfig, objects: UserObjects, module: nn.Module) -> torch.optim.Optimizer:
    """Returns the module's optimizer, by the config's settings and the user's factory if there is one."""
    return build_optimizer(
        objects.optimizer or config.optimizer,
        module,
        config.parameter_groups,
        config.learning_rate,
        config.weight_decay,
    )


# Making a network draws random numbers; the fork keeps the driver's own random state.
@torch.random.fork_rng(devices=[])
def check_training(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest
) -> tuple[TrainConfig, list[Shape]]:
    """Checks data and model against each other.

    Returns:
        The config with resolved `losses` and `monitor`, and the shape of one row of each output.

    Raises:
        ValueError: They do not fit; the error names the column or the module, and the remedy.
    """
    check_names(config, objects)
    check_columns(config, manifest)
    module = build_module(config, objects)
    _check_layers(config, module)
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(f"model {type(module).__name__} has no trainable parameters; unfreeze some")
    do_without_compiler()
    # Made once, as the ranks will, so that errors of optimizer and schedule are raised here.
    optimizer = own_optimizer(config, objects, module)
    if config.num_workers > 1 and isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            "optimizer SparseAdam takes sparse gradients alone, and several workers make them dense; take "
            "'adam', or set numWorkers=1"
        )
    num_steps = config.epochs * math.ceil(manifest.select("train").num_rows / config.batch_size)
    make_rates(objects.lr_schedule or config.lr_schedule, optimizer, num_steps, config.warmup_steps)
    outputs = probe(module, config, manifest)
    shapes = [tuple(output.shape) for output in outputs]
    check_state(module.state_dict())
    if config.gradient_checkpointing != "none":
        apply_activation_checkpoint(module, segment_policy(config.gradient_checkpointing))
    widths = [shape[-1] if len(shape) > 1 else 1 for shape in shapes]
    config = with_outputs(config, widths)
    heads = make_heads(config, objects, manifest)
    config = replace(config, monitor=monitored(config.monitor, heads, manifest))
    name = type(module).__name__
    if config.task == "classification":
        _check_classes(heads[0], manifest, name, shapes[0])
    elif config.task == "regression":
        _check_regression(heads[0], manifest, name, shapes[0])
    _check_losses(config.task, heads, outputs, manifest)
    return config, [shape[1:] for shape in shapes]


def _check_layers(config: TrainConfig, module: nn.Module) -> None:
    """Refuses layers whose forward pass waits for all workers, as one without rows in a step runs none."""
    waiting = [name for name, layer in module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
    if config.num_workers > 1 and waiting:
        raise ValueError(
            f"layer {waiting[0]!r} of model {type(module).__name__} is a SyncBatchNorm, which hangs where a "
            "worker has no rows in a step; take BatchNorm, GroupNorm or LayerNorm"
        )


def _check_losses(
    task: Task, heads: Sequence[Head], outputs: Sequence[torch.Tensor], manifest: ShardManifest
) -> None:
    """Applies each loss to the module's outputs for two rows of zeros, and to labels of 0."""
    for head, output in zip(heads, outputs, strict=True):
        name = head.loss_name
        if task == "classification" and (reason := NOT_FOR_CLASSES.get(name)):
            raise ValueError(f"loss {name!r} {reason}; take 'cross_entropy' or 'bce_with_logits'")
        if head.is_per_member:
            # It applies to outputs in training mode, and these are of evaluation.
            continue
        labels = zeros(manifest.array(head.label), PROBE_ROWS)
        try:
            resolve_loss(head.loss)(output.float(), labels)
        except Exception as error:
            given = f"output {tuple(output.shape)} and labelCol {head.label!r} {tuple(labels.shape)}"
            raise ValueError(f"loss {name!r} cannot take {given}: {type(error).__name__}: {error}") from error


def monitored(monitor: str, heads: Sequence[Head], manifest: ShardManifest) -> str:
    """Returns the history's entry that `monitor` means; a bare name prefers the held-out rows.

    Raises:
        ValueError: The history will have no such entry; the error names the nearest one.
    """
    splits = [split for split in ("validation", "train") if manifest.select(split).num_rows]
    names = ["loss", *heads[0].metrics]
    if len(heads) > 1:
        names = ["loss", *(f"{part}_{head.label}" for head in heads for part in ("loss", *head.metrics))]
    known = [f"{split}_{name}" for split in splits for name in names]
    wanted = monitor or "loss"
    for name in (wanted, f"{splits[0]}_{wanted}"):
        if name in known:
            return name
    hint = nearest(wanted, [*known, *names]) or f"; give one of {known}"
    if wanted.startswith("validation_") and "validation" not in splits:
        hint = "; no row is held out: set validationFraction or validationIndicatorCol"
    raise ValueError(f"monitor {wanted!r} is no entry of this training's history{hint}")


def check_columns(config: TrainConfig, manifest: ShardManifest) -> None:
    """Refuses shards whose columns no network can take, or whose rows are none.

    Raises:
        ValueError: Names the column.
    """
    for name in config.columns:
        _check_dense(name, manifest)
    if manifest.select("train").num_rows == 0:
        raise ValueError(f"the shards at {manifest.uri} hold no training rows; check the filter before fit")
    for split, columns in manifest.stats.items():
        for name in config.columns:
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
        _check_weights(config.weight_column, manifest)


def _check_weights(name: str, manifest: ShardManifest) -> None:
    """Refuses weights that are not one number per row, are negative, or are all zero."""
    if manifest.array(name).shape:
        raise ValueError(f"weightCol {name!r} must hold one number per row, got an array column")
    for split, columns in manifest.stats.items():
        stats = columns[name]
        if stats.minimum is not None and stats.minimum < 0:
            raise ValueError(f"weightCol {name!r} must not be negative, got {stats.minimum}")
        if stats.rows and stats.maximum == 0:
            raise ValueError(
                f"weightCol {name!r} is 0 in all {split} rows, which leaves nothing to average; "
                "leave the column out or give some rows a weight"
            )


def _check_dense(name: str, manifest: ShardManifest) -> None:
    """Refuses a column that the shards lack, or that a batch does not hold as one dense array."""
    try:
        manifest.array(name)
    except ValueError:
        column = next((c for c in manifest.columns if c.name == name), None)
        if column is None:
            raise
        dense = "Vector()" if column.kind.tag == "sparse" else "Padded()"
        raise ValueError(
            f"column {name!r} is {column.kind.tag} in the shards at {manifest.uri}, but training takes "
            f"one dense array a column; write it with {dense}, or read it with open_reader"
        ) from None


def _check_classes(head: Head, manifest: ShardManifest, model: str, shape: Shape) -> None:
    label, loss = head.label, head.loss
    if manifest.array(label).shape:
        raise ValueError(f"labelCol {label!r} must hold one class number per row, got an array column")
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
    ignored = ignored_label(resolve_loss(loss))
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
        # The statistics hold only the smallest label; another one below 0 fails in its batch.
        low = 0 if low == ignored else low
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"labelCol {label!r} must lie in 0..{num_classes - 1} for the {num_classes} classes of model "
                f"{model}, got {low}..{high} in the {split} rows; use StringIndexer or widen the model"
            )


def _check_regression(head: Head, manifest: ShardManifest, model: str, shape: Shape) -> None:
    label = head.label
    row_shape = manifest.array(label).shape
    label_shape = (PROBE_ROWS, *row_shape)
    squeezed = shape[:-1] if len(shape) == len(label_shape) + 1 and shape[-1] == 1 else shape
    if squeezed != label_shape:
        wanted = f"(batch, {', '.join(map(str, row_shape))})" if row_shape else "(batch,) or (batch, 1)"
        raise ValueError(
            f"model {model} must return {wanted} for labelCol {label!r}, "
            f"got {tuple(shape)} for {PROBE_ROWS} rows; change the model's last layer"
        )
