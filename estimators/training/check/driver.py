"""Checks on the driver, before a gang starts, that model, settings and data fit together.

The checks read the manifest but no rows, and run the module on two rows of zeros.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from itertools import count

import torch
from torch import nn

from ringspark.estimators import user_code
from ringspark.estimators.collectives import collective_class
from ringspark.estimators.lazy_imports import load_check, load_object
from ringspark.estimators.names import check_name
from ringspark.estimators.options.sync import AllReduce, ParameterServer
from ringspark.estimators.parallel import STRATEGIES
from ringspark.estimators.parallel.data.sparse_rows import sparse_parameters
from ringspark.estimators.parallel.sharded.parameter_shards import (
    ELEMENTWISE,
    check_optimizer,
    is_elementwise,
)
from ringspark.estimators.training.arguments import expand_arguments, read_layout
from ringspark.estimators.training.batch_sizes import Steps
from ringspark.estimators.training.batch_transforms import try_transform
from ringspark.estimators.training.build import build_configured_optimizer, build_module
from ringspark.estimators.training.check.data import (
    check_classes,
    check_columns,
    check_losses,
    check_regression,
)
from ringspark.estimators.training.check.mesh import check_mesh
from ringspark.estimators.training.check.probe import PROBE_ROWS, Shape, probe, run_module, samples
from ringspark.estimators.training.check.same_network import check_copy, check_groups, check_prediction
from ringspark.estimators.training.check.schema import (
    check_network,
    check_schema,
    find_monitor,
    has_train_metrics,
)
from ringspark.estimators.training.checkpoint.reading import check_optimizer as check_optimizer_of
from ringspark.estimators.training.checkpoint.reading import read_record
from ringspark.estimators.training.checkpoint.tensor_file import check_state
from ringspark.estimators.training.feed import Batch, zeros
from ringspark.estimators.training.finetuning.freezing import check_adapters
from ringspark.estimators.training.finetuning.pretrained import check_pretrained
from ringspark.estimators.training.make_heads import set_outputs, settle_heads
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.objective.losses import resolve_loss
from ringspark.estimators.training.objective.metrics import check_metrics
from ringspark.estimators.training.objective.own_metrics import OwnMetric, check_own_tasks, try_metric
from ringspark.estimators.training.optimizers.rate_scaling import RateScaling
from ringspark.estimators.training.optimizers.registry import OPTIMIZERS, defer_compiler_import
from ringspark.estimators.training.optimizers.schedules import SCHEDULES, LearningRates, make_rates
from ringspark.estimators.training.own_step import check_own_step
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects, segment_policy
from ringspark.models import ModelSpec, apply_activation_checkpoint
from ringspark.models.adapters import MESH_SUPPORT
from ringspark.models.hugging_face import LIBRARY
from ringspark.models.meta_device import build_on_meta, copy_to_meta
from ringspark.models.outputs import as_outputs
from ringspark.models.process_state import fork_generators, print_any_text
from ringspark.pipelines import ShardManifest, check_engine
from ringspark.pipelines.manifest import Split

_log = logging.getLogger(__name__)

# The training warns if the initial weights keep a larger share than this in the final average.
MAX_INITIAL_SHARE = 0.5

# Steps of a user's schedule that the driver tries; more would take seconds.
REPLAYED_STEPS = 50_000

CHECK_NETWORK_LOSSES = "ringspark.extras.network_losses.check:check_network_losses"
CHECK_OWN_OPTIMIZER = "ringspark.extras.own_code.optimizer_check:check_own_optimizer"
CHECK_TEACHER = "ringspark.extras.distillation.teacher:check_teacher"
# Checks the network and the noise of a private training.
CHECK_PRIVATE_TRAINING = "ringspark.extras.privacy.check:check_private_training"

# Splits with history entries, in the order in which `monitor` prefers them.
_SPLITS: tuple[Split, ...] = ("validation", "train")


@dataclass(frozen=True, kw_only=True)
class CheckedTraining:
    """A training that passed every check of the driver."""

    config: TrainConfig  # with resolved inputs, `losses`, `monitor`, `output_widths` and `own_metrics`
    objects: UserObjects
    manifest: ShardManifest
    heads: tuple[Head, ...]  # one per output
    shapes: tuple[Shape, ...]  # of one row of each output


def check_names(config: TrainConfig, objects: UserObjects) -> None:
    """Raises ValueError for unknown names of optimizer, schedule, losses, metrics, collective and reader."""
    if (objects.training_step is None) != (config.training_step is None):
        raise ValueError(
            f"the config's training_step is {config.training_step!r}, but UserObjects has "
            f"training_step={objects.training_step!r}; set both, 'own' for a callable"
        )
    if objects.training_step is not None and config.parameter_groups and objects.optimizer is not None:
        raise ValueError(
            f"parameterGroups ({list(config.parameter_groups)}) and an optimizer function both choose rates, "
            "and with trainingStep the function gets the module; set the rates in the function"
        )
    if objects.optimizer is None:
        check_name("optimizer", config.optimizer, OPTIMIZERS)
    if objects.lr_schedule is None:
        check_name("lrSchedule", config.lr_schedule, SCHEDULES)
    for index in range(len(config.label_columns)):
        loss = objects.loss(config, index)
        if isinstance(loss, str) and loss != "auto":
            resolve_loss(loss)
    check_metrics([name for name in config.metrics if name not in objects.metrics], config.task)
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
    check_memory: Callable[[TrainConfig], None] | None = None,
) -> CheckedTraining:
    """Raises ValueError if data and model do not fit together.

    Args:
        heads: Result of `check_schema`; None also runs `check_names` and `check_schema`.
        check_memory: Refuses a network that the driver cannot hold; called before the network is built.
    """
    if heads is None:
        check_names(config, objects)
    config = expand_arguments(config, manifest)
    check_columns(config, manifest)
    given, objects = objects, _copy_objects(objects)
    if check_memory is not None:
        check_memory(config)
    splits: list[Split] = [split for split in _SPLITS if manifest.select(split).num_rows]
    if heads is None:
        heads = check_schema(config, objects, manifest.columns, splits)
    if given.module is not None:
        check_copy(config, given, objects.module, manifest)
        check_groups(config, given, objects)
    whole, module = _build_networks(config, objects)
    check_network(config, whole)
    check_state(module.state_dict())
    if whole is module and config.lora is None:
        spec = None if config.model is None else ModelSpec.from_json(config.model)
        skeleton = copy_to_meta(given.module) if spec is None else build_on_meta(spec.build)
        check_prediction(config, objects, module, skeleton, manifest)
    _check_order(config, module)
    num_steps = _check_optimizer(config, objects, whole, manifest.select("train").num_rows)
    check_own_step(config, objects, module, manifest)
    outputs = check_adapters(module, lambda: probe(module, config, manifest, objects))
    if config.cuts_network:
        if whole is not module and (config.parallelism.plan or config.parallelism.pipeline.cuts):
            _log.warning("parallelism %s is not checked, because it names layers", config.parallelism)
        else:
            check_mesh(config, objects, manifest, module)
    if config.start_weights is not None:
        check_pretrained(config.start_weights, whole, is_initial=config.initial_weights is not None)
    if config.initial_training_state is None:
        _check_average(config, num_steps)
    _check_sparse(config, whole)
    if config.gradient_checkpointing != "none":
        apply_activation_checkpoint(whole, segment_policy(config.gradient_checkpointing))
    shapes = [tuple(output.shape) for output in outputs]
    config = set_outputs(config, [shape[-1] if len(shape) > 1 else 1 for shape in shapes])
    heads = settle_heads(heads, config, objects, manifest)
    monitor = find_monitor(config.monitor, heads, splits, has_train_metrics(objects))
    inputs = samples(config.input_columns, manifest)
    labels = tuple(zeros(manifest.array(head.label), PROBE_ROWS) for head in heads)
    if objects.transform_batch is not None:
        inputs, labels = _check_batch_transform(config, objects, manifest, module, shapes, inputs, labels)
    if config.teacher_column is not None:
        load_object(CHECK_TEACHER)(config, objects, manifest, shapes[0])
    if config.task == "classification":
        check_classes(heads[0], manifest, type(module).__name__, shapes[0])
    elif config.task == "regression":
        check_regression(heads[0], manifest, type(module).__name__, shapes[0])
    if config.training_step is None:
        check_losses(config.task, heads, outputs, labels, module)
    if config.differentiates_twice:
        batch = Batch(inputs=inputs, labels=labels, weight=None)
        load_object(CHECK_NETWORK_LOSSES)(config, heads, module, batch)
    own = tuple(_try_metric(name, heads, outputs, manifest) for name in objects.metrics)
    config = replace(config, monitor=monitor, own_metrics=own)
    tried = {metric.name: (objects.metrics[metric.name], metric.per_row) for metric in own}
    heads = tuple(replace(head, own_metrics=tried) for head in heads)
    if config.privacy is not None:
        load_object(CHECK_PRIVATE_TRAINING)(config, objects, manifest, heads, module, num_steps)
    return CheckedTraining(
        config=config,
        objects=given,
        manifest=manifest,
        heads=heads,
        shapes=tuple(shape[1:] for shape in shapes),
    )


def _copy_objects(objects: UserObjects) -> UserObjects:
    """Copies what the checks would change. Together, because a loss may use layers of the network."""
    if objects.module is None and not any(isinstance(loss, nn.Module) for loss in objects.losses):
        return objects
    return user_code.copy(replace(objects, callbacks=()))


def _build_networks(config: TrainConfig, objects: UserObjects) -> tuple[nn.Module, nn.Module]:
    """Returns the whole network, and the network that the checks run.

    They differ for a `ModelSpec` of the transformers library: the first one is on `meta`, and the second one
    has fewer blocks, so that the driver does not hold the whole network.
    """
    short = None
    if config.model is not None and (spec := ModelSpec.from_json(config.model)).is_hugging_face:
        mesh = config.parallelism
        short = load_object(f"{MESH_SUPPORT[LIBRARY]}:shorten")(
            spec, max(2, mesh.pipeline.stages * mesh.pipeline.virtual)
        )
    if short is None:
        module = build_module(config, objects)
        return module, module
    whole = build_on_meta(partial(build_module, config, objects))
    shorter = replace(config, model=short.to_json())
    try:
        return whole, build_module(shorter, objects)
    except ValueError:  # `freeze` or `lora` name blocks that only the whole network has
        return whole, build_module(replace(shorter, freeze=(), lora=None), objects)


def _check_optimizer(config: TrainConfig, objects: UserObjects, module: nn.Module, num_rows: int) -> int:
    """Makes optimizer and schedule once, to raise their errors here; returns the number of steps."""
    defer_compiler_import()
    optimizer = build_configured_optimizer(config, objects, module)
    if (state := config.initial_training_state) is not None:
        check_optimizer_of(state, read_record(state), optimizer, "or set initialState='weights'")
    if objects.optimizer is not None:
        make = partial(build_configured_optimizer, config, objects)
        load_check(CHECK_OWN_OPTIMIZER)(config, make, module)
    if config.num_workers > 1:
        _check_synchronization(config, optimizer)
    steps = Steps(config.batch_sizes, num_rows)
    scaling = RateScaling.of(config.scale_learning_rate, steps)
    schedule = objects.lr_schedule or config.lr_schedule
    rates = make_rates(schedule, optimizer, steps.total, config.warmup_steps, scaling)
    if objects.lr_schedule is not None:
        _replay(rates, steps.total)
    if scaling is not None:
        _log.info("%s", scaling)
    return steps.total


def _replay(rates: LearningRates, num_steps: int) -> None:
    """Raises ValueError if a user's schedule fails in one of the first steps that the driver can replay."""
    for step in range(min(num_steps, REPLAYED_STEPS)):
        try:
            rates.set(step)
        except Exception as error:  # user code may raise anything
            raise ValueError(
                f"lrSchedule fails in step {step + 1} of {num_steps} ({type(error).__name__}: {error}); make "
                "it last for all steps of the training"
            ) from error


