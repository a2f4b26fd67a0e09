"""Adds the teacher's outputs to the rows of a fit, and checks that the teacher fits the network."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from pyspark.sql.types import StringType, StructField

from ringspark.estimators.columns.schema import FieldIndex
from ringspark.estimators.inference.results import Values
from ringspark.estimators.initial_model import load_model
from ringspark.estimators.prepared_fit import PreparedFit
from ringspark.estimators.training.batch_transforms import takes
from ringspark.estimators.training.objective.losses import name_loss
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.distillation.distance import compared_by
from ringspark.extras.distillation.outputs import outputs_of, soft_labels
from ringspark.pipelines import ShardManifest, storage
from ringspark.pipelines.columns import is_case_sensitive
from ringspark.pipelines.kinds import Vocabulary

_PREFIX = "__ringspark_teacher"


def add_teacher(fit: PreparedFit) -> PreparedFit:
    """Returns the fit with a column of the teacher's outputs, which Spark computes with the shards.

    Raises ValueError if the teacher has another task, other classes or other columns.
    """
    estimator, dataset = fit.estimator.copy(), fit.dataset
    given, names, losses = estimator.getTeacher(), estimator._label_columns(), estimator.getLoss()
    schema, exact = dataset.schema, is_case_sensitive(dataset.sparkSession)
    fields = FieldIndex(schema, exact)
    if len(names) > 1:
        raise ValueError(
            f"teacher works with one label, got {names}; fit one network per label, or leave teacher unset"
        )
    label = fields.find(names[0], estimator._label_param())
    loss = name_loss(losses[0] if isinstance(losses, list) else losses)
    compared = compared_by(estimator._task, loss)
    is_own = hasattr(given, "_trained") or (isinstance(given, str) and not fields.all(given))
    if is_own or not estimator.hasParam("labelCol"):
        teacher = _load(estimator)
        if compared == "classes":
            _check_classes(estimator, list(teacher._labels), label)
        name = _name(teacher._trained().uri)
        results = Values(shapes=teacher._output_shapes)
        dataset = teacher._add_results(dataset, teacher._bind(schema, exact), [name], results)
    else:
        inputs = estimator.inputColumns() if fit.plan is None else fit.plan.asked[2:]
        found = outputs_of(given, dataset, inputs, label.name, compared, exact)
        knows_classes = not isinstance(given, str)
        if compared == "labels" and knows_classes and len(found.classes) != 2:
            raise ValueError(
                f"{found.title} must have two classes for loss={loss!r}; give the name of a column with one "
                "probability per label"
            )
        if compared == "labels" and (knows_classes or estimator._task == "classification"):
            compared = "classes"
        if compared == "classes" and knows_classes:
            _check_classes(estimator, found.classes, label)
        name = _name(found.identity)
        skips = estimator.getHandleInvalid() != "error"
        dataset = found.dataset.withColumn(name, soft_labels(found, compared, skips))
    estimator._soft_label_column = name
    return replace(fit, estimator=estimator, dataset=dataset)


def _name(identity: str) -> str:
    """Returns a column name that differs between teachers, so that their fits share no shards."""
    return f"{_PREFIX}_{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


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
    if compared_by(config.task, config.losses[0]) == "classes":
        theirs, ours = max(theirs, 2), max(ours, 2)  # one logit means two classes
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
    teacher = given
    if isinstance(given, str):
        teacher = load_model(estimator._model_class, given, "teacher is no column, so it is a path")
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


def _check_classes(estimator: Any, classes: Sequence[Any], label: StructField) -> None:
    """Makes the classes of string labels the teacher's classes, in its order; numbers are 0 to n - 1."""
    words = tuple(each for each in classes if isinstance(each, str))
    is_strings = isinstance(label.dataType, StringType)
    if bool(words) != is_strings:
        kinds = ("strings", "numbers") if is_strings else ("numbers", "strings")
        raise ValueError(
            f"labelCol {label.name!r} has classes of {kinds[0]}, but teacher was fitted on {kinds[1]}; give "
            "labels of the teacher's type"
        )
    if not is_strings:
        if list(classes) != list(range(len(classes))):
            raise ValueError(
                f"teacher has the classes {list(classes)[:10]}, and class numbers must be 0 to "
                f"{len(classes) - 1}; fit the teacher on such labels"
            )
        return
    columns = estimator.getColumns()
    chosen = columns.get(label.name)
    if isinstance(chosen, Vocabulary) and chosen.words not in (None, words):
        raise ValueError(
            f"the setting columns gives {label.name!r} other classes than teacher has; leave {label.name!r} "
            "out of columns"
        )
    estimator._set(columns=columns | {label.name: Vocabulary(words=words, order="alphabet")})
