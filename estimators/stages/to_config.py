"""From an estimator's Params to the one config of a training, checked as far as it goes without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ringspark.estimators.stages.params import _MultiLabelParams, _TrainingParams
from ringspark.estimators.training.driver_check import check_names
from ringspark.estimators.training.settings.choices import Task
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec


def config_of(
    stage: _TrainingParams, task: Task, label_columns: Sequence[str]
) -> tuple[TrainConfig, UserObjects]:
    """The Params as one config, and the Python objects that it has no names for.

    Raises:
        ValueError: A setting cannot be used, or two do not go together.
    """
    if not stage.isDefined(stage.model):
        raise ValueError(
            f"{type(stage).__name__} needs a model; pass model=ModelSpec('mlp', {{...}}) or an nn.Module"
        )
    _check_validation(stage)
    model, optimizer, schedule = stage.getModel(), stage.getOptimizer(), stage.getLrSchedule()
    policy = stage.getGradientCheckpointing()
    losses = _for_each_label(stage.getLoss(), len(label_columns))
    weights = stage.getLossWeights() if isinstance(stage, _MultiLabelParams) else None
    by_name: dict[str, Any] = {
        name: value
        for name, value in (("optimizer", optimizer), ("lr_schedule", schedule))
        if isinstance(value, str)
    }
    config = TrainConfig(
        shards_uri="",
        run_uri="",
        task=task,
        model=model.to_json() if isinstance(model, ModelSpec) else None,
        input_columns=tuple(stage.inputColumns()),
        label_columns=tuple(label_columns),
        weight_column=stage.getWeightCol() if stage.isDefined(stage.weightCol) else None,
        losses=tuple(loss if isinstance(loss, str) else type(loss).__name__ for loss in losses),
        loss_weights=tuple([1.0] * len(label_columns) if weights is None else weights),
        parameter_groups=tuple(stage.getParameterGroups()),
        learning_rate=stage.getLearningRate(),
        warmup_steps=stage.getWarmupSteps(),
        weight_decay=stage.getWeightDecay(),
        max_grad_norm=stage.getMaxGradNorm(),
        metrics=tuple(stage.getMetrics()),
        monitor=stage.getMonitor() or "",
        patience=stage.getPatience(),
        min_delta=stage.getMinDelta(),
        keep=cast(Any, stage.getKeep()),
        epochs=stage.getEpochs(),
        batch_size=stage.getBatchSize(),
        seed=stage.getSeed(),
        shuffle=stage.getShuffle(),
        num_workers=stage.getNumWorkers(),
        use_gpu=stage.getUseGpu(),
        collective=stage.getCollective(),
        precision=cast(Any, stage.getPrecision()),
        gradient_checkpointing=tuple(policy) if isinstance(policy, list) else policy,
        gradient_accumulation=stage.getGradientAccumulation(),
        activation_offload=cast(Any, stage.getActivationOffload()),
        activation_compression=cast(Any, stage.getActivationCompression()),
        sharding=cast(Any, stage.getSharding()),
        reader=stage.getReader(),
        checkpoint_every_steps=stage.getCheckpointEverySteps(),
        checkpoint_every_seconds=stage.getCheckpointEverySeconds(),
        checkpoint_every_epochs=stage.getCheckpointEveryEpochs(),
        keep_checkpoints=stage.getKeepCheckpoints(),
        on_non_finite=cast(Any, stage.getOnNonFinite()),
        timeout_seconds=stage.getTimeoutSeconds(),
        max_restarts=stage.getMaxRestarts(),
        min_workers=stage.getMinWorkers(),
        **by_name,
    )
    objects = UserObjects(
        module=None if isinstance(model, ModelSpec) else model,
        losses=tuple(None if isinstance(loss, str) else loss for loss in losses),
        optimizer=None if "optimizer" in by_name else optimizer,
        lr_schedule=None if "lr_schedule" in by_name else schedule,
        callbacks=tuple(stage.getCallbacks()),
    )
    check_names(config, objects)
    return config, objects


def _for_each_label(loss: Any, num_labels: int) -> list[Any]:
    """One loss for each label; a single one serves all. A list of another length is refused later."""
    losses = list(loss) if isinstance(loss, list) else [loss]
    return losses * num_labels if len(losses) == 1 else losses


def _check_validation(stage: _TrainingParams) -> None:
    fraction = stage.getValidationFraction()
    if fraction is None:
        return
    if stage.isDefined(stage.validationIndicatorCol):
        raise ValueError(
            f"set validationFraction or validationIndicatorCol, not both; got {fraction} and "
            f"{stage.getValidationIndicatorCol()!r}"
        )
    if not 0 < fraction < 1:
        raise ValueError(f"validationFraction must lie between 0 and 1, got {fraction}")
