"""Checks settings against the names and types of the columns, before `fit` writes the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from torch import nn

from ringspark.estimators.names import nearest
from ringspark.estimators.techniques import techniques_of
from ringspark.estimators.training.arguments import InputLayout, list_arguments, make_layout
from ringspark.estimators.training.batch_transforms import takes
from ringspark.estimators.training.build import build_empty
from ringspark.estimators.training.make_heads import make_heads, set_outputs
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.objective.metrics import METRICS
from ringspark.estimators.training.objective.own_metrics import find_metric, higher_is_better
from ringspark.estimators.training.objective.own_states import is_torchmetric
from ringspark.estimators.training.optimizers.groups import group_parameters
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.user_code import signature_of
from ringspark.models import ModelSpec
from ringspark.models.adapters import AdaptedNetwork
from ringspark.models.network_copy import HOOKS
from ringspark.models.registry import MODELS
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import Array, HashBuckets, Padded
from ringspark.pipelines.kinds.base import BatchArray
from ringspark.pipelines.manifest import Split


def check_schema(
    config: TrainConfig, objects: UserObjects, columns: Sequence[Column], splits: Sequence[Split]
) -> tuple[Head, ...]:
    """Raises ValueError if settings and columns do not fit; returns the heads: loss and metrics per label.

    Args:
        columns: The inputs, labels and weight, each with its type; shapes may be unknown.
        splits: Splits that may have rows.
    """
    inputs = tuple(chain.from_iterable(list_arguments(columns, config.input_columns)))
    _check_targets(config, {column.name: column for column in columns})
    layout = _layout(columns, inputs)
    if objects.transform_batch is not None or objects.transform_in_prediction is not None:
        _check_transforms(config, objects, inputs, layout)
    is_ours = config.model is not None and ModelSpec.from_json(config.model).target in MODELS
    # The constructor of a user's class may fail on the meta device.
    if is_ours or (config.model is None and objects.module is not None):
        empty = build_empty(config, objects)
        check_network(config, objects, empty)
        if config.parameter_groups:
            group_parameters(empty, config.parameter_groups)
    heads = make_heads(set_outputs(config, (1,) * len(config.label_columns)), objects)
    for name, metric in objects.metrics.items():
        called = metric.update if is_torchmetric(metric) else metric
        if problem := _refusal(called, 2):
            raise ValueError(
                f"metric {name!r} cannot take outputs and labels: {problem}; it is called as "
                "metric(outputs, labels)"
            )
    monitor = find_monitor(config, objects, heads, splits)
    if config.looks_for_best and (monitored := find_metric(monitor.split("_", 1)[1], config.metrics)):
        own = objects.metrics.get(monitored)
        if (METRICS[monitored].higher_is_better if own is None else higher_is_better(own)) is None:
            raise ValueError(
                f"monitor {monitor!r} is of a metric that does not say whether more is better; set its "
                "attribute higher_is_better to True or False, or monitor something else"
            )
    return heads


def check_network(config: TrainConfig, objects: UserObjects, module: nn.Module) -> None:
    """Raises ValueError if the network does not work with several workers, the mesh or the default loss."""
    model = f"model {type(module).__name__}"
    for name, layer in module.named_modules() if config.num_workers > 1 else ():
        # Its forward pass waits for all workers, but a worker without rows in a step runs no forward pass.
        if isinstance(layer, nn.SyncBatchNorm):
            raise ValueError(
                f"layer {name!r} of {model} is a SyncBatchNorm, which hangs where a "
                "worker has no rows in a step; take BatchNorm, GroupNorm or LayerNorm"
            )
        # Its forward pass changes the weights of this worker's rows, and nothing synchronizes the change.
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise ValueError(
                f"layer {name!r} of {model} is an embedding with max_norm, which "
                "shortens the rows that a worker's own batch uses, so that the workers' weights would "
                "diverge; leave max_norm out and set weightDecay, or set numWorkers=1"
            )
    for technique in techniques_of(config):
        technique.check_network(config, objects, module)
    sharded = config.num_workers > 1 and config.sync.sharding == "parameters"
    for name, parameter in module.named_parameters() if sharded else ():
        if any(getattr(parameter, kind, None) for kind in HOOKS):
            raise ValueError(
                f"parameter {name!r} of {model} has a hook, but sync={config.sync!r} replaces parameters by "
                "shards without hooks; set sync=Zero(stage=2), or change the gradient in the layer's own hook"
            )
    if isinstance(module, AdaptedNetwork):
        module.check_settings(config.task, config.losses)


def find_monitor(
    config: TrainConfig, objects: UserObjects, heads: Sequence[Head], splits: Sequence[Split]
) -> str:
    """Returns the history's entry that `monitor` means; raises ValueError if there will be none.

    A name without a split, such as "loss", means the value on the first of `splits`.
    """
    transform = objects.transform_batch
    # Metrics of training rows need their outputs and their own labels.
    has_train_metrics = not config.has_own_step and (transform is None or not takes(transform, "labels"))
    names = ["loss", *heads[0].metrics]
    if len(heads) > 1:
        names = ["loss", *(f"{part}_{head.label}" for head in heads for part in ("loss", *head.metrics))]
    known = [
        f"{split}_{name}"
        for split in splits
        for name in names
        if split == "validation" or has_train_metrics or name.startswith("loss")
    ]
    wanted = config.monitor or "loss"
    for name in (wanted, f"{splits[0]}_{wanted}"):
        if name in known:
            return name
    hint = nearest(wanted, [*known, *names]) or f"; give one of {known}"
    if wanted.startswith("validation_") and "validation" not in splits:
        hint = "; no row is held out: set validationFraction or validationIndicatorCol"
    raise ValueError(f"monitor {wanted!r} is no entry of this training's history{hint}")


def _layout(columns: Sequence[Column], names: Sequence[str]) -> InputLayout:
    arrays: dict[str, BatchArray] = {}
    for column in columns:
        # Each array of a dense column has an entry per row; its shape may be unknown yet.
        dense = dict.fromkeys(column.kind.batch_names(column.name), BatchArray(""))
        arrays |= dense if column.is_dense else column.kind.arrays(column.name)
    return make_layout([(name, arrays[name]) for name in names])


def _check_targets(config: TrainConfig, columns: dict[str, Column]) -> None:
    for name in (*config.label_columns, *filter(None, [config.weight_column])):
        if name in columns and not columns[name].is_dense:
            dense = "the type Vector()" if columns[name].kind.tag == "sparse" else "arrays of one length"
            raise ValueError(
                f"column {name!r} is {columns[name].kind.tag}, but a label or weight must be dense; "
                f"give the column {dense}"
            )
    weight = config.weight_column
    if weight is not None and weight in columns and not _is_number(columns[weight]):
        raise ValueError(f"weightCol {weight!r} holds arrays; give a column with one number per row")
    if config.task == "any":
        return
    (name,) = config.label_columns
    column = columns.get(name)
    if column is None:  # one of the arrays of a column, which only shards can have as a label
        return
    if config.task == "classification" and not _is_number(column):
        raise ValueError(
            f"labelCol {name!r} holds arrays; give one class number per row, or use TorchEstimator"
        )
    if isinstance(column.kind, HashBuckets):
        raise ValueError(
            f"labelCol {name!r} is of HashBuckets, which may give two strings one number and does not store "
            f"the strings; take columns={{{name!r}: Vocabulary()}}, the default of TorchClassifier"
        )
    if isinstance(column.kind, Padded):
        raise ValueError(
            f"labelCol {name!r} is Padded, and loss and metrics would take its padding for labels; make its "
            "arrays of one length, or take TorchEstimator with a loss that leaves the padding out"
        )


def _is_number(column: Column) -> bool:
    # An array of length 1 is no number.
    return not isinstance(column.kind, Array | Padded) and not column.row_shape


def _check_transforms(
    config: TrainConfig, objects: UserObjects, inputs: Sequence[str], layout: InputLayout
) -> None:
    for setting, given in (
        ("transformBatch", objects.transform_batch),
        ("transformInPrediction", objects.transform_in_prediction),
    ):
        if given is None:
            continue
        if layout:
            raise ValueError(
                f"{setting} needs inputs with one entry per row, but {list(inputs)} concatenate "
                f"rows of varying length; leave {setting} out, or take Padded() columns"
            )
        more = [
            name for name in ("labels", "step_seed") if setting == "transformBatch" and takes(given, name)
        ]
        if problem := _refusal(given, len(inputs), **dict.fromkeys(more)):
            raise ValueError(
                f"{setting} cannot take the inputs {list(inputs)}: {problem}; it is called on a whole batch, "
                "as transform(*inputs)"
            )
    if config.weight_column is not None and takes(objects.transform_batch, "labels"):
        raise ValueError(
            f"weightCol {config.weight_column!r} gives one weight per row, and a transformBatch that takes "
            "labels may move or mix rows, so the weights would not fit; leave out one of the two settings"
        )


def _refusal(called: Callable[..., Any], num_arguments: int, **named: Any) -> str:
    """Returns why a function or module cannot take these arguments; "" if it can or has no signature."""
    try:
        signature_of(called).bind(*[None] * num_arguments, **named)
    except TypeError as error:
        return str(error)
    return ""
