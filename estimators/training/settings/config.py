"""`TrainConfig`, the frozen value that travels as JSON from the driver to every rank.

The settings' declarations and `rules.py` say what it refuses, each with its remedy. It is checked wherever
a config is made, so a bad combination never reaches Spark. The declarations also hold the defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ringspark.estimators.parallel.consistency import Consistency
from ringspark.estimators.training.batch_sizes import BatchSizes
from ringspark.estimators.training.objective.own_metrics import OwnMetric
from ringspark.estimators.training.settings import (
    consistency,
    exchange,
    large_batches,
    local_training,
    memory,
    observation,
    optimization,
    places,
    python_objects,
    recovery,
    tuning,
    workers,
)
from ringspark.estimators.training.settings import parallelism as meshes
from ringspark.estimators.training.settings.choices import (
    Cache,
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
from ringspark.models import MODELS, ModelSpec
from ringspark.pipelines.typed_json import parse_object, record


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a training, apart from the user's own Python objects.

    Attributes:
        shards_uri: Folder of the shards; its manifest is the data.
        run_uri: Folder for progress, history and checkpoints.
        model: `ModelSpec` as JSON text, or None if the module travels as an object.
        input_columns: One column per positional argument of `forward`.
        label_columns: One column per output of the network.
        losses: One name per label; a name is unused if `UserObjects.losses` has the object.
        loss_weights: One factor per label in the sum of the losses.
        parameter_groups: See `optimizers.group_parameters`.
        warmup_steps: Steps in which the learning rate rises linearly from 0, before the schedule.
        freeze: Patterns over names of parameters that are not trained.
        lora: Arguments of `models.lora.add_lora`, and patterns over what is trained beside; None for none.
        pretrained: Place of the first weights, see `tuning.pretrained`; None for those of the model.
        ema_decay: Decay of the average of the weights, see `training.average`; None for no average.
        metrics: Names of `METRICS` or of `UserObjects.metrics`, over training and validation rows.
        own_metrics: The latter, as `check_training` found them.
        monitor: Entry of the history that decides which epoch is best; "" for the validation loss, or the
            training loss if no row is held out.
        output_widths: Size of the last dimension of each output, 1 if it has none; set by `check_training`.
        patience: Epochs without a better `monitor` before the training stops; None for no such stop.
        min_delta: Least difference in `monitor` that counts as better.
        keep: Whether the model is that of the last epoch or of the best.
        pause_after: Epoch after which the training ends with a checkpoint, from which another one of all
            `epochs` goes on; None for none. A population's trainings use it.
        batch_size: Rows per optimizer step over all ranks together; those of the first epoch.
        batch_size_schedule: Pairs (epoch, batch size) of later epochs, which count from 1; see `batch_sizes`.
        noise_scale: Whether the gradient noise scale is measured, see `observation.noise_scale`.
        learning_rate: Rate of the optimizer; never scaled by the number of ranks.
        parallelism: Ranks along each axis of the mesh, and its options: see `settings.parallelism`.
        scale_learning_rate: How rates follow the batch size, with all keys: see `optimizers.rate_scaling`.
        compile: Whether the network is trained compiled; a mode of torch.compile, or True for its default.
        gradient_checkpointing: See `ringspark.models.apply_activation_checkpoint`; a tuple names submodules.
        activation_offload: Place of saved activations until the backward pass: see `saved_tensors`.
        activation_compression: Encoding of saved activations: see `saved_tensors`.
        sharding: Parts of the training's state that are split over the ranks: see `STRATEGIES`.
        gradient_compression: Name and options of a compressor, see `collectives.compressors`.
        consistency: How far apart the ranks may run, with all options: see `parallel.consistency`.
        local_steps: 1, or how ranks step on their own and meet: see `settings.local_training`.
        max_grad_norm: Bound of the global gradient's 2-norm; None for no clipping.
        checkpoint_every_steps: Steps between two checkpoints of the whole training; None for none.
        checkpoint_every_seconds: Seconds between two checkpoints, by the clock of rank 0; 0 for none.
        checkpoint_every_epochs: Epochs between two checkpoints; None for none.
        keep_checkpoints: Number of newest checkpoints to keep until the training has ended.
        on_non_finite: Handling of a step whose loss or gradient is not finite.
        timeout_seconds: Seconds that a rank may wait in one collective call, or make no progress.
        max_restarts: Number of times that a gang which lost a worker is started again.
        min_workers: Least number of ranks for a restart; None for `num_workers`.
        log_every_steps: Steps between two records of the loss; 0 for none.
        timeline_every_steps: Distance of the steps whose time is recorded, see `observation.timeline`.
        profile_steps: First and last step that torch.profiler watches on rank 0; None for none.
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
    scale_learning_rate: dict[str, Any] = field(
        default_factory=large_batches.SCALE_LEARNING_RATE.default.copy
    )
    warmup_steps: int = optimization.WARMUP_STEPS.default
    weight_decay: float = optimization.WEIGHT_DECAY.default
    max_grad_norm: float | None = optimization.MAX_GRAD_NORM.default
    freeze: tuple[str, ...] = tuple(tuning.FREEZE.default)
    lora: dict[str, Any] | None = tuning.LORA.default
    pretrained: dict[str, Any] | None = tuning.PRETRAINED.default
    ema_decay: float | None = tuning.EMA_DECAY.default
    metrics: tuple[str, ...] = tuple(python_objects.METRICS.default)
    own_metrics: tuple[OwnMetric, ...] = ()
    output_widths: tuple[int, ...] = ()
    monitor: str = ""
    patience: int | None = optimization.PATIENCE.default
    min_delta: float = optimization.MIN_DELTA.default
    keep: Keep = optimization.KEEP.default
    pause_after: int | None = None
    epochs: int = optimization.EPOCHS.default
    batch_size: int = optimization.BATCH_SIZE.default
    batch_size_schedule: tuple[tuple[int, int], ...] = ()
    noise_scale: bool = large_batches.NOISE_SCALE.default
    seed: int = optimization.SEED.default
    shuffle: bool = optimization.SHUFFLE.default
    num_workers: int = workers.NUM_WORKERS.default
    use_gpu: bool = workers.USE_GPU.default
    collective: str = workers.COLLECTIVE.default
    compile: bool | str = workers.COMPILE.default
    parallelism: dict[str, Any] = field(default_factory=dict)
    consistency: dict[str, Any] = field(default_factory=lambda: dict(consistency.CONSISTENCY.default))
    precision: Precision = memory.PRECISION.default
    gradient_checkpointing: str | tuple[str, ...] = memory.NO_CHECKPOINTING
    gradient_accumulation: int = optimization.GRADIENT_ACCUMULATION.default
    activation_offload: Offload = memory.ACTIVATION_OFFLOAD.default
    activation_compression: Compression = memory.ACTIVATION_COMPRESSION.default
    sharding: Sharding = memory.SHARDING.default
    gradient_compression: dict[str, Any] = field(default_factory=exchange.GRADIENT_COMPRESSION.default.copy)
    local_steps: int | dict[str, Any] = local_training.LOCAL_STEPS.default
    reader: str = places.READER.default
    cache: Cache = places.CACHE.default
    checkpoint_every_steps: int | None = recovery.CHECKPOINT_EVERY_STEPS.default
    checkpoint_every_seconds: float = recovery.CHECKPOINT_EVERY_SECONDS.default
    checkpoint_every_epochs: int | None = recovery.CHECKPOINT_EVERY_EPOCHS.default
    keep_checkpoints: int = recovery.KEEP_CHECKPOINTS.default
    on_non_finite: NonFinite = recovery.ON_NON_FINITE.default
    timeout_seconds: float = recovery.TIMEOUT_SECONDS.default
    max_restarts: int = recovery.MAX_RESTARTS.default
    min_workers: int | None = recovery.MIN_WORKERS.default
    log_every_steps: int = observation.LOG_EVERY_STEPS.default
    timeline_every_steps: int | None = observation.TIMELINE_EVERY_STEPS.default
    profile_steps: tuple[int, int] | None = observation.PROFILE_STEPS.default

    def __post_init__(self) -> None:
        for setting in SETTINGS.values():
            if setting.field:
                setting.check(getattr(self, setting.field))
        meshes.sizes_of(self.parallelism, self.num_workers)
        for rule in COMBINATIONS:
            if rule.is_broken(self):
                values = {f.name: getattr(self, f.name) for f in fields(self)}
                raise ValueError(rule.message.format(**values, readers=self._readers))

    @property
    def batch_sizes(self) -> BatchSizes:
        """The batch size of every epoch."""
        return BatchSizes.of(self.batch_size, self.batch_size_schedule, self.epochs)

    @property
    def columns(self) -> list[str]:
        """The columns that a training reads: inputs, labels and weights."""
        weights = [] if self.weight_column is None else [self.weight_column]
        return [*self.input_columns, *self.label_columns, *weights]

    @property
    def axes(self) -> dict[str, int]:
        """Ranks along each axis of the mesh."""
        return meshes.sizes_of(self.parallelism, self.num_workers)

    @property
    def cuts_network(self) -> bool:
        """Whether a rank has less than the whole network, or less than whole rows."""
        return any(self.parallelism.get(axis, 1) > 1 for axis in meshes.MODEL_AXES)

    @property
    def builds_in_parts(self) -> bool:
        """Whether no rank needs the whole network, not even at first: of the networks in `MODELS`.

        A constructor of the user's own may do what cannot be told from outside: hook its parameters, seed,
        keep tensors elsewhere.
        """
        parts_it = self.num_workers > 1 and (self.cuts_network or self.sharding == "parameters")
        # A network from the driver arrives whole; adapters and loaded weights look at its numbers.
        if not parts_it or self.model is None or self.pretrained is not None or self.lora is not None:
            return False
        return ModelSpec.from_json(self.model).target in MODELS

    @property
    def num_copies(self) -> int:
        """Number of shares into which a global batch is dealt: ranks that read different rows."""
        sizes = self.axes
        return sizes["data"] * sizes["shard"] * sizes["expert"]

    @property
    def _readers(self) -> str:
        """The ranks that read different rows, in the words of a message."""
        if self.num_copies == self.num_workers:
            return f"numWorkers ({self.num_workers})"
        return f"the workers that read different rows ({self.num_copies} of numWorkers {self.num_workers})"

    @property
    def is_in_step(self) -> bool:
        """Whether the ranks take each step together."""
        return self.num_workers == 1 or Consistency.of(self.consistency).in_step

    @property
    def sums_gradients(self) -> bool:
        """Whether the ranks sum gradients in every step, and neither push them nor average weights."""
        return self.consistency["name"] == "bsp" and not isinstance(self.local_steps, Mapping)

    @property
    def looks_for_best(self) -> bool:
        """Whether epochs are compared, by `monitor`."""
        return self.keep == "best" or self.patience is not None

    def without_sharding(self) -> TrainConfig:
        """Returns the config of ranks that keep all state of their network, over as many copies of it."""
        mesh = {name: given for name, given in self.parallelism.items() if name != "shard"}
        if self.parallelism.get("shard", 1) > 1:
            mesh["data"] = self.axes["data"] * self.axes["shard"]
        return replace(self, sharding="none", parallelism=mesh)

    def with_workers(self, num_workers: int) -> TrainConfig:
        """Returns the config of a gang of another size, in which 'data' has all workers that others leave."""
        others = {name: given for name, given in self.parallelism.items() if name != "data"}
        return replace(self, num_workers=num_workers, parallelism=others)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Reads the result of `to_json`.

        Raises:
            ValueError: The text is damaged, from another version, or breaks a rule.
        """
        return record(cls, parse_object(text))


