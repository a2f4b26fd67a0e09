"""Settings of the data: columns, rows to hold out, prediction, folders and the reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from ringspark.estimators.options.base import ValueRange, at_least, listed, one_of
from ringspark.estimators.training.settings.choices import (
    Cache,
    DataPlace,
    HandleInvalid,
    InferencePrecision,
    WeightOffload,
)
from ringspark.estimators.training.settings.declaration import Setting
from ringspark.pipelines import READERS, default_engine, storage
from ringspark.pipelines.entry_points import list_entry_points
from ringspark.pipelines.kinds import Kind, kind_from_json

_DISTINCT = ValueRange(
    lambda names: isinstance(names, str) or len(set(names)) == len(names),
    lambda: "must not name a column twice",
    remedy="; copy it under another name",
)


def _kinds(value: Any) -> dict[str, Any]:
    """Returns the column types by column name, in the JSON form that a saved stage has."""
    if not isinstance(value, Mapping):
        raise TypeError(
            "columns must map names to column types, e.g. {'city': Vocabulary(max_size=1000)}, "
            f"got {value!r}"
        )
    kinds = {}
    for name, given in value.items():
        kind = kind_from_json(dict(given)) if isinstance(given, Mapping) else given
        if not isinstance(kind, Kind):
            raise TypeError(
                f"columns[{name!r}] must be a column type of ringspark.pipelines such as "
                f"Vocabulary(max_size=1000), HashBuckets(1024) or Padded(), got {given!r}"
            )
        kinds[name] = kind.to_json()
    return kinds


def _inner_columns(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(n, str) and n for n in (*value, *value.values())):
        raise TypeError(
            f"innerCols must map names of modules to names of columns, e.g. {{'encoder': 'embedding'}}, got "
            f"{value!r}"
        )
    return dict(value)


def without_secrets(value: Any) -> str:
    """Raises ValueError for a folder's URI with credentials, because Params are saved with the stage."""
    if not isinstance(value, str):
        raise TypeError(f"a folder must be given as a string, got {type(value).__name__}")
    storage.refuse_secrets(value)
    return value


FEATURES_COL = Setting(
    name="featuresCol",
    words="column of the network's only input",
    default="features",
    without_effect=(lambda given: given["inputCols"] is not None, "inputCols names the inputs"),
)
INPUT_COLS = Setting[list[str] | None](
    name="inputCols",
    field="input_columns",
    words="one column per input of the network, instead of featuresCol",
    kind="names",
)
COLUMNS = Setting[dict[str, Any] | None](
    name="columns",
    words="column types by name, such as Vocabulary, Tokens, Padded or Image, if Spark's type is not enough",
    convert=_kinds,
    is_for_writing=True,
)
LABEL_COL = Setting(
    name="labelCol", field="label_columns", words="column of the labels", default="label", accepts=_DISTINCT
)
LABEL_COLS = Setting[list[str] | None](
    name="labelCols",
    words="one label column per output of the network, instead of labelCol",
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
VALIDATION_FRACTION = Setting[float | None](
    name="validationFraction",
    words="share of the rows to hold out, chosen by the seed",
    kind="float",
    accepts=ValueRange(lambda share: 0 < share < 1, lambda: "must lie between 0 and 1"),
    is_for_writing=True,
)
TIME_COL = Setting[str | None](
    name="timeCol",
    words="column of the time of a row: the newest rows are held out, instead of a random share",
    kind="str",
    empty_is_unset=True,
    is_for_writing=True,
    without_effect=(
        lambda given: given["validationFraction"] is None and given["model"] is not None,
        "validationFraction is not set",
    ),
)
PREDICTION_COL = Setting(name="predictionCol", words="column of the predictions", default="prediction")
PREDICTION_COLS = Setting[list[str] | None](
    name="predictionCols",
    words="one prediction column per output of the network, instead of predictionCol",
    kind="names",
)
INNER_COLS = Setting[dict[str, str] | None](
    name="innerCols",
    words="vector columns that transform adds: name of an inner module -> column of its outputs",
    convert=_inner_columns,
)
RAW_PREDICTION_COL = Setting(
    name="rawPredictionCol", words="column of the logits, a vector; empty: none", default="rawPrediction"
)
PROBABILITY_COL = Setting(
    name="probabilityCol",
    words="column of the class probabilities, a vector; empty: none",
    default="probability",
)
PREDICTED_LABEL_COL = Setting(
    name="predictedLabelCol",
    words="column of the predicted class as a string, if the labels were strings; empty: none",
    default="predictedLabel",
)
THRESHOLDS = Setting[list[float] | None](
    name="thresholds",
    words="one number per class; the class with the largest probability / threshold is predicted",
    kind="numbers",
)
HANDLE_INVALID = Setting[HandleInvalid](
    name="handleInvalid",
    words="rows with a null or NaN input: 'error', 'skip' them, or 'keep' them with null predictions",
    default="error",
    accepts=one_of(get_args(HandleInvalid)),
    is_for_writing=True,
)
INFERENCE_BATCH_SIZE = Setting(
    name="inferenceBatchSize",
    words="rows per forward pass in transform; unset: at most 2048 rows (bf16: 4096) and 64 MiB",
    # So the activations of a layer of a few hundred numbers stay in a core's cache.
    default=2048,
    accepts=at_least(1),
)
INFERENCE_OFFLOAD = Setting[WeightOffload](
    name="inferenceOffload",
    words="where transform keeps the weights: 'none' (in memory) or 'disk' (one tensor at a time)",
    default="none",
    accepts=one_of(get_args(WeightOffload)),
)
INFERENCE_PRECISION = Setting[InferencePrecision](
    name="inferencePrecision",
    words="precision of the forward pass in transform: 'fp32', 'bf16' (autocast) or 'int8' (linear layers)",
    default="fp32",
    accepts=one_of(get_args(InferencePrecision)),
)
INFERENCE_USE_GPU = Setting(
    name="inferenceUseGpu",
    words="whether transform uses a GPU: the GPU of the task, else a GPU by partition number",
    default=False,
)
STORAGE_URI = Setting[str | None](
    name="storageUri",
    words="folder for shards and runs that all workers reach; unset: temporary folder (local master only)",
    convert=without_secrets,
    without_effect=(lambda given: given["runUri"] is not None, "runUri holds the shards and the run"),
)
DATA = Setting[DataPlace](
    name="data",
    words="'copy' writes shards of the rows; 'inPlace' reads the Parquet files below the DataFrame; "
    "'auto' does so if they have at least 1 GiB and the plan allows it",
    default="copy",
    accepts=one_of(get_args(DataPlace)),
    is_for_writing=True,
)
READER = Setting(
    name="reader",
    field="reader",
    words="engine that reads the shards: 'petastorm', 'arrow', or one that a package declares",
    default=default_engine(),
    default_words="`'petastorm'` where installed, else `'arrow'`",
    accepts=listed(lambda: READERS, lambda: list_entry_points("ringspark.readers")),
    may_differ_on_resume=True,
)
CACHE = Setting[Cache](
    name="cache",
    field="cache",
    words="where a worker keeps decoded rows: 'memory', 'disk', 'none', or 'auto', by free memory",
    default="auto",
    accepts=one_of(get_args(Cache)),
    may_differ_on_resume=True,
    without_effect=(
        lambda given: (
            given["cache"] in ("memory", "disk") and given["epochs"] == 1 and given["privacy"] is None
        ),
        "one epoch reads every row once",
    ),
)
