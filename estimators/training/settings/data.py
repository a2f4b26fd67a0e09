"""Settings of the data: columns, rows to hold out, prediction, folders and the reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from annotated_types import Gt, Lt

from ringspark.estimators.options.checked import AtLeast1, Names, Rule, WrongTypeError
from ringspark.estimators.training.settings.choices import (
    Cache,
    DataPlace,
    HandleInvalid,
    InferencePrecision,
    WeightOffload,
)
from ringspark.estimators.training.settings.setting import Section, listed_name, setting
from ringspark.pipelines import READERS, default_engine, storage
from ringspark.pipelines.entry_points import list_entry_points
from ringspark.pipelines.kinds import Kind, kind_from_json


def _kinds(value: Any) -> dict[str, Any]:
    """Returns the column types by column name, in the JSON form that a saved stage has."""
    if not isinstance(value, Mapping):
        raise WrongTypeError(
            "columns must map names to column types, e.g. {'city': Vocabulary(max_size=1000)}, "
            f"got {value!r}"
        )
    kinds = {}
    for name, given in value.items():
        kind = kind_from_json(dict(given)) if isinstance(given, Mapping) else given
        if not isinstance(kind, Kind):
            raise WrongTypeError(
                f"columns[{name!r}] must be a column type of ringspark.pipelines such as "
                f"Vocabulary(max_size=1000), HashBuckets(1024) or Padded(), got {given!r}"
            )
        kinds[name] = kind.to_json()
    return kinds


def _inner_columns(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(n, str) and n for n in (*value, *value.values())):
        raise WrongTypeError(
            f"innerCols must map names of modules to names of columns, e.g. {{'encoder': 'embedding'}}, got "
            f"{value!r}"
        )
    return dict(value)


def without_secrets(value: Any) -> Any:
    """Raises ValueError for a folder's URI with credentials, because Params are saved with the stage."""
    if isinstance(value, str):
        storage.refuse_secrets(value)
    return value


_LossWeights = Annotated[
    tuple[float, ...],
    Rule(lambda w: any(w) and all(each >= 0 for each in w), "be 0 or above, with one above 0"),
]


