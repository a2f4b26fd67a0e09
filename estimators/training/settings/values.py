"""The fields of `TrainConfig`, and the values that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ringspark.estimators.options.finetuning import LoRA, Pretrained
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.options.privacy import Privacy
from ringspark.estimators.options.scaling import ScaleLearningRate
from ringspark.estimators.options.sync import AllReduce, Sync
from ringspark.estimators.training.batch_sizes import BatchSizes
from ringspark.estimators.training.objective.losses import NETWORK_LOSS
from ringspark.estimators.training.objective.own_metrics import OwnMetric
from ringspark.estimators.training.settings import (
    data,
    memory,
    network,
    observation,
    recovery,
    training,
    workers,
)
from ringspark.estimators.training.settings.choices import (
    Cache,
    Compression,
    Keep,
    NonFinite,
    Offload,
    Precision,
    Task,
)
from ringspark.models import MODELS, ModelSpec


@dataclass(frozen=True, kw_only=True)
class ConfigValues:
    """The fields of `TrainConfig`. Most fields belong to a `Setting`, whose `words` describe the field.

    Attributes:
        shards_uri: Folder of the shards; its manifest describes the data.
        run_uri: Folder for progress, history and checkpoints.
        model: `ModelSpec` as JSON text; None if `UserObjects.module` holds the model.
        input_columns: One column per positional argument of `forward`.
        label_columns: One column per output of the network.
        losses: One name per label; unused for a label whose loss is in `UserObjects.losses`.
        metrics: Names of built-in metrics and of the user's metrics in `UserObjects.metrics`.
        own_metrics: Properties of the user's metrics; set by `check_training`.
        training_step: Name in `TRAINING_STEPS`, or 'own' for a callable in `UserObjects`.
        output_widths: Last dimension of each output, 1 if it has none; set by `check_training`.
        initial_weights: Folder with the weights of `initialModel`.
        initial_training_state: Checkpoint with the optimizer state of `initialModel`, if the fit takes it.
        teacher_column: Column of the teacher's outputs, which `fit` adds to the rows.
        charged_before: Private steps of `initialModel`, as in `PrivacySpent.charged`.
        pause_after: Epoch after which the training ends with a checkpoint, in a population search.
        pause_after_step: Step within an epoch after which the training ends, if a checkpoint is due there.
    """

    shards_uri: str
    run_uri: str
    input_columns: tuple[str, ...]
    label_columns: tuple[str, ...]
    task: Task = "any"
    model: str | None = None
    weight_column: str | None = None
    losses: tuple[str, ...] = (network.LOSS.default,)
    loss_weights: tuple[float, ...] = (1.0,)
    optimizer: str = training.OPTIMIZER.default
    training_step: str | None = training.TRAINING_STEP.default
    parameter_groups: tuple[dict[str, Any], ...] = tuple(training.PARAMETER_GROUPS.default)
    learning_rate: float = training.LEARNING_RATE.default
    lr_schedule: str = training.LR_SCHEDULE.default
    scale_learning_rate: ScaleLearningRate | None = training.SCALE_LEARNING_RATE.default
    warmup_steps: int = training.WARMUP_STEPS.default
    weight_decay: float = training.WEIGHT_DECAY.default
    max_grad_norm: float | None = training.MAX_GRAD_NORM.default
    freeze: tuple[str, ...] = tuple(network.FREEZE.default)
    lora: LoRA | None = network.LORA.default
    pretrained: Pretrained | None = network.PRETRAINED.default
    initial_weights: str | None = None
    initial_training_state: str | None = None
    ema_decay: float | None = network.EMA_DECAY.default
    teacher_column: str | None = None
    temperature: float = network.TEMPERATURE.default
    alpha: float = network.ALPHA.default
    metrics: tuple[str, ...] = tuple(network.METRICS.default)
    own_metrics: tuple[OwnMetric, ...] = ()
    output_widths: tuple[int, ...] = ()
    monitor: str = ""
    patience: int | None = training.PATIENCE.default
    min_delta: float = training.MIN_DELTA.default
    time_budget_seconds: float | None = training.TIME_BUDGET_SECONDS.default
    keep: Keep = training.KEEP.default
    pause_after: int | None = None
    pause_after_step: int | None = None
    epochs: int = training.EPOCHS.default
    batch_size: int = training.BATCH_SIZE.default
    batch_size_schedule: tuple[tuple[int, int], ...] = ()
    privacy: Privacy | None = training.PRIVACY.default
    charged_before: tuple[tuple[float, float, int], ...] = ()
    noise_scale: bool = training.NOISE_SCALE.default
    seed: int = training.SEED.default
    shuffle: bool = training.SHUFFLE.default
    num_workers: int = workers.NUM_WORKERS.default
    use_gpu: bool = workers.USE_GPU.default
    collective: str = workers.COLLECTIVE.default
    compile: bool | str = workers.COMPILE.default
    parallelism: Mesh = Mesh()  # noqa: RUF009
    sync: Sync = AllReduce()  # noqa: RUF009
    precision: Precision = memory.PRECISION.default
    gradient_checkpointing: str | tuple[str, ...] = memory.NO_CHECKPOINTING
    gradient_accumulation: int = training.GRADIENT_ACCUMULATION.default
    activation_offload: Offload = memory.ACTIVATION_OFFLOAD.default
    activation_compression: Compression = memory.ACTIVATION_COMPRESSION.default
    reader: str = data.READER.default
    cache: Cache = data.CACHE.default
    checkpoint_every_steps: int | None = recovery.CHECKPOINT_EVERY_STEPS.default
    checkpoint_every_seconds: float = recovery.CHECKPOINT_EVERY_SECONDS.default
    checkpoint_every_epochs: int | None = recovery.CHECKPOINT_EVERY_EPOCHS.default
    keep_checkpoints: int = recovery.KEEP_CHECKPOINTS.default
    keep_training_state: bool = recovery.KEEP_TRAINING_STATE.default
    certify: bool = recovery.CERTIFY.default
    on_non_finite: NonFinite = recovery.ON_NON_FINITE.default
    timeout_seconds: float = recovery.TIMEOUT_SECONDS.default
    max_restarts: int = recovery.MAX_RESTARTS.default
    min_workers: int | None = recovery.MIN_WORKERS.default
    log_every_steps: int = observation.LOG_EVERY_STEPS.default
    timeline_every_steps: int | None = observation.TIMELINE_EVERY_STEPS.default
    profile_steps: tuple[int, int] | None = observation.PROFILE_STEPS.default

    @property
    def batch_sizes(self) -> BatchSizes:
        return BatchSizes.of(self.batch_size, self.batch_size_schedule, self.epochs)

    @property
    def columns(self) -> list[str]:
        others = filter(None, (self.weight_column, self.teacher_column))
        return [*self.input_columns, *self.label_columns, *others]

    @property
    def axes(self) -> dict[str, int]:
        """Ranks along each axis of the mesh."""
        return self.parallelism.sizes(self.num_workers)

    @property
    def cuts_network(self) -> bool:
        """Whether a rank has only a part of the network, or only a part of each row."""
        return self.parallelism.cuts_network

    @property
    def builds_in_parts(self) -> bool:
        """Whether each rank builds its shard alone, without the whole network."""
        parts_it = self.num_workers > 1 and (self.cuts_network or self.sync.sharding == "parameters")
        # A network from the driver arrives whole.
        if not parts_it or self.model is None:
            return False
        # A user's constructor may hook parameters, seed, or keep tensors elsewhere.
        spec = ModelSpec.from_json(self.model)
        return spec.target in MODELS or spec.is_hugging_face

    @property
    def differentiates_twice(self) -> bool:
        """Whether a loss may differentiate through the network."""
        return NETWORK_LOSS in self.losses

    @property
    def start_weights(self) -> Pretrained | None:
        """Weights that replace the network's own initial weights."""
        return self.pretrained if self.initial_weights is None else Pretrained(uri=self.initial_weights)

    @property
    def writes_checkpoints(self) -> bool:
        """Whether checkpoints are written between the steps of the training."""
        return bool(
            self.checkpoint_every_steps or self.checkpoint_every_epochs or self.checkpoint_every_seconds
        )

    @property
    def keeps_state(self) -> bool:
        """Whether a checkpoint is written at the end of the training, and stays."""
        return self.keep_training_state or self.certify or self.pause_after is not None

    @property
    def num_copies(self) -> int:
        """Number of ranks that read different rows."""
        sizes = self.axes
        return sizes["data"] * sizes["shard"] * sizes["expert"]

    @property
    def most_rows(self) -> int:
        """Rows of the largest batch on the rank with the most rows."""
        return math.ceil(self.batch_sizes.largest / self.num_copies)

    @property
    def workers_per_replica(self) -> int:
        """Number of ranks in one replica: the product of all axes except 'data'."""
        return self.num_workers // self.axes["data"]

    @property
    def _readers(self) -> str:
        if self.num_copies == self.num_workers:
            return f"numWorkers ({self.num_workers})"
        return f"the workers that read different rows ({self.num_copies} of numWorkers {self.num_workers})"

    @property
    def is_in_step(self) -> bool:
        """Whether the ranks take each step together."""
        return self.num_workers == 1 or self.sync.in_step

    @property
    def looks_for_best(self) -> bool:
        """Whether `monitor` compares epochs."""
        return self.keep == "best" or self.patience is not None
