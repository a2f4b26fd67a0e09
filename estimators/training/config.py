"""The one value that travels from the driver to every rank: frozen, JSON in and out.

Rules that concern several settings stand in `RULES`, each with its remedy; they are checked
wherever a config is made, so a bad combination never reaches Spark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from ringspark.pipelines import default_engine

Precision = Literal["fp32", "bf16", "fp16"]
Task = Literal["classification", "regression", "any"]
Keep = Literal["last", "best"]
Sharding = Literal["none", "optimizer", "gradients", "parameters"]
Offload = Literal["none", "host", "disk"]
Compression = Literal["none", "bits", "int8", "fp8"]

# JSON has lists where the config has tuples.
_TUPLES = (
    "input_columns",
    "label_columns",
    "losses",
    "loss_weights",
    "parameter_groups",
    "metrics",
    "output_widths",
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a training, apart from the user's own Python objects.

    Attributes:
        shards_uri: Folder of the shards; its manifest is the data.
        run_uri: Folder that progress, history and checkpoints go to.
        model: `ModelSpec` as JSON text, or None where the module travels as an object.
        input_columns: One column per positional argument of `forward`.
        label_columns: One column per output of the network.
        losses: One name per label; a name is unused where `UserObjects.losses` has the object.
        loss_weights: One factor per label in the sum of the losses.
        parameter_groups: See `optimizers.group_parameters`.
        warmup_steps: Steps in which the learning rate rises linearly from 0, before the schedule.
        metrics: Names of `METRICS`, over training and validation rows.
        monitor: The entry of the history that decides what is best; "" for the validation loss, or the
            training loss where no row is held out.
        output_widths: Size of the last dimension of each output, 1 where it has none; found by
            `check_training`.
        patience: Epochs without a better `monitor` before the training stops, None for no such stop.
        min_delta: What counts as better.
        keep: Whether the model is that of the last epoch or of the best.
        batch_size: Rows per optimizer step over all ranks together.
        learning_rate: As the optimizer gets it: never scaled by the number of ranks.
        gradient_checkpointing: See `ringspark.models.apply_activation_checkpoint`; a tuple names submodules.
        activation_offload: Where saved activations wait for the backward pass: see `saved_tensors`.
        activation_compression: How saved activations are packed: see `saved_tensors`.
        sharding: What of the training's state each rank has only its part of: see `STRATEGIES`.
        max_grad_norm: Bound of the global gradient's 2-norm, None for no clipping.
        timeout_seconds: How long a rank waits for the others in one collective call.
    """

    shards_uri: str
    run_uri: str
    input_columns: tuple[str, ...]
    label_columns: tuple[str, ...]
    task: Task = "any"
    model: str | None = None
    weight_column: str | None = None
    losses: tuple[str, ...] = ("auto",)
    loss_weights: tuple[float, ...] = (1.0,)
    optimizer: str = "adamw"
    parameter_groups: tuple[dict[str, Any], ...] = ()
    learning_rate: float = 1e-3
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    metrics: tuple[str, ...] = ()
    output_widths: tuple[int, ...] = ()
    monitor: str = ""
    patience: int | None = None
    min_delta: float = 0.0
    keep: Keep = "last"
    epochs: int = 1
    batch_size: int = 1024
    seed: int = 0
    shuffle: bool = True
    num_workers: int = 1
    use_gpu: bool = False
    collective: str = "horovod"
    precision: Precision = "fp32"
    gradient_checkpointing: str | tuple[str, ...] = "none"
    gradient_accumulation: int = 1
    activation_offload: Offload = "none"
    activation_compression: Compression = "none"
    sharding: Sharding = "none"
    reader: str = field(default_factory=default_engine)
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        for is_broken, message in RULES:
            if is_broken(self):
                raise ValueError(message.format(**{f.name: getattr(self, f.name) for f in fields(self)}))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        values = json.loads(text)
        if isinstance(values["gradient_checkpointing"], list):
            values["gradient_checkpointing"] = tuple(values["gradient_checkpointing"])
        return cls(**values | {name: tuple(values[name]) for name in _TUPLES})


def segment_policy(policy: str | tuple[str, ...]) -> str | int | tuple[str, ...]:
    """`gradientCheckpointing` as `apply_activation_checkpoint` takes it: a number of segments as an int."""
    return int(policy) if isinstance(policy, str) and policy.isdigit() else policy


def _bad_checkpointing(policy: str | tuple[str, ...]) -> bool:
    if isinstance(policy, tuple):
        return not policy
    return policy not in ("none", "sqrt", "all") and not (policy.isdigit() and int(policy) > 0)


Rule = tuple[Callable[[TrainConfig], bool], str]

