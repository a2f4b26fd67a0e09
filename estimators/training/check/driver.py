"""Checks on the driver, before a gang starts, that model, settings and data fit together.

The checks read the manifest but no rows, and run the module on two rows of zeros. `CHECKS` lists them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from itertools import count

import torch

from ringspark.estimators.collectives import collective_class
from ringspark.estimators.techniques import techniques_of
from ringspark.estimators.training.arguments import expand_arguments, read_layout
from ringspark.estimators.training.batch_transforms import try_transform
from ringspark.estimators.training.check.data import (
    check_classes,
    check_columns,
    check_losses,
    check_regression,
)
from ringspark.estimators.training.check.optimization import check_average, check_optimization, check_sparse
from ringspark.estimators.training.check.probe import PROBE_ROWS, probe, run_module, samples
from ringspark.estimators.training.check.same_network import check_copy, check_groups, check_prediction
from ringspark.estimators.training.check.schema import check_network, check_schema, find_monitor
from ringspark.estimators.training.check.training import CheckedTraining, Trial, build_networks, copy_objects
from ringspark.estimators.training.checkpoint.tensor_file import check_state
from ringspark.estimators.training.feed import zeros
from ringspark.estimators.training.finetuning.freezing import check_adapters
from ringspark.estimators.training.finetuning.pretrained import check_pretrained
from ringspark.estimators.training.make_heads import set_outputs, settle_heads
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.objective.losses import resolve_loss
from ringspark.estimators.training.objective.metrics import check_metrics
from ringspark.estimators.training.objective.own_metrics import OwnMetric, check_own_tasks, try_metric
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects, segment_policy
from ringspark.models import ModelSpec, apply_activation_checkpoint
from ringspark.models.meta_device import build_on_meta, copy_to_meta
from ringspark.models.outputs import as_outputs
from ringspark.models.process_state import fork_generators, print_any_text
from ringspark.pipelines import ShardManifest, check_engine
from ringspark.pipelines.manifest import Split

# Splits with history entries, in the order in which `monitor` prefers them.
_SPLITS: tuple[Split, ...] = ("validation", "train")

Check = Callable[[Trial], Trial]


def check_names(config: TrainConfig, objects: UserObjects) -> None:
    """Raises ValueError for unknown names of losses, metrics, collective and reader."""
    objects.check_step(config)
    for index in range(len(config.label_columns)):
        loss = objects.loss(config, index)
        if isinstance(loss, str) and loss != "auto":
            resolve_loss(loss)
    if config.metrics:
        known = [name for name in config.metrics if name not in objects.metrics]
        check_metrics(known, config.task, len(config.quantiles or ()))
        check_own_tasks(objects.metrics, config.task)
    collective_class(config.collective)
    check_engine(config.reader)


# Building a network draws random numbers; the fork keeps the driver's own random state.
@fork_generators()
@print_any_text()
def check_training(
    config: TrainConfig,
    objects: UserObjects,
    manifest: ShardManifest,
    heads: Sequence[Head] | None = None,
    check_memory: Callable[[TrainConfig, UserObjects, ShardManifest], object] | None = None,
) -> CheckedTraining:
    """Runs `CHECKS`. Raises ValueError if data and model do not fit together.

    Args:
        heads: Result of `check_schema`; None also runs `check_names` and `check_schema`.
        check_memory: Refuses a network that the driver cannot hold; called before the network is built.
    """
    if heads is None:
        check_names(config, objects)
    config = expand_arguments(config, manifest)
    check_columns(config, manifest)
    copies = copy_objects(objects)
    if check_memory is not None:
        check_memory(config, objects, manifest)
    splits: list[Split] = [split for split in _SPLITS if manifest.select(split).num_rows]
    if heads is None:
        heads = check_schema(config, copies, manifest.columns, splits)
    if objects.module is not None:
        check_copy(config, objects, copies.module, manifest)
        check_groups(config, objects, copies)
    whole, module = build_networks(config, copies)
    training = Trial(
        config=config,
        objects=objects,
        copies=copies,
        manifest=manifest,
        whole=whole,
        module=module,
        heads=tuple(heads),
        splits=tuple(splits),
    )
    for setting, check in CHECKS:
        if not setting or getattr(training.config, setting) not in (None, "none", ()):
            training = check(training)
    return training.finish()


def _check_network(training: Trial) -> Trial:
    check_network(training.config, training.objects, training.whole)
    check_state(training.module.state_dict())
    return training


def _check_prediction(training: Trial) -> Trial:
    config, module = training.config, training.module
    if training.whole is module and config.lora is None:
        given = training.objects.module
        spec = None if config.model is None else ModelSpec.from_json(config.model)
        skeleton = copy_to_meta(given) if spec is None else build_on_meta(spec.build)
        check_prediction(config, training.copies, module, skeleton, training.manifest)
    return training


def _check_order(training: Trial) -> Trial:
    """Warns if the inputs are arguments of `forward` by name, but come in another order."""
    config, module = training.config, training.module
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, p in signature(module.forward).parameters.items() if p.kind in kinds]
    taken, given = names[: len(config.input_columns)], list(config.input_columns)
    if taken != given and sorted(taken) == sorted(given):
        warnings.warn(
            f"inputs {given} are passed by position, but forward of {type(module).__name__} takes {taken}; "
            "give inputCols in the order of forward",
            UserWarning,
            stacklevel=5,
        )
    return training


def _check_outputs(training: Trial) -> Trial:
    """Runs the network, and completes heads, output widths and `monitor` from its outputs."""
    config, objects, manifest = training.config, training.copies, training.manifest
    run = partial(probe, training.module, config, manifest, objects)
    outputs = run() if config.lora is None else check_adapters(training.module, run)
    training = replace(training, outputs=outputs)
    config = set_outputs(config, [shape[-1] if len(shape) > 1 else 1 for shape in training.shapes])
    heads = settle_heads(training.heads, config, objects, manifest)
    monitor = find_monitor(config, objects, heads, training.splits)
    return replace(training, config=config.with_values(monitor=monitor), heads=heads)


def _check_start(training: Trial) -> Trial:
    config = training.config
    assert config.start_weights is not None
    check_pretrained(config.start_weights, training.whole, is_initial=config.initial_weights is not None)
    return training


def _check_batch_transform(training: Trial) -> Trial:
    """Runs the module on rows that transformBatch has changed."""
    manifest, name, shapes = training.manifest, type(training.module).__name__, training.shapes
    given = samples(training.config.input_columns, manifest)
    labels = tuple(zeros(manifest.array(head.label), PROBE_ROWS) for head in training.heads)
    transform = training.copies.transform_batch
    if transform is None:
        return replace(training, inputs=given, labels=labels)
    layout = read_layout(manifest, training.config.input_columns)
    inputs, labels = try_transform(transform, "transformBatch", given, labels, layout)
    got = ", ".join(str(tuple(values.shape)) for values in inputs)
    try:
        found = [tuple(output.shape) for output in as_outputs(run_module(training.module, inputs))]
    except Exception as error:
        raise ValueError(
            f"model {name} cannot take what transformBatch returns, [{got}]: "
            f"{type(error).__name__}: {error}; return inputs that the model's forward takes"
        ) from error
    if found != shapes:
        raise ValueError(
            f"model {name} must return shapes {shapes} in training as in prediction, "
            f"but returns {found} for inputs {got} from transformBatch; let transformInPrediction return "
            "inputs of the same shapes"
        )
    return replace(training, inputs=tuple(inputs), labels=labels)


def _check_task(training: Trial) -> Trial:
    if training.config.task == "classification":
        check_classes(training)
    elif training.config.task == "regression":
        check_regression(training)
    if not training.config.has_own_step:
        check_losses(training)
    return training


def _check_own_metrics(training: Trial) -> Trial:
    given, heads = training.copies.metrics, training.heads
    own = tuple(_try_metric(name, heads, training.outputs, training.manifest) for name in given)
    tried = {metric.name: (given[metric.name], metric.per_row) for metric in own}
    heads = tuple(replace(head, own_metrics=tried) for head in heads)
    return replace(training, config=training.config.with_values(own_metrics=own), heads=heads)


def _try_metric(
    name: str, heads: Sequence[Head], outputs: Sequence[torch.Tensor], manifest: ShardManifest
) -> OwnMetric:
    """Calls a user's metric on rows of every class, or on labels of 0 and 1."""
    metric, given, labels = None, [], []
    for head, output in zip(heads, outputs, strict=True):
        if name not in head.metrics:
            continue
        metric, _ = head.own_metrics[name]
        array = manifest.array(head.label)
        classes = max(PROBE_ROWS, head.width) if head.takes_classes and not array.shape else PROBE_ROWS
        # No dimension of the output has this length, so one number per class does not look like one per row.
        rows = next(n for n in count(classes + 1) if n not in output.shape[1:])
        label = zeros(array, rows)
        numbers = torch.arange(rows) % classes
        labels.append(label + numbers.view(-1, *(1,) * (label.dim() - 1)).to(label.dtype))
        given.append(output[:1].float().expand(rows, *output.shape[1:]))
    return try_metric(name, metric, given, labels)


def _check_techniques(training: Trial) -> Trial:
    for technique in techniques_of(training.config):
        technique.check(training)
    return training


def _check_recomputation(training: Trial) -> Trial:
    """Applies activation checkpointing, to raise its errors; last, because it changes the network."""
    apply_activation_checkpoint(training.whole, segment_policy(training.config.gradient_checkpointing))
    return training


# In this order: each check may use what the checks before it have found. A check with an attribute of the
# config runs only if the attribute is set.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("", _check_network),
    ("", _check_prediction),
    ("", _check_order),
    ("", check_optimization),
    ("ema_decay", check_average),
    ("", check_sparse),
    ("", _check_outputs),
    ("start_weights", _check_start),
    ("", _check_batch_transform),
    ("", _check_task),
    ("metrics", _check_own_metrics),
    ("", _check_techniques),
    ("gradient_checkpointing", _check_recomputation),
)
