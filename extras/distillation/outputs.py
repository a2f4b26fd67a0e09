"""Adds the outputs of a teacher that is not a ringspark model as a column.

The teacher is a column of the DataFrame, a fitted scikit-learn estimator, or a fitted model of Spark ML.
Class probabilities become logits: the softmax of their logarithms returns the probabilities.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Iterator  # noqa: UP035 (pandas_udf reads these hints)

import numpy as np
import pandas as pd
from pyspark.ml import Transformer
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import ArrayType, DataType, DecimalType, NumericType

from ringspark.estimators import user_code
from ringspark.estimators.columns.schema import FieldIndex
from ringspark.estimators.names import first_line
from ringspark.extras.distillation.distance import Compared
from ringspark.pipelines.columns import quote
from ringspark.pipelines.spark_errors import MARK

# The logarithm of 0 counts as the logarithm of this number, because an infinite logit has no gradient.
_LEAST = sys.float_info.min
# Probabilities that were rounded to three digits may miss a sum of 1 by this much.
_ROUNDING = 2e-3
_OUTPUTS = ("probabilityCol", "predictionCol", "rawPredictionCol")


@dataclass(frozen=True)
class Outputs:
    """A teacher's outputs.

    Attributes:
        dataset: The rows with the column `name`: a number, a vector or an array per row.
        name: Name of the column.
        title: Name of the teacher in error messages.
        identity: Text that differs between teachers.
        classes: The teacher's classes, in the order of its probabilities; empty for a column and for values.
    """

    dataset: DataFrame
    name: str
    title: str
    identity: str
    classes: Sequence[Any] = ()


def outputs_of(
    teacher: Any, dataset: DataFrame, inputs: Sequence[str], label: str, compared: Compared, exact: bool
) -> Outputs:
    """Returns the outputs of a column (its name), a scikit-learn estimator or a Spark ML model.

    `inputs` are the columns for an estimator that was fitted without names of columns. Raises ValueError,
    before any job, if the teacher cannot predict what the loss compares.
    """
    fields = FieldIndex(dataset.schema, exact)
    if isinstance(teacher, str):
        field = fields.find(teacher, "teacher")
        if field.name in inputs:
            raise ValueError(
                f"teacher and the inputs both name {field.name!r}, which later rows may lack; choose other "
                "inputs"
            )
        return Outputs(dataset, field.name, f"teacher {field.name!r}", field.name)
    if isinstance(teacher, Transformer):
        return _of_spark_model(teacher, dataset, label, compared)
    return _of_predictor(teacher, dataset, fields, inputs, compared)


def soft_labels(outputs: Outputs, compared: Compared, skips: bool) -> Column:
    """Returns a column of logits or values, a number or an array of doubles, from a teacher's outputs.

    Two classes become one logit. A row without outputs is null if `skips`, else Spark raises an error.
    """
    data_type, column = outputs.dataset.schema[outputs.name].dataType, F.col(quote(outputs.name))
    is_number = isinstance(data_type, NumericType)
    element = data_type.elementType if isinstance(data_type, ArrayType) else data_type
    if not isinstance(element, NumericType | VectorUDT):
        raise ValueError(
            f"{outputs.title} is a column of {data_type.simpleString()}; give numbers, arrays of numbers, or "
            "vectors"
        )
    values = (F.array(column) if is_number else _plain(column, data_type)).cast("array<double>")
    is_missing = values.isNull() | F.exists(
        values, lambda x: x.isNull() | F.isnan(x) | (F.abs(x) == F.lit(math.inf))
    )
    refused = _refuse(
        F.lit(f"{outputs.title} has a null, a NaN or an infinite value; drop such rows, or set "),
        F.lit("handleInvalid='skip'"),
    )
    made = F.when(is_missing, F.lit(None) if skips else refused)
    if compared == "values":
        made = made.otherwise(values)
    else:
        if compared == "classes" and is_number:
            values = F.array(1 - values[0], values[0])
        wrong, what = F.exists(values, lambda x: (x < 0) | (x > 1)), "probabilities from 0 to 1"
        if compared == "classes":
            total = F.aggregate(values, F.lit(0.0), lambda sum, x: sum + x)
            wrong |= (F.size(values) < 2) | (F.abs(total - 1) > _ROUNDING)
            what += ", one per class, with the sum 1 in each row, or the probability of class 1 of two"
        got = F.lit(f"{outputs.title} must have {what}, got "), values.cast("string")
        refused = _refuse(*got, F.lit("; give the result of predict_proba, or the column probabilityCol"))
        made = made.when(wrong, refused).otherwise(_logits(values, compared))
    return made[0] if is_number else made


def _refuse(*texts: Column) -> Column:
    return F.raise_error(F.concat(F.lit(MARK), *texts)).cast("array<double>")


def _logits(probabilities: Column, compared: Compared) -> Column:
    if compared == "labels":
        return F.transform(probabilities, lambda x: _log(x) - _log(1 - x))
    pair = F.array(_log(probabilities[1]) - _log(probabilities[0]))
    return F.when(F.size(probabilities) == 2, pair).otherwise(F.transform(probabilities, _log))


def _log(probability: Column) -> Column:
    return F.log(F.greatest(probability, F.lit(_LEAST)))


def _plain(column: Column, data_type: DataType) -> Column:
    """Returns numbers or arrays that pandas can hold."""
    if isinstance(data_type, VectorUDT):
        return F.when(column.isNotNull(), vector_to_array(column))
    return column.cast("double") if isinstance(data_type, DecimalType) else column


def _of_spark_model(teacher: Any, dataset: DataFrame, label: str, compared: Compared) -> Outputs:
    last: Any = teacher
    stages: list[Any] = []
    while hasattr(last, "stages") or hasattr(last, "bestModel"):
        stages += getattr(last, "stages", [])
        last = last.bestModel if hasattr(last, "bestModel") else last.stages[-1]
    param = "predictionCol" if compared == "values" else "probabilityCol"
    names = {each: last.getOrDefault(each) for each in _OUTPUTS if last.hasParam(each)}
    # A classifier's predictions are no values.
    if not names.get(param) or (compared == "values" and "rawPredictionCol" in names):
        raise ValueError(_no_outputs(last, param, compared))
    # The rows may have columns of the usual names.
    hidden = {each: f"__ringspark_{each}_{teacher.uid}" for each in names}
    renamed = teacher.copy({last.getParam(each): hidden[each] for each in names if names[each]})
    own = [F.col(quote(name)) for name in dataset.columns]
    classes: list[Any] = []
    if compared != "values":
        classes = list(range(last.numClasses))
        for stage in stages:
            # An indexer of the same label has the names of the classes.
            if hasattr(stage, "labels") and stage.getOrDefault("outputCol") == last.getOrDefault("labelCol"):
                classes = list(stage.labels) if stage.getOrDefault("inputCol") == label else classes
    made = renamed.transform(dataset).select(*own, hidden[param])
    return Outputs(made, hidden[param], f"teacher {type(last).__name__}", teacher.uid, classes)


def _of_predictor(
    teacher: Any, dataset: DataFrame, fields: FieldIndex, inputs: Sequence[str], compared: Compared
) -> Outputs:
    method = "predict" if compared == "values" else "predict_proba"
    if not hasattr(teacher, method) or (compared == "values" and hasattr(teacher, "predict_proba")):
        raise ValueError(_no_outputs(teacher, method, compared))
    title = f"teacher {type(teacher).__name__}"
    classes = [] if compared == "values" else _classes(teacher, title)
    names = getattr(teacher, "feature_names_in_", None)
    if names is None:
        names = getattr(teacher, "feature_names_", None)  # of CatBoost, which numbers the columns of an array
    is_numbered = names is not None and all(str(name).isdecimal() for name in names)
    chosen = list(inputs if names is None or is_numbered else map(str, names))
    sources = [fields.find(name, "feature_names_in_ of teacher") for name in chosen]
    is_matrix = is_numbered or any(isinstance(s.dataType, VectorUDT | ArrayType) for s in sources)
    wanted = getattr(teacher, "n_features_in_", None)
    if wanted not in (None, len(sources)) and not is_matrix:
        raise ValueError(
            f"{title} was fitted on {wanted} columns without names, and the inputs are {chosen}; fit it on a "
            "pandas DataFrame, so that it knows its columns"
        )
    # Pickle a copy: the first pickle of many estimators has other bytes, and a resume may load an estimator.
    pickled = user_code.dumps(user_code.copy(teacher))
    ask = _make_function(pickled, method, is_matrix, len(classes), f"{title} failed on the columns {chosen}")
    pairs = zip(sources, chosen, strict=True)
    columns = (_plain(F.col(quote(source.name)), source.dataType).alias(name) for source, name in pairs)
    make: Any = pandas_udf
    made, result = make(ask, "array<double>")(F.struct(*columns)), f"__ringspark_{method}"
    # `explode` keeps Spark from copying the expression, which would call the teacher several times.
    asked = dataset.select("*", F.explode(F.array(made)).alias(result))
    return Outputs(asked, result, title, hashlib.sha256(pickled).hexdigest(), classes)


def _classes(teacher: Any, title: str) -> list[Any]:
    classes = getattr(teacher, "classes_", None)
    if classes is None or np.ndim(classes) != 1:
        raise ValueError(
            f"{title} {'is not fitted' if classes is None else 'has several labels'}; give an estimator that "
            "was fitted on one label and has classes_"
        )
    found: list[Any] = np.asarray(classes).tolist()
    return found


def _make_function(pickled: bytes, method: str, is_matrix: bool, num_classes: int, problem: str) -> Any:
    """Returns the Spark function that calls the pickled estimator with frames of rows."""

    def ask(batches: Iterator[pd.DataFrame]) -> Iterator[pd.Series]:
        teacher = user_code.loads(pickled)
        for frame in batches:
            try:
                given = _matrix(frame) if is_matrix else frame
                found = np.asarray(getattr(teacher, method)(given), np.float64).reshape(len(frame), -1)
                if num_classes not in (0, found.shape[1]):
                    raise ValueError(f"{found.shape[1]} probabilities for {num_classes} classes")
            except Exception as error:
                raise RuntimeError(
                    f"{MARK}{problem} ({type(error).__name__}: {first_line(error)}); give the "
                    "columns that it was fitted on, or a column of its outputs"
                ) from error
            yield pd.Series(list(found))

    return ask


def _matrix(frame: pd.DataFrame) -> Any:
    """Returns the numbers of a frame, (rows, numbers), whose columns hold numbers or arrays."""
    columns = (np.stack(list(frame[name])).reshape(len(frame), -1) for name in frame)
    return np.concatenate(list(columns), axis=1)


def _no_outputs(teacher: Any, needed: str, compared: Compared) -> str:
    what = "a regressor with values" if compared == "values" else "a classifier with class probabilities"
    return (
        f"teacher {type(teacher).__name__} must be {what} from {needed}; give a teacher of the same task, "
        "or the name of a column with the outputs"
    )
