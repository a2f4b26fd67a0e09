"""Adds the teacher's outputs to the rows of a fit, and checks that the teacher fits the network."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from math import prod
from typing import Any

from pyspark.sql.types import StringType

from ringspark.estimators.columns.schema import find_field
from ringspark.estimators.inference.results import Values
from ringspark.estimators.initial_model import load_model
from ringspark.estimators.prepared_fit import PreparedFit
from ringspark.estimators.training.batch_transforms import takes
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.columns import is_case_sensitive
from ringspark.pipelines.kinds import Vocabulary

_PREFIX = "__ringspark_teacher"


def add_teacher(fit: PreparedFit) -> PreparedFit:
    """Returns the fit with a column of the teacher's outputs, which Spark computes with the shards.

    Raises ValueError if the teacher has another task, other classes or other columns.
    """
    estimator, dataset = fit.estimator.copy(), fit.dataset
    teacher = _load(estimator)
    schema, exact = dataset.schema, is_case_sensitive(dataset.sparkSession)
    if len(estimator._label_columns()) > 1:
        raise ValueError(
            f"teacher works with one label, got {estimator._label_columns()}; fit one network per label, or "
            "leave teacher unset"
        )
    label = find_field(estimator._label_columns()[0], estimator._label_param(), schema, exact)
    _check_classes(estimator, teacher, label.name, isinstance(label.dataType, StringType))
    digest = hashlib.sha256(teacher._trained().uri.encode()).hexdigest()
    # Named after the teacher, so that fits with different teachers do not share their shards.
    name = f"{_PREFIX}_{digest[:12]}"
    bound = teacher._bind(schema, exact)
    estimator._soft_label_column = name
    results = Values(shapes=teacher._output_shapes)
    return replace(fit, estimator=estimator, dataset=teacher._add_results(dataset, bound, [name], results))


def check_labels(config: TrainConfig, manifest: ShardManifest) -> None:
    """Raises ValueError for string labels that are no class of the teacher."""
    label = manifest.column_of(config.label_columns[0])
    words = label.kind.words if isinstance(label.kind, Vocabulary) else None
    for split, stats in manifest.stats.items():
        if words is not None and (stats[label.name].maximum or 0) >= len(words):
            raise ValueError(
                f"labelCol {label.name!r} has {split} rows with strings that are no class of teacher; fit "
                "the teacher on all classes, or drop these rows"
            )


def check_teacher(
    config: TrainConfig, objects: UserObjects, manifest: ShardManifest, shape: tuple[int, ...]
) -> None:
    """Raises ValueError if the rows or the network do not fit the teacher; `shape` is of its outputs."""
    assert config.soft_label_column is not None
    if config.training_step is not None:
        raise ValueError(
            "teacher changes the loss, and trainingStep computes its own losses; let trainingStep call the "
            "teacher's module(), or leave one of them unset"
        )
    theirs, ours = prod(manifest.array(config.soft_label_column).shape), prod(shape[1:])
    if theirs != ours:
        raise ValueError(
            f"teacher has {theirs} outputs per row, but the network has {ours}; fit the teacher on the same "
            "classes or labels, or change the network"
        )
    if takes(objects.transform_batch, "labels"):
        raise ValueError(
            "teacher gives outputs for each row, and a transformBatch that takes labels may mix rows; let "
            "transformBatch change only the inputs, or leave teacher unset"
        )


def _load(estimator: Any) -> Any:
    given = estimator.getTeacher()
    teacher = load_model(estimator._model_class, given, "teacher") if isinstance(given, str) else given
    if not isinstance(teacher, estimator._model_class):
        raise ValueError(
            f"teacher of {type(estimator).__name__} must be a {estimator._model_class.__name__}, got a "
            f"{type(teacher).__name__}; fit it with the estimator of the same task"
        )
    shapes = teacher._output_shapes
    if len(shapes) != 1 or len(shapes[0]) > 1:
        raise ValueError(
            f"teacher must return one value or one vector per row, got outputs of the shapes {list(shapes)}; "
            f"leave teacher unset, or fit one with such outputs ({storage.redact(teacher._trained().uri)})"
        )
    skips = estimator.getHandleInvalid() != "error"
    return teacher.copy({teacher.handleInvalid: "skip" if skips else "error"})


def _check_classes(estimator: Any, teacher: Any, label: str, is_strings: bool) -> None:
    """Makes the classes of string labels the teacher's classes, in its order."""
    words = list(teacher._labels)
    if estimator._task != "classification" or not (words or is_strings):
        return
    if bool(words) != is_strings:
        kinds = ("strings", "numbers") if is_strings else ("numbers", "strings")
        raise ValueError(
            f"labelCol {label!r} has classes of {kinds[0]}, but teacher was fitted on {kinds[1]}; give the "
            "labels as the teacher had them"
        )
    columns = estimator.getColumns()
    chosen = columns.get(label)
    if isinstance(chosen, Vocabulary) and chosen.words not in (None, tuple(words)):
        raise ValueError(
            f"the setting columns gives {label!r} other classes than teacher has; leave {label!r} out "
            "of columns"
        )
    estimator._set(columns=columns | {label: Vocabulary(words=tuple(words), order="alphabet")})