_Quantiles = Annotated[
    tuple[float, ...],
    Rule(
        lambda q: bool(q) and all(a < b for a, b in pairwise((0, *q, 1))),
        "be ascending numbers between 0 and 1, such as (0.1, 0.5, 0.9)",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    GROUP = "data"

    reader: str = setting(
        default_engine(),
        "engine that reads the shards: 'petastorm', 'arrow', or one that a package declares",
        default_words="`'petastorm'` where installed, else `'arrow'`",
        convert=listed_name("reader", lambda: READERS, lambda: list_entry_points("ringspark.readers")),
        may_differ_on_resume=True,
    )
    cache: Cache = setting(
        "auto",
        "where a worker keeps decoded rows: 'memory', 'disk', 'none', or 'auto', by free memory",
        may_differ_on_resume=True,
        without_effect=(
            lambda given: (
                given["cache"] in ("memory", "disk") and given["epochs"] == 1 and given["privacy"] is None
            ),
            "one epoch reads every row once",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Inputs(Section):
    """The inputs of a training and of a prediction."""

    GROUP = "data"
    ON_DRIVER = True

    features_col: str = setting(
        "features",
        "column of the network's only input",
        without_effect=(lambda given: given["inputCols"] is not None, "inputCols names the inputs"),
    )
    input_cols: Names | None = setting(
        None, "one column per input of the network, instead of featuresCol", field="input_columns"
    )
    handle_invalid: HandleInvalid = setting(
        "error",
        "what to do with rows that have a null or NaN input: 'error', 'skip' or 'keep' (null predictions)",
        is_for_writing=True,
    )


@dataclass(frozen=True, kw_only=True)
class Label(Section):
    """The label column of an estimator with one label."""

    GROUP = "data"
    ON_DRIVER = True

    label_col: str = setting("label", "column of the labels", field="label_columns")


@dataclass(frozen=True, kw_only=True)
class Offset(Section):
    """The offset of an estimator with one label, and of its model."""

    GROUP = "data"
    ON_DRIVER = True

    offset_col: str | None = setting(
        None,
        "numeric column that is added to the network's output before the link function, such as the "
        "logarithm of an exposure; unset or empty: none",
        empty_is_unset=True,
    )


@dataclass(frozen=True, kw_only=True)
class Labels(Section):
    """The labels of a network with several outputs."""

    GROUP = "data"
    ON_DRIVER = True

    label_cols: Names | None = setting(
        None, "one label column per output of the network, instead of labelCol"
    )
    loss_weights: _LossWeights | None = setting(
        None, "weight of each label's loss in their sum; unset: 1 each", field="loss_weights"
    )


def _directions(value: Any) -> dict[str, str]:
    known = ("increasing", "decreasing")
    if isinstance(value, dict) and all(isinstance(k, str) and v in known for k, v in value.items()):
        return value
    raise WrongTypeError(
        f"monotone must map names of columns to {' or '.join(map(repr, known))}, got {value!r:.80}"
    )


@dataclass(frozen=True, kw_only=True)
class Columns(Section):
    GROUP = "data"
    ON_DRIVER = True

    monotone: dict[str, str] | None = setting(
        None,
        "dict from a numeric column of a table to 'increasing' or 'decreasing': if the number rises, the "
        "prediction never falls, or never rises",
        convert=_directions,
    )
    columns: dict[str, Any] | None = setting(
        None,
        "column types by name, such as Vocabulary, Tokens, Padded or Image, if Spark's type is not enough",
        convert=_kinds,
        is_for_writing=True,
    )
    weight_col: str | None = setting(
        None,
        "column of the rows' weights in the loss; unset or empty: 1 each",
        field="weight_column",
        empty_is_unset=True,
    )
    validation_indicator_col: str | None = setting(
        None,
        "column that is true in the rows to hold out; unset or empty: none",
        empty_is_unset=True,
        is_for_writing=True,
    )
    validation_fraction: Annotated[float, Gt(0), Lt(1)] | None = setting(
        None, "share of the rows to hold out, chosen by the seed", is_for_writing=True
    )
    time_col: str | None = setting(
        None,
        "column with each row's time: the newest rows are held out instead of a random share",
        empty_is_unset=True,
        is_for_writing=True,
        without_effect=(
            lambda given: given["validationFraction"] is None and given["model"] is not None,
            "validationFraction is not set",
        ),
    )
    storage_uri: str | None = setting(
        None,
        "folder that all workers reach, for shards and runs; unset: temporary folder (local master only)",
        convert=without_secrets,
        without_effect=(lambda given: given["runUri"] is not None, "runUri holds the shards and the run"),
    )
    data: DataPlace = setting(
        "copy",
        "'copy' writes shards of the rows; 'inPlace' reads the Parquet files below the DataFrame; "
        "'auto' reads in place if they have at least 1 GiB and the DataFrame's query plan allows it",
        is_for_writing=True,
    )


@dataclass(frozen=True, kw_only=True)
class Prediction(Section):
    GROUP = "prediction"
    ON_DRIVER = True

    prediction_col: str = setting("prediction", "column of the predictions")
    prediction_cols: Names | None = setting(
        None, "one prediction column per output of the network, instead of predictionCol"
    )
    inner_cols: dict[str, str] | None = setting(
        None,
        "dict from the name of a submodule to the vector column that transform adds for its output",
        convert=_inner_columns,
    )
    contributions_col: str | None = setting(
        None,
        "vector column with the contribution of each column of a table to the prediction, and at the end the "
        "prediction for a baseline row; unset or empty: none",
        empty_is_unset=True,
    )
    # With this batch size, the activations of a layer with a few hundred units fit into a core's cache.
    inference_batch_size: AtLeast1 = setting(
        2048, "rows per forward pass in transform; unset: at most 2048 rows (bf16: 4096) and 64 MiB"
    )
    inference_offload: WeightOffload = setting(
        "none", "where transform keeps the weights: 'none' (in memory) or 'disk' (one tensor at a time)"
    )
    inference_precision: InferencePrecision = setting(
        "fp32",
        "precision of the forward pass in transform: 'fp32', 'bf16' (autocast) or 'int8' (linear layers)",
    )
    inference_use_gpu: bool = setting(
        False, "whether transform uses a GPU: the GPU of the task, else a GPU by partition number"
    )


@dataclass(frozen=True, kw_only=True)
class Classification(Section):
    """The outputs of classifiers."""

    GROUP = "prediction"
    ON_DRIVER = True

    raw_prediction_col: str = setting("rawPrediction", "column of the logits, a vector; empty: none")
    probability_col: str = setting("probability", "column of the class probabilities, a vector; empty: none")
    predicted_label_col: str = setting(
        "predictedLabel", "column of the predicted class as a string, if the labels were strings; empty: none"
    )
    thresholds: tuple[float, ...] | None = setting(
        None, "one number per class; the class with the largest probability / threshold is predicted"
    )


@dataclass(frozen=True, kw_only=True)
class Regression(Section):
    """The outputs of regressors."""

    GROUP = "prediction"
    ON_DRIVER = True

    quantiles: _Quantiles | None = setting(
        None,
        "quantiles of the label that a network for a table predicts, as probabilities such as (0.1, 0.5, "
        "0.9); unset: it predicts the mean",
        field="quantiles",
    )
    quantiles_col: str = setting("quantiles", "column of the predicted quantiles, a vector; empty: none")
    intervals: Annotated[float, Gt(0), Lt(1)] | None = setting(
        None,
        "share of the labels that prediction intervals cover, such as 0.9, by split-conformal prediction on "
        "the held-out rows; unset: no intervals",
    )
    interval_col: str = setting(
        "interval", "column of the prediction intervals, a struct of lower and upper; empty: none"
    )
    interval_group_col: str | None = setting(
        None,
        "column with the group of each row; groups with enough held-out rows get their own interval "
        "correction",
        empty_is_unset=True,
        without_effect=(lambda given: given["intervals"] is None, "intervals is not set"),
    )


@dataclass(frozen=True, kw_only=True)
class Corrections(Section):
    """Corrections of prediction intervals, measured by `fit`."""

    GROUP = "prediction"
    ON_DRIVER = True

    interval_corrections: dict[str, Any] | None = setting(
        None,
        "dict that fit sets, in the label's unit: 'all' widens an interval on each side, and 'groups' has "
        "the corrections of single groups",
    )