def _check_synchronization(config: TrainConfig, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(config.sync, ParameterServer) or config.sync.sharding == "parameters":
        check_optimizer(optimizer, config.sync)
    mesh = config.parallelism
    if max(mesh.tensor, mesh.expert) > 1 and not is_elementwise(optimizer):
        name = type(optimizer).__name__
        raise ValueError(
            f"parallelism={mesh} gives a worker only shards of parameters, but optimizer {name} needs "
            f"whole parameters; take one of {', '.join(sorted(kind.__name__ for kind in ELEMENTWISE))}, "
            "or set is_elementwise = True in its class if the update of a weight depends only on the "
            "gradient and state of that weight"
        )
    if isinstance(optimizer, torch.optim.SparseAdam) and not isinstance(config.sync, AllReduce):
        raise ValueError(
            f"optimizer SparseAdam takes only sparse gradients, and sync={config.sync!r} makes them dense; "
            "set sync=AllReduce(), or optimizer='adam'"
        )


def _check_batch_transform(
    config: TrainConfig,
    objects: UserObjects,
    manifest: ShardManifest,
    module: nn.Module,
    shapes: Sequence[Shape],
    given: tuple[torch.Tensor, ...],
    labels: tuple[torch.Tensor, ...],
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Runs the module on rows that transformBatch has changed; returns their inputs and labels."""
    layout = read_layout(manifest, config.input_columns)
    inputs, labels = try_transform(objects.transform_batch, "transformBatch", given, labels, layout)
    got = ", ".join(str(tuple(values.shape)) for values in inputs)
    try:
        found = [tuple(output.shape) for output in as_outputs(run_module(module, inputs))]
    except Exception as error:
        raise ValueError(
            f"model {type(module).__name__} cannot take what transformBatch returns, [{got}]: "
            f"{type(error).__name__}: {error}; return inputs that the model's forward takes"
        ) from error
    if found != list(shapes):
        raise ValueError(
            f"model {type(module).__name__} must return shapes {list(shapes)} in training as in prediction, "
            f"but returns {found} for inputs {got} from transformBatch; let transformInPrediction return "
            "inputs of the same shapes"
        )
    return tuple(inputs), labels


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


def _check_sparse(config: TrainConfig, module: nn.Module) -> None:
    tables = sparse_parameters(module)
    if tables and config.num_workers > 1 and not STRATEGIES[config.sync.strategy].takes_sparse:
        warnings.warn(
            f"model {type(module).__name__} has sparse=True in the embedding of {next(iter(tables))!r}, but "
            f"sync={config.sync!r} makes its gradients dense, which take the memory and traffic of the whole "
            "table; leave sparse=True out, or set sync=AllReduce()",
            UserWarning,
            stacklevel=5,
        )


def _check_order(config: TrainConfig, module: nn.Module) -> None:
    """Warns if the inputs are arguments of `forward` by name, but come in another order."""
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


def _check_average(config: TrainConfig, num_steps: int) -> None:
    decay = config.ema_decay
    if decay is not None and decay**num_steps > MAX_INITIAL_SHARE:
        warnings.warn(
            f"emaDecay {decay} leaves {decay**num_steps:.0%} of the initial weights in the average after all "
            f"{num_steps} steps; lower emaDecay to {0.01 ** (1 / num_steps):.2g} for 1 %",
            UserWarning,
            stacklevel=5,
        )