RULES: tuple[Rule, ...] = (
    (lambda c: c.num_workers < 1, "numWorkers must be at least 1, got {num_workers}"),
    (lambda c: c.epochs < 1, "epochs must be at least 1, got {epochs}"),
    (
        lambda c: c.batch_size < c.num_workers,
        "batchSize counts rows over all workers and must be at least numWorkers ({num_workers}), "
        "got {batch_size}; raise batchSize or lower numWorkers",
    ),
    (
        lambda c: c.gradient_accumulation < 1,
        "gradientAccumulation must be at least 1 micro-batch per step, got {gradient_accumulation}",
    ),
    (
        lambda c: c.gradient_accumulation * c.num_workers > c.batch_size,
        "gradientAccumulation ({gradient_accumulation}) times numWorkers ({num_workers}) must not exceed "
        "batchSize ({batch_size}): a micro-batch would have no rows",
    ),
    (
        lambda c: not 0 < c.learning_rate < math.inf,
        "learningRate must be above 0 and finite, got {learning_rate}",
    ),
    (
        lambda c: len(set(c.label_columns)) < len(c.label_columns),
        "labelCols must not name a column twice, got {label_columns}; copy it under another name",
    ),
    (lambda c: c.weight_decay < 0, "weightDecay must not be negative, got {weight_decay}"),
    (
        lambda c: c.max_grad_norm is not None and not c.max_grad_norm > 0,
        "maxGradNorm must be above 0, got {max_grad_norm}; leave it unset for no clipping",
    ),
    (lambda c: c.warmup_steps < 0, "warmupSteps must not be negative, got {warmup_steps}"),
    (
        lambda c: c.patience is not None and c.patience < 1,
        "patience must be at least 1 epoch, got {patience}; leave it unset for no early stopping",
    ),
    (lambda c: not c.min_delta >= 0, "minDelta must not be negative, got {min_delta}"),
    (lambda c: c.keep not in get_args(Keep), "keep must be 'last' or 'best', got '{keep}'"),
    (
        lambda c: len(c.losses) != len(c.label_columns),
        "loss must be one for all labels or a list with one for each of {label_columns}, got {losses}",
    ),
    (
        lambda c: len(c.loss_weights) != len(c.label_columns),
        "lossWeights must have one weight for each of {label_columns}, got {loss_weights}",
    ),
    (
        lambda c: not all(w >= 0 for w in c.loss_weights) or not any(c.loss_weights),
        "lossWeights must not be negative and not all be 0, got {loss_weights}",
    ),
    (
        lambda c: not 0 < c.timeout_seconds < math.inf,
        "timeoutSeconds must be above 0 and finite, got {timeout_seconds}",
    ),
    (
        lambda c: c.precision not in get_args(Precision),
        "precision must be 'fp32', 'bf16' or 'fp16', got '{precision}'",
    ),
    (
        lambda c: _bad_checkpointing(c.gradient_checkpointing),
        "gradientCheckpointing must be 'none', 'sqrt', 'all', a number of segments or a list of submodule "
        "names, got {gradient_checkpointing!r}",
    ),
    (
        lambda c: c.activation_offload not in get_args(Offload),
        "activationOffload must be 'none', 'host' or 'disk', got '{activation_offload}'",
    ),
    (
        lambda c: c.activation_compression not in get_args(Compression),
        "activationCompression must be 'none', 'bits', 'int8' or 'fp8', got '{activation_compression}'",
    ),
    (
        lambda c: c.sharding not in get_args(Sharding),
        "sharding must be 'none', 'optimizer', 'gradients' or 'parameters', got '{sharding}'",
    ),
    (
        lambda c: c.activation_offload == "host" and not c.use_gpu,
        "activationOffload 'host' moves activations from the GPU to the host's memory, and without useGpu "
        "they are there already; set useGpu=True, or activationOffload='disk'",
    ),
    (
        lambda c: c.sharding == "parameters" and c.collective == "horovod" and c.num_workers > 1,
        "sharding 'parameters' gathers each block's parameters with torch.distributed, which collective "
        "'horovod' does not have; set collective='torch', or sharding='gradients'",
    ),
    (
        lambda c: c.collective == "local" and c.num_workers > 1,
        "collective 'local' serves one worker, got numWorkers={num_workers}; "
        "set collective='horovod' or 'torch'",
    ),
)


@dataclass(frozen=True, kw_only=True)
class UserObjects:
    """What has no JSON form: the user's own module and callables; shipped with Spark's closure.

    Attributes:
        module: Used where `TrainConfig.model` is None; its present weights are the start.
        losses: For each label None or `loss(output, label)`, one value per row, or an `nn` loss
            instance; empty where all have names.
        optimizer: `optimizer(parameters) -> torch.optim.Optimizer`.
        lr_schedule: `lr_schedule(step, num_steps) -> factor` on the learning rate, or
            `lr_schedule(optimizer) -> torch.optim.lr_scheduler.LRScheduler`.
        callbacks: See `callbacks.Callback`.
    """

    module: Any = None
    losses: tuple[Any, ...] = ()
    optimizer: Any = None
    lr_schedule: Any = None
    callbacks: tuple[Any, ...] = ()

    def loss(self, config: TrainConfig, index: int) -> Any:
        """The loss of label `index`: the object where there is one, else its name."""
        given = self.losses[index] if self.losses else None
        return config.losses[index] if given is None else given
