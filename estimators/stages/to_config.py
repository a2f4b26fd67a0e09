"""Turns an estimator's Params into the config of a training, and finds Params without effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from ringspark.estimators.options.checked import frozen
from ringspark.estimators.options.mesh import AUTO, Mesh
from ringspark.estimators.stages.declared import values_of
from ringspark.estimators.stages.model_params import _EstimatorParams
from ringspark.estimators.techniques import techniques_in
from ringspark.estimators.training.check.driver import check_names
from ringspark.estimators.training.objective.losses import name_loss
from ringspark.estimators.training.objective.own_metrics import name_metrics
from ringspark.estimators.training.optimizers.registry import ADAPTIVE
from ringspark.estimators.training.settings.choices import Task
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.settings.table import SETTINGS
from ringspark.models import ModelSpec
from ringspark.models.program import Program

_OPTIONS_OF_AXES = {
    "tensor": ("plan", "sequence_parallel"),
    "pipeline": ("pipeline.schedule", "pipeline.virtual", "pipeline.cuts"),
    "sequence": ("context",),
}


def config_of(
    stage: _EstimatorParams, task: Task, label_columns: Sequence[str]
) -> tuple[TrainConfig, UserObjects]:
    """Returns the Params as one config, and the user's Python objects, which JSON cannot describe."""
    if not stage.isDefined(stage.model):
        raise ValueError(
            f"{type(stage).__name__} needs a model; pass model=ModelSpec('mlp', {{...}}) or an nn.Module"
        )
    given = values_of(stage)
    fraction, indicator = given["validationFraction"], given["validationIndicatorCol"]
    if fraction is not None and indicator is not None:
        raise ValueError(
            f"set validationFraction or validationIndicatorCol, not both; got {fraction} and {indicator!r}"
        )
    if isinstance(given["model"], Program):
        raise ValueError(
            "model is a saved program, which predicts and cannot be trained; give a network of its class, "
            "filled by network.load_state_dict(program.state_dict())"
        )
    for technique in techniques_in(stage):
        given["model"] = technique.wrap_network(given["model"], given, task)
    metrics = name_metrics(given["metrics"])
    # A single loss serves all labels; a list of a wrong length is refused later.
    model, losses = given["model"], given["loss"] if isinstance(given["loss"], list) else [given["loss"]]
    if len(losses) == 1:
        losses = losses * len(label_columns)
    values = {
        setting.field: frozen(given[name])
        for name, setting in SETTINGS.items()
        if setting.field and given.get(name) is not None
    }
    split = {s.field: s.split(values[s.field]) for s in SETTINGS.values() if s.split and s.field in values}
    values |= {name: for_config for name, (for_config, _) in split.items()}
    # The config holds these in another form than the Params.
    values |= {
        "model": model.to_json() if isinstance(model, ModelSpec) else None,
        "input_columns": tuple(stage.inputColumns()),
        "label_columns": tuple(label_columns),
        "metrics": tuple(metrics),
        "soft_label_column": getattr(stage, "_soft_label_column", None),
        "losses": tuple(name_loss(loss) for loss in losses),
    }
    mesh = given["parallelism"]
    needs_parts = mesh == AUTO or mesh.cuts_network or mesh.shard > 1
    if mesh == AUTO:
        # Data parallelism until the planner has chosen, because it looks at the network and the rows.
        values["parallelism"] = Mesh()
    if (given["useGpu"] or needs_parts) and not stage.isSet(stage.collective):
        # torch includes NCCL, which Horovod has only if it was built with CUDA, and process groups.
        values["collective"] = "torch"
    values.setdefault("loss_weights", (1.0,) * len(label_columns))
    config = TrainConfig.of_checked(shards_uri="", run_uri="", task=task, **values)
    objects = UserObjects(
        module=None if isinstance(model, ModelSpec) else model,
        losses=tuple(None if isinstance(loss, str) else loss for loss in losses),
        metrics={name: metric for name, metric in metrics.items() if not isinstance(metric, str)},
        transform_batch=given["transformBatch"],
        transform_in_prediction=given["transformInPrediction"],
        callbacks=tuple(given["callbacks"]),
        **{name: own for name, (_, own) in split.items()},
    )
    for technique in techniques_in(stage):
        config = technique.complete_config(config, objects, given)
    check_names(config, objects)
    return config, objects


def settings_without_effect(stage: _EstimatorParams, on_shards: bool) -> Iterator[str]:
    """Yields one sentence per Param that was set and has no effect, or harms another setting."""
    given = values_of(stage)
    was_set = [setting for name, setting in SETTINGS.items() if name in given and stage.isSet(name)]
    for setting in was_set:
        if setting.without_effect is not None and setting.without_effect[0](given):
            yield f"{setting.name} has no effect: {setting.without_effect[1]}"
    compression, optimizer = given["sync"].compressed, given["optimizer"]
    if compression and compression.feedback and optimizer in ADAPTIVE and given["numWorkers"] > 1:
        yield (
            f"sync={given['sync']!r} sends a part of each gradient in later steps, and optimizer "
            f"{optimizer!r} squares gradients as if they were complete; set optimizer='momentum', or "
            "'adam1bit' with an 'after' of about a tenth of the steps"
        )
    plain = Mesh()
    mesh = plain if given["parallelism"] == AUTO else given["parallelism"]
    for axis, options in _OPTIONS_OF_AXES.items():
        idle = [name for name in options if attrgetter(name)(mesh) != attrgetter(name)(plain)]
        if mesh.size(axis) == 1 and idle:
            yield f"parallelism's {idle[0]} has no effect: {axis} has one worker"
    if compression and 1 < mesh.size("pipeline") * mesh.size("tensor") == given["numWorkers"]:
        yield "sync's compression has no effect: the mesh has one replica, so it all-reduces no gradients"
    schedule, epochs = given["batchSizeSchedule"], given["epochs"]
    if schedule and schedule[0][0] <= epochs < schedule[-1][0]:
        yield (
            f"batchSizeSchedule has {schedule[-1][1]} rows from epoch {schedule[-1][0]} on, but there are "
            f"only {epochs} epochs"
        )
    for setting in was_set if on_shards else []:
        if setting.is_for_writing:
            yield f"{setting.name} has no effect on fitOnShards: the shards are written already"
