"""The fields of `TrainConfig`, and the values that follow from them; `GangConfig` has those of any gang."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

from ringspark.estimators.options.finetuning import Pretrained
from ringspark.estimators.training.batch_sizes import BatchSizes
from ringspark.estimators.training.objective.losses import NETWORK_LOSS
from ringspark.estimators.training.objective.own_metrics import OwnMetric
from ringspark.estimators.training.settings.choices import Task
from ringspark.estimators.training.settings.data import Data
from ringspark.estimators.training.settings.memory import Memory
from ringspark.estimators.training.settings.network import Network, Objects
from ringspark.estimators.training.settings.observation import Observation
from ringspark.estimators.training.settings.recovery import Recovery
from ringspark.estimators.training.settings.training import Training
from ringspark.estimators.training.settings.workers import Workers
from ringspark.models import MODELS, ModelSpec

C = TypeVar("C", bound="GangConfig")


@dataclass(frozen=True, kw_only=True)
class GangConfig(Workers, Recovery):
    """The settings of a gang, whatever its ranks run.

    Attributes:
        run_uri: Folder for progress, history and checkpoints.
    """

    run_uri: str

    @property
    def axes(self) -> dict[str, int]:
        """Ranks along each axis of the mesh."""
        return self.parallelism.sizes(self.num_workers)

    @property
    def workers_per_replica(self) -> int:
        """Number of ranks in one replica: the product of all axes except 'data'."""
        return self.num_workers // self.axes["data"]

    @property
    def can_grow(self) -> bool:
        """Whether all workers can end at a checkpoint together, to start again with more workers."""
        return self.sync.in_step and self.checkpoint_every_seconds != 0

    def with_workers(self: C, num_workers: int) -> C:
        """Returns the config for another number of workers; only the 'data' axis changes its size."""
        return replace(self, num_workers=num_workers, parallelism=replace(self.parallelism, data=None))


@dataclass(frozen=True, kw_only=True)
class ConfigValues(Data, Network, Training, GangConfig, Memory, Observation):
    """The fields of `TrainConfig`: the settings that the ranks need, and the following.

    Attributes:
        shards_uri: Folder of the shards; its manifest describes the data.
        model: `ModelSpec` as JSON text; None if `UserObjects.module` holds the model.
        input_columns: One column per positional argument of `forward`.
        label_columns: One column per output of the network.
        weight_column: Column of the rows' weights in the loss.
        losses: One name per label; unused for a label whose loss is in `UserObjects.losses`.
        loss_weights: Weight of each label's loss in their sum.
        quantiles: Quantiles of the label that the network returns; None if it returns none.
        metrics: Names of built-in metrics and of the user's metrics in `UserObjects.metrics`.
        own_metrics: Properties of the user's metrics; set by `check_training`.
        monitor: Loss or metric that decides which epoch is best; set by `check_training` if empty.
        training_step: Name in `TRAINING_STEPS`, or 'own' for a callable in `UserObjects`.
        output_widths: Last dimension of each output, 1 if it has none; set by `check_training`.
        initial_weights: Folder with the weights of `initialModel`.
        initial_training_state: Checkpoint with the optimizer state of `initialModel`, if the fit takes it.
        soft_label_column: Column of soft labels (the outputs of `teacher`), which `fit` adds to the rows.
        charged_before: Private steps of `initialModel`, as in `PrivacySpent.charged`.
        pause_after: Epoch after which the training ends with a checkpoint, in a population search.
        pause_after_step: Step within an epoch after which the training ends, if a checkpoint is due there.
    """

    shards_uri: str
    input_columns: tuple[str, ...]
    label_columns: tuple[str, ...]
    task: Task = "any"
    model: str | None = None
    weight_column: str | None = None
    losses: tuple[str, ...] = (Objects.loss,)
    loss_weights: tuple[float, ...] = (1.0,)
    quantiles: tuple[float, ...] | None = None
    metrics: tuple[str, ...] = ()
    own_metrics: tuple[OwnMetric, ...] = ()
    monitor: str = ""
    training_step: str | None = None
    output_widths: tuple[int, ...] = ()
    initial_weights: str | None = None
    initial_training_state: str | None = None
    soft_label_column: str | None = None
    charged_before: tuple[tuple[float, float, int], ...] = ()
    pause_after: int | None = None
    pause_after_step: int | None = None

    @property
    def batch_sizes(self) -> BatchSizes:
        return BatchSizes.of(self.batch_size, self.batch_size_schedule, self.epochs)

    @property
    def columns(self) -> list[str]:
        others = filter(None, (self.weight_column, self.soft_label_column))
        return [*self.input_columns, *self.label_columns, *others]

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
        return spec.target in MODELS or spec.library is not None

    @property
    def differentiates_twice(self) -> bool:
        """Whether a loss may differentiate through the network."""
        return NETWORK_LOSS in self.losses

    @property
    def changes_saved_tensors(self) -> bool:
        """Whether tensors that autograd saves are offloaded or compressed."""
        return self.activation_offload != "none" or self.activation_compression != "none"

    @property
    def has_own_step(self) -> bool:
        """Whether a step of the user's replaces the trainer's step."""
        return self.training_step is not None

    @property
    def hides_rows(self) -> bool:
        """Whether nothing about single training rows may be stored, logged or evaluated."""
        return self.privacy is not None

    @property
    def start_weights(self) -> Pretrained | None:
        """Weights that replace the network's own initial weights."""
        return self.pretrained if self.initial_weights is None else Pretrained(uri=self.initial_weights)

    @property
    def writes_checkpoints(self) -> bool:
        """Whether checkpoints are written between the steps of the training."""
        return bool(
            self.checkpoint_every_steps or self.checkpoint_every_epochs or self.checkpoint_every_seconds != 0
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
