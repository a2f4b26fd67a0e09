"""Settings of input and output columns, and of how a model transforms them."""

from __future__ import annotations

from typing import get_args

from ringspark.estimators.training.settings.choices import HandleInvalid
from ringspark.estimators.training.settings.declaration import Range, Setting, at_least, one_of

_DISTINCT = Range(
    lambda names: isinstance(names, str) or len(set(names)) == len(names),
    lambda: "must not name a column twice",
    remedy="; copy it under another name",
)

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
    words="rows per forward pass in transform",
    # So the activations of a layer of a few hundred numbers stay in a core's cache.
    default=2048,
    accepts=at_least(1),
)
INFERENCE_USE_GPU = Setting(
    name="inferenceUseGpu",
    words="whether transform computes on a GPU: the one that Spark gave the task, else one by partition",
    default=False,
)