def segment_policy(policy: str | tuple[str, ...]) -> str | int | tuple[str, ...]:
    """Returns a policy for `apply_activation_checkpoint`, a number of segments as an int."""
    return int(policy) if isinstance(policy, str) and policy.isdecimal() else policy


@dataclass(frozen=True, kw_only=True)
class UserObjects:
    """The user's own module and callables, which have no JSON form; they travel in Spark's closure,
    but for the weights of a large module: see `launch.train_task.PackedObjects`.

    Attributes:
        module: Used if `TrainConfig.model` is None; training starts from its present weights.
        losses: For each label None or `loss(output, label)`, one value per row, or an `nn` loss
            instance; empty if all have names.
        metrics: By name in the history: torchmetrics objects, and functions (outputs, labels).
        transform_batch: Changes training rows, see `batch_transforms`.
        transform_in_prediction: Prepares the inputs of rows that are validated or predicted.
        optimizer: `optimizer(parameters) -> torch.optim.Optimizer`.
        lr_schedule: `lr_schedule(step, num_steps) -> factor` on the learning rate, or
            `lr_schedule(optimizer) -> torch.optim.lr_scheduler.LRScheduler`.
        callbacks: See `callbacks.Callback`.
    """

    module: Any = None
    losses: tuple[Any, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    transform_batch: Any = None
    transform_in_prediction: Any = None
    optimizer: Any = None
    lr_schedule: Any = None
    callbacks: tuple[Any, ...] = ()

    def loss(self, config: TrainConfig, index: int) -> Any:
        """Returns the loss of label `index`: the object if there is one, else its name."""
        given = self.losses[index] if self.losses else None
        return config.losses[index] if given is None else given
