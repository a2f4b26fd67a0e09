"""Turns an estimator's Params into the config of a training, checked as far as possible without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringspark.estimators.stages.declared import values_of
from ringspark.estimators.stages.params import _TrainingParams
from ringspark.estimators.training.check.driver import check_names
from ringspark.estimators.training.objective.own_metrics import name_metrics
from ringspark.estimators.training.settings.choices import Task
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.settings.parallelism import AUTO, MODEL_AXES
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.models import ModelSpec
from ringspark.models.program import Program

# If such a setting is no name, the config keeps its default and the object travels beside it.
_FACTORIES = ("optimizer", "lr_schedule")


def config_of(
    stage: _TrainingParams, task: Task, label_columns: Sequence[str]
) -> tuple[TrainConfig, UserObjects]:
    """Returns the Params as one config, and the Python objects that have no name.

    Raises:
        ValueError: A setting cannot be used, or two settings refuse each other.
    """
    if not stage.isDefined(stage.model):
        raise ValueError(
            f"{type(stage).__name__} needs a model; pass model=ModelSpec('mlp', {{...}}) or an nn.Module"
        )
    given = values_of(stage)
    _check_validation(given["validationFraction"], given["validationIndicatorCol"])
    if isinstance(given["model"], Program):
        raise ValueError(
            "model is a saved program, which predicts and cannot be trained; give a network of its class, "
            "filled by network.load_state_dict(program.state_dict())"
        )
    metrics = name_metrics(given["metrics"])
    model, losses = given["model"], _for_each_label(given["loss"], len(label_columns))
    values = {
        setting.field: _frozen(given[name])
        for name, setting in SETTINGS.items()
        if setting.field and given.get(name) is not None
    }
    # The config holds these in another form than the Params.
    values |= {
        "model": model.to_json() if isinstance(model, ModelSpec) else None,
        "input_columns": tuple(stage.inputColumns()),
        "label_columns": tuple(label_columns),
        "metrics": tuple(metrics),
        "losses": tuple(loss if isinstance(loss, str) else type(loss).__name__ for loss in losses),
    }
    mesh = given["parallelism"]
    needs_parts = mesh == AUTO or any(mesh.get(axis, 1) > 1 for axis in (*MODEL_AXES, "shard"))
    if mesh == AUTO:
        # Whole copies until the planner has chosen, which looks at the network and the rows.
        values["parallelism"] = {}
    if (given["useGpu"] or needs_parts) and not stage.isSet(stage.collective):
        # torch brings NCCL along, which Horovod has only where it was built with CUDA, and parts of a gang.
        values["collective"] = "torch"
    values.setdefault("loss_weights", (1.0,) * len(label_columns))
    by_factory = {name: values.pop(name) for name in _FACTORIES if not isinstance(values[name], str)}
    config = TrainConfig(shards_uri="", run_uri="", task=task, **values)
    objects = UserObjects(
        module=None if isinstance(model, ModelSpec) else model,
        losses=tuple(None if isinstance(loss, str) else loss for loss in losses),
        metrics={name: metric for name, metric in metrics.items() if not isinstance(metric, str)},
        transform_batch=given["transformBatch"],
        transform_in_prediction=given["transformInPrediction"],
        callbacks=tuple(given["callbacks"]),
        **by_factory,
    )
    check_names(config, objects)
    return config, objects


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _for_each_label(loss: Any, num_labels: int) -> list[Any]:
    """Returns one loss per label; a single one serves all. A list of a wrong length is refused later."""
    losses = list(loss) if isinstance(loss, list) else [loss]
    return losses * num_labels if len(losses) == 1 else losses


def _check_validation(fraction: float | None, indicator: str | None) -> None:
    if fraction is not None and indicator is not None:
        raise ValueError(
            f"set validationFraction or validationIndicatorCol, not both; got {fraction} and {indicator!r}"
        )
