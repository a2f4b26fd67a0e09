"""Settings of input and output columns, and of how a model transforms them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from ringspark.estimators.training.settings.choices import HandleInvalid, WeightOffload
from ringspark.estimators.training.settings.declaration import Range, Setting, at_least, one_of
from ringspark.pipelines.kinds import Kind, kind_from_json

_DISTINCT = Range(
    lambda names: isinstance(names, str) or len(set(names)) == len(names),
    lambda: "must not name a column twice",
    remedy="; copy it under another name",
)


def _kinds(value: Any) -> dict[str, Any]:
    """Returns kinds by column in their JSON form, which also travels in a saved stage."""
    if not isinstance(value, Mapping):
        raise TypeError(
            f"columns must map names to kinds, e.g. {{'city': Vocabulary(max_size=1000)}}, got {value!r}"
        )
    kinds = {}
    for name, given in value.items():
        kind = kind_from_json(dict(given)) if isinstance(given, Mapping) else given
        if not isinstance(kind, Kind):
            raise TypeError(
                f"columns[{name!r}] must be a kind of ringspark.pipelines such as Vocabulary(max_size=1000), "
                f"HashBuckets(1024) or Padded(), got {given!r}"
            )
        kinds[name] = kind.to_json()
    return kinds


FEATURES_COL = Setting(
    name="featuresCol",
    words="column that is the network's one argument",
    default="features",
    without_effect=(lambda given: given["inputCols"] is not None, "inputCols names the inputs"),
)
INPUT_COLS = Setting[list[str] | None](
    name="inputCols",
    field="input_columns",
    words="one column for each argument of the network, instead of featuresCol",
    kind="names",
)
COLUMNS = Setting[dict[str, Any] | None](
    name="columns",
    words="kinds of input and label columns by name, where Spark's type leaves a choice: Vocabulary or "
    "HashBuckets for strings, Tokens for texts, Padded or Ragged for arrays of varying length, Sparse for "
    "vectors that stay sparse, Image for images; string labels of a classifier need none",
    convert=_kinds,
    is_for_writing=True,
)
LABEL_COL = Setting(
    name="labelCol",
    field="label_columns",
    words="column of the labels",
    default="label",
    accepts=_DISTINCT,
)
LABEL_COLS = Setting[list[str] | None](
    name="labelCols",
    words="one label column for each output of the network, instead of labelCol",
    kind="names",
    accepts=_DISTINCT,
)
WEIGHT_COL = Setting[str | None](
    name="weightCol",
    field="weight_column",
    words="column of the rows' weights in the loss; unset or empty: 1 each",
    kind="str",
    empty_is_unset=True,
)
VALIDATION_INDICATOR_COL = Setting[str | None](
    name="validationIndicatorCol",
    words="column that is true in the rows to hold out; unset or empty: none",
    kind="str",
    empty_is_unset=True,
    is_for_writing=True,
)
PREDICTION_COL = Setting(
    name="predictionCol",
    words="column of the predictions",
    default="prediction",
)
PREDICTION_COLS = Setting[list[str] | None](
    name="predictionCols",
    words="prediction columns of a network with several outputs, one a tensor; instead of predictionCol",
    kind="names",
)
RAW_PREDICTION_COL = Setting(
    name="rawPredictionCol",
    words="column of the logits, a vector; empty: none",
    default="rawPrediction",
)
PROBABILITY_COL = Setting(
    name="probabilityCol",
    words="column of the classes' probabilities, a vector; empty: none",
    default="probability",
)
PREDICTED_LABEL_COL = Setting(
    name="predictedLabelCol",
    words="column of the predicted class as a string, where the labels were strings; empty: none",
    default="predictedLabel",
)
THRESHOLDS = Setting[list[float] | None](
    name="thresholds",
    words="one number per class: the class with the largest probability / threshold is predicted; none may "
    "be negative, one at most 0",
    kind="numbers",
)
HANDLE_INVALID = Setting[HandleInvalid](
    name="handleInvalid",
    words="what transform does with rows that have a null or NaN in an input: 'error' raises, 'skip' leaves "
    "them out, 'keep' leaves them in with null predictions",
    default="error",
    accepts=one_of(get_args(HandleInvalid)),
    is_for_writing=True,
)
INFERENCE_BATCH_SIZE = Setting(
    name="inferenceBatchSize",
    words="rows per forward pass in transform; unset: fewer where so many take more than 64 MiB",
    # So the activations of a layer of a few hundred numbers stay in a core's cache.
    default=2048,
    accepts=at_least(1),
)
INFERENCE_OFFLOAD = Setting[WeightOffload](
    name="inferenceOffload",
    words="where transform leaves the weights: 'none' (all are in the worker, on a CPU mapped from the file) "
    "or 'disk' (in the file, but for the tensor that the forward pass is at), for networks larger than a "
    "worker's memory; predictions are the same",
    default="none",
    accepts=one_of(get_args(WeightOffload)),
)
INFERENCE_USE_GPU = Setting(
    name="inferenceUseGpu",
    words="whether transform computes on a GPU: the one that Spark gave the task, else one by partition",
    default=False,
)
