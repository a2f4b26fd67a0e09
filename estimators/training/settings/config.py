"""The one value that travels from the driver to every rank: frozen, JSON in and out.

What it refuses stands at the settings' declarations and in `rules.py`, each with its remedy; it is checked
wherever a config is made, so a bad combination never reaches Spark. The defaults are the declarations', too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from ringspark.estimators.training.settings import (
    memory,
    optimization,
    places,
    python_objects,
    recovery,
    workers,
)
from ringspark.estimators.training.settings.choices import (
    Compression,
    Keep,
    NonFinite,
    Offload,
    Precision,
    Sharding,
    Task,
)
from ringspark.estimators.training.settings.rules import COMBINATIONS
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.pipelines.typed_json import parse_object, record


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
        checkpoint_every_steps: Steps between two checkpoints of the whole training; None: not by steps.
        checkpoint_every_seconds: The same by the clock of rank 0; 0: not by seconds.
        checkpoint_every_epochs: The same by epochs; None: not by epochs.
        keep_checkpoints: The newest ones, which are kept until the training has ended.
        on_non_finite: What a step does whose loss or gradient is not finite.
        timeout_seconds: How long a rank waits for the others in one collective call, or makes no progress.
        max_restarts: How often a gang that lost a worker is started again.
        min_workers: Ranks with which a restart may go on; None: `num_workers`.
    """

    shards_uri: str
    run_uri: str
    input_columns: tuple[str, ...]
    label_columns: tuple[str, ...]
    task: Task = "any"
    model: str | None = None
    weight_column: str | None = None
    losses: tuple[str, ...] = (python_objects.LOSS.default,)
    loss_weights: tuple[float, ...] = (1.0,)
    optimizer: str = python_objects.OPTIMIZER.default
    parameter_groups: tuple[dict[str, Any], ...] = tuple(python_objects.PARAMETER_GROUPS.default)
    learning_rate: float = optimization.LEARNING_RATE.default
    lr_schedule: str = python_objects.LR_SCHEDULE.default
    warmup_steps: int = optimization.WARMUP_STEPS.default
    weight_decay: float = optimization.WEIGHT_DECAY.default
    max_grad_norm: float | None = optimization.MAX_GRAD_NORM.default
    metrics: tuple[str, ...] = tuple(optimization.METRICS.default)
    output_widths: tuple[int, ...] = ()
    monitor: str = ""
    patience: int | None = optimization.PATIENCE.default
    min_delta: float = optimization.MIN_DELTA.default
    keep: Keep = optimization.KEEP.default
    epochs: int = optimization.EPOCHS.default
    batch_size: int = optimization.BATCH_SIZE.default
    seed: int = optimization.SEED.default
    shuffle: bool = optimization.SHUFFLE.default
    num_workers: int = workers.NUM_WORKERS.default
    use_gpu: bool = workers.USE_GPU.default
    collective: str = workers.COLLECTIVE.default
    precision: Precision = memory.PRECISION.default
    gradient_checkpointing: str | tuple[str, ...] = memory.NO_CHECKPOINTING
    gradient_accumulation: int = optimization.GRADIENT_ACCUMULATION.default
    activation_offload: Offload = memory.ACTIVATION_OFFLOAD.default
    activation_compression: Compression = memory.ACTIVATION_COMPRESSION.default
    sharding: Sharding = memory.SHARDING.default
    reader: str = places.READER.default
    checkpoint_every_steps: int | None = recovery.CHECKPOINT_EVERY_STEPS.default
    checkpoint_every_seconds: float = recovery.CHECKPOINT_EVERY_SECONDS.default
    checkpoint_every_epochs: int | None = recovery.CHECKPOINT_EVERY_EPOCHS.default
    keep_checkpoints: int = recovery.KEEP_CHECKPOINTS.default
    on_non_finite: NonFinite = recovery.ON_NON_FINITE.default
    timeout_seconds: float = recovery.TIMEOUT_SECONDS.default
    max_restarts: int = recovery.MAX_RESTARTS.default
    min_workers: int | None = recovery.MIN_WORKERS.default

    def __post_init__(self) -> None:
        for setting in SETTINGS.values():
            if setting.field:
                setting.check(getattr(self, setting.field))
        for rule in COMBINATIONS:
            if rule.is_broken(self):
                raise ValueError(rule.message.format(**{f.name: getattr(self, f.name) for f in fields(self)}))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Reads what `to_json` returned.

        Raises:
            ValueError: It is damaged, of another version, or breaks a rule.
        """
        return record(cls, parse_object(text))


def segment_policy(policy: str | tuple[str, ...]) -> str | int | tuple[str, ...]:
    """`gradientCheckpointing` as `apply_activation_checkpoint` takes it: a number of segments as an int."""
    return int(policy) if isinstance(policy, str) and policy.isdigit() else policy


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
