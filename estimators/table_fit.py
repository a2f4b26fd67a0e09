"""Trains on a plain table: every column becomes an input, and a network for tables is built for it.

`fit` uses this module if the estimator has no model, or only names a network for tables. It packs the columns
of the table into one struct column of type `TableRow`. `transform` makes the same struct from a table.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    DecimalType,
    NumericType,
    StringType,
    StructField,
    StructType,
)

from ringspark.estimators import run_layout
from ringspark.estimators.columns.schema import FieldIndex, find_field
from ringspark.estimators.held_out_rows import HeldOut, hold_out
from ringspark.estimators.initial_model import table_plan
from ringspark.estimators.stages.declared import value_of
from ringspark.estimators.techniques import techniques_in
from ringspark.estimators.training.member_choice import IGNORED
from ringspark.models import ModelSpec
from ringspark.models.tabm import RARE_FROM
from ringspark.pipelines import storage
from ringspark.pipelines.columns import check_batch, is_case_sensitive, quote
from ringspark.pipelines.fixed_rows import fix_rows
from ringspark.pipelines.kinds import TableRow
from ringspark.pipelines.kinds.table_row import TableColumn
from ringspark.pipelines.spark_errors import explain_worker_errors
from ringspark.pipelines.table_plan import ColumnUse, TablePlan, plan_table

TABLE_COLUMN = "__ringspark_table"
"""Name of the struct with the table's columns."""

# Networks that take the numbers and ids of a table; the first one is the default.
_NETWORKS = ("tabpack", "tabm")
_MAX_CLASSES = 1_000
# Spark's tuners add a column of random numbers to the rows of a fold.
_OF_TUNERS = re.compile(r"(CrossValidator|TrainValidationSplit)_[0-9a-f]+_rand")
# Most inputs of the first layer, and the width at which few columns are embedded.
_WIDTHS, _WIDTH = 2_048, 12
# Below this share of the mean, float32 rounds a hundredth of the deviation away.
_FEW_DIGITS = 100 * 2.0**-24
# Of so few rows that `_recipe` chooses the most epochs.
_UNKNOWN_ROWS = TablePlan(kind=TableRow((TableColumn(name=""),)), edges=[[0.0, 1.0]], uses=[], rows=1)
_LARGEST_LABEL = float(np.finfo(np.float32).max)
_LEAST_LABEL = float(np.finfo(np.float32).tiny)
_ROWS_PER_STEP = 256
_STEPS = 5_000
_MAX_EPOCHS = 100
# Most rows that so many steps can pass over four times. On a larger table fewer members train, whose dropout
# differs: on 1 M rows, eight members and two epochs had an AUC of 0.8629, three members and one epoch 0.8626.
_LARGE = _STEPS * _ROWS_PER_STEP // 4
_LARGE_DROPOUTS = (0.0, 0.1, 0.3)


@dataclass
class Plans:
    """State of fits on one DataFrame.

    Attributes:
        known: Inputs, label and held-out rows -> the plan.
        rows: Result of `fix_rows`; None until a fit needs it.
        is_dry_run: Whether to run no job: the fit is only checked, with the settings of any rows.
    """

    known: dict[tuple[Any, ...], TablePlan] = field(default_factory=dict)
    rows: DataFrame | None = None
    is_dry_run: bool = False

    def fix_rows(self, dataset: DataFrame) -> DataFrame:
        # One job measures the training rows, and another one writes them.
        if self.rows is None:
            self.rows = dataset if self.is_dry_run else fix_rows(dataset)
        return self.rows


@dataclass(frozen=True)
class PreparedFit:
    """A fit with a network and a choice of the rows to hold out.

    Attributes:
        estimator: The estimator, or a copy that has the network, the input and the recipe.
        dataset: The DataFrame, with the columns that the copy names.
        plan: What the network gets of each column; None if the user gave a whole network.
        recipe: The settings that the plan sets, because the user has not.
    """

    estimator: Any
    dataset: DataFrame
    plan: TablePlan | None = None
    recipe: frozenset[str] = frozenset()

    def keep_plan(self, uri: str) -> None:
        """Writes the plan for a resume: a second pass over the rows might choose other quantiles."""
        if self.plan is not None:
            storage.write_atomic(storage.join(uri, run_layout.TABLE), self.plan.to_json().encode())

    def complete(self, changed: Any, names: Collection[str]) -> Any:
        """Returns `changed` with the network and the recipe for the table.

        `changed` is a copy of `estimator` with new values of the settings `names`, which change the recipe.
        """
        if self.plan is None:
            return changed
        model = changed.getModel()
        if not isinstance(model, ModelSpec) or model.target not in _NETWORKS:
            raise ValueError(
                f"model must be a ModelSpec of {' or '.join(map(repr, _NETWORKS))} for a table, "
                f"got {model!r:.80}; give the estimator a whole model and featuresCol or inputCols"
            )
        made = changed.copy()
        for name in self.recipe.difference(names):
            made.clear(made.getParam(name))
        return made._set(**_completion(made, self.plan, model))

    @property
    def uses(self) -> Sequence[ColumnUse]:
        return () if self.plan is None else self.plan.uses


def is_for_tables(model: Any) -> bool:
    """Whether a model names a network for tables, and `fit` must still add the arguments about the table."""
    return isinstance(model, ModelSpec) and model.target in _NETWORKS and "edges" not in model.kwargs


def wants_table(estimator: Any) -> bool:
    """Whether the table's columns decide the network: no model is given, or one for tables by name."""
    return not estimator.isDefined(estimator.model) or is_for_tables(estimator.getModel())


def prepare_fit(
    estimator: Any, dataset: DataFrame, plans: Plans | None = None, search_uri: str | None = None
) -> PreparedFit:
    """Makes the network for a table, and holds out the newest rows for `timeCol`.

    Fits on one DataFrame share `plans`. `search_uri` is the folder of a search, which may hold a plan.
    Techniques may add columns to the rows. Runs a few Spark jobs, and raises like `fit`.
    """
    plans = plans or Plans()
    with explain_worker_errors():
        fit = _prepare(estimator, dataset, plans, search_uri)
    for technique in [] if plans.is_dry_run else techniques_in(estimator):
        fit = technique.prepare(fit)
    return fit


def _prepare(estimator: Any, dataset: DataFrame, plans: Plans, search_uri: str | None) -> PreparedFit:
    check_batch(dataset, f"{type(estimator).__name__}.fit")
    estimator = estimator._complete()
    for technique in techniques_in(estimator):
        technique.check_estimator(estimator, is_table=wants_table(estimator))
    if wants_table(estimator):
        return _prepare_table(estimator, dataset, plans, search_uri)
    if not estimator.getTimeCol() or estimator.getValidationFraction() is None:
        return PreparedFit(estimator, dataset)
    split = hold_out(estimator, dataset, (), plans.is_dry_run)
    copy = estimator.copy()
    for param in (copy.validationFraction, copy.timeCol):  # the indicator replaces both
        copy.clear(param)
    copy._set(validationIndicatorCol=split.indicator)
    return PreparedFit(copy, split.dataset)


def _prepare_table(estimator: Any, dataset: DataFrame, plans: Plans, search_uri: str | None) -> PreparedFit:
    task = estimator._task
    has_label = estimator.hasParam("labelCol")
    if task == "any" and has_label:
        raise ValueError(
            f"{type(estimator).__name__} needs a model; pass model=ModelSpec('mlp', {{...}}) or an nn.Module"
            ", or use TorchClassifier or TorchRegressor, which complete a network for a table"
        )
    schema, exact = dataset.schema, is_case_sensitive(dataset.sparkSession)
    labels = estimator._label_columns() if has_label else []
    label = next((find_field(name, "labelCol", schema, exact) for name in labels), None)
    label_names = [] if label is None else [label.name]
    if label is not None:
        _check_label_type(label, task)
    names = _input_names(estimator, schema, exact, label_names)
    if not names:
        besides = f" besides the label {label.name!r}" if label else ""
        raise ValueError(f"the DataFrame has no column{besides}; give it some inputs")
    check_names_differ(names, exact)
    kinds = estimator.getColumns()
    if chosen := sorted(kinds.keys() - {*label_names}):
        raise ValueError(
            f"columns sets {chosen[0]!r} to {kinds[chosen[0]]}, but without a model, fit chooses the types; "
            "remove it, or give a model"
        )
    split = hold_out(estimator, plans.fix_rows(dataset), [*label_names, *names], plans.is_dry_run)
    asked, initial = [task, label.name if label else "", *names], estimator.getInitialModel()
    key = (*asked, split.indicator, estimator.getRunUri(), id(initial))
    if key not in plans.known:
        stored = _stored_plan(search_uri or _begun_run(estimator, dataset), asked)
        plans.known[key] = stored or _plan(split, label, asked, initial, plans.is_dry_run)
    plan = plans.known[key]
    if not plans.is_dry_run:
        _warn_of_columns(plan.uses)
    inner = estimator.copy()
    inner._resetUid(estimator.uid)
    for name in ("featuresCol", "validationFraction", "timeCol"):
        inner.clear(inner.getParam(name))
    model = ModelSpec(_NETWORKS[0]) if initial is None else initial._network_to_train()
    if initial is None and estimator.isDefined(estimator.model):
        model = estimator.getModel()
    completion = _completion(estimator, plan, model)
    if plans.is_dry_run:
        # The rows decide both; these values break no rule that other values keep.
        completion |= _unset(estimator, {"batchSize": _LARGE, "warmupSteps": 0})
    inner._set(
        inputCols=[TABLE_COLUMN],
        columns={**kinds, TABLE_COLUMN: plan.kind},
        validationIndicatorCol=split.indicator,
        **completion,
    )
    if not has_label:
        inner._set(**inner._table_objective(plan))
    sources = set(plan.kind.sources)
    table = StructType([field for field in split.dataset.schema.fields if field.name in sources])
    row = F.struct(F.lit(0.0).alias(_UNKNOWN_ROWS.kind.columns[0].source))
    if plan.kind != _UNKNOWN_ROWS.kind:
        row = plan.kind.adopt(TABLE_COLUMN, table).select(None, table)
    frame = split.dataset.withColumn(TABLE_COLUMN, row)
    weight = value_of(estimator, "weightCol")
    for each in (label, weight and find_field(weight, "weightCol", schema, exact)):
        if each and isinstance(each.dataType, DecimalType):
            frame = frame.withColumn(each.name, F.col(quote(each.name)).cast("double"))
    return PreparedFit(inner, frame, plan, frozenset(_unset(estimator, completion)) - {"model"})


def _completion(estimator: Any, plan: TablePlan, model: ModelSpec) -> dict[str, Any]:
    """Returns the settings that make an estimator train on the table: the model and the recipe."""
    arguments = {"edges": plan.edges, "cardinalities": plan.kind.cardinalities, **plan.outputs}
    if (width := _WIDTHS // (len(plan.edges) + len(plan.kind.cardinalities))) < _WIDTH:
        arguments |= dict.fromkeys(("number_width", "category_width"), max(1, width))
    if model.target == "tabpack" and plan.rows > _LARGE and not {"rates", "dropouts"} & model.kwargs.keys():
        arguments |= {"rates": [1.0] * len(_LARGE_DROPOUTS), "dropouts": _LARGE_DROPOUTS}
    spec = ModelSpec(model.target, (arguments if is_for_tables(model) else {}) | model.kwargs)
    return {"model": spec, **_recipe(estimator, plan, model.target)}


def _begun_run(estimator: Any, dataset: DataFrame) -> str | None:
    """Returns the folder of the run that a resume continues."""
    uri: str | None = estimator._run_uri(dataset.sparkSession)
    # A run without an identity has trained nothing, and starts again.
    begun = uri is not None and storage.exists(storage.join(uri, run_layout.IDENTITY))
    return uri if begun else None


def _stored_plan(uri: str | None, asked: list[str]) -> TablePlan | None:
    """Returns the plan in the folder of a run or search, if any; `asked`: task, label, inputs of the fit."""
    if uri is None:
        return None
    try:
        plan = TablePlan.from_json(storage.read_bytes(storage.join(uri, run_layout.TABLE)))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(
            f"{run_layout.TABLE} in runUri {uri!r} is damaged ({error}); give runUri a new folder"
        ) from error
    if plan.asked != asked:
        raise ValueError(
            f"the run in {uri!r} trains on the label {plan.asked[1]!r} and the columns {plan.asked[2:]}, not "
            f"on {asked[1]!r} and {asked[2:]}; give the run's label and columns, or another runUri"
        )
    return plan


def _plan(
    split: HeldOut, label: StructField | None, asked: list[str], initial: Any, is_dry_run: bool
) -> TablePlan:
    held = F.coalesce(F.col(quote(split.indicator)).cast("boolean"), F.lit(False))
    outputs: dict[str, Any] = {}
    if label is None:
        target = F.lit(0.0)
    elif is_dry_run:
        outputs = {"out_features": 1 if asked[0] == "regression" else 2}
    elif initial is None or initial.without_label:
        target, outputs = _look_at_label(split.dataset, held, label, asked[0])
    if initial is None:
        plan = _UNKNOWN_ROWS if is_dry_run else plan_table(split.dataset, asked[2:], held, target)
        return replace(plan, outputs=outputs, asked=asked)
    plan = table_plan(initial, asked[2:], 1 if is_dry_run else split.dataset.where(~held).count(), asked)
    return replace(plan, outputs=outputs) if initial.without_label else plan


def check_names_differ(names: Sequence[str], exact: bool) -> None:
    """Raises ValueError if two columns have the same name for Spark."""
    seen: dict[str, str] = {}
    for name in names:
        key = name if exact else name.lower()
        if key in seen:
            other = seen[key]
            differ = "have the same name" if other == name else "differ only in case"
            raise ValueError(f"the columns {other!r} and {name!r} {differ}; rename or drop one of them")
        seen[key] = name


def _input_names(estimator: Any, schema: StructType, exact: bool, labels: Sequence[str]) -> list[str]:
    fields = FieldIndex(schema, exact)
    indicator, weight = (
        fields.find(name, setting).name if (name := value_of(estimator, setting)) else None
        for setting in ("validationIndicatorCol", "weightCol")
    )
    param = next((p for p in ("inputCols", "featuresCol") if estimator.isSet(estimator.getParam(p))), None)
    if param is None:
        others = {*labels, indicator, weight}
        return [name for name in schema.names if name not in others and not _OF_TUNERS.fullmatch(name)]
    # Only a named weight is an input, too.
    names = [fields.find(name, param).name for name in estimator.inputColumns()]
    for name in {*labels, indicator}.intersection(names):
        setting = "validationIndicatorCol" if name == indicator else "labelCol"
        raise ValueError(
            f"{param} and {setting} both name {name!r}, which the network must not read as an input; choose "
            f"other columns for {param}"
        )
    return names


def _warn_of_columns(uses: Sequence[ColumnUse]) -> None:
    if left_out := [repr(use.column) for use in uses if use.use == "left out"]:
        warnings.warn(
            f"left out of the table: {', '.join(left_out[:20])}; model.summary.columns says why",
            UserWarning,
            stacklevel=6,
        )
    if leaks := [repr(use.column) for use in uses if use.leaks]:
        warnings.warn(
            f"predicts the label almost perfectly: {', '.join(leaks[:20])}; drop the column if it is known "
            "only after the label",
            UserWarning,
            stacklevel=6,
        )


def _check_label_type(label: StructField, task: str) -> None:
    types: tuple[Any, ...] = (NumericType, BooleanType)
    advice = "TorchRegressor without a model predicts one number, so give a column of numbers, or a model"
    if task == "classification":
        types = (*types, StringType)
        advice = "TorchClassifier predicts one class per row, so give a column of strings or of class numbers"
    if not isinstance(label.dataType, types):
        raise ValueError(f"label {label.name!r} holds {label.dataType.simpleString()}; {advice}")


def _look_at_label(
    dataset: DataFrame, held: Column, label: StructField, task: str
) -> tuple[Column, dict[str, Any]]:
    """Returns the label as a number of mean 0 and variance 1, and network arguments that depend on it."""
    value, rows = F.col(quote(label.name)), dataset.where(~held)
    if task == "regression":
        number = value.cast("double")
        found = rows.agg(F.avg(number), F.stddev_pop(number), F.max(F.abs(number))).head()
        assert found is not None
        mean, deviation, largest = (each or 0.0 for each in found)
        if not largest < math.inf:  # NaN is the largest for Spark
            raise ValueError(
                f"label {label.name!r} has NaN or infinite values; drop these rows, for example by "
                f"df.where(\"abs({quote(label.name)}) < double('inf')\")"
            )
        if largest > _LARGEST_LABEL:
            raise ValueError(
                f"label {label.name!r} has values up to {largest:.3g}, but networks compute in float32, "
                f"which ends at {_LARGEST_LABEL:.3g}; divide the label by a constant before fit"
            )
        if 0 < largest < _LEAST_LABEL:
            raise ValueError(
                f"label {label.name!r} has values only up to {largest:.3g}, but networks compute in float32, "
                f"which begins at {_LEAST_LABEL:.3g}; multiply the label by a constant before fit"
            )
        if 0 < deviation < abs(mean) * _FEW_DIGITS:
            warnings.warn(
                f"label {label.name!r} varies by only {deviation:.3g} around {mean:.7g}, and predictions "
                "have 7 digits; subtract a constant from the label",
                UserWarning,
                stacklevel=7,
            )
        arguments = {"out_features": 1, "center": mean, "scale": deviation or 1.0}
        return F.coalesce((number - mean) / (deviation or 1.0), F.lit(0.0)), arguments
    # Classes that only held-out rows have count, too: which rows are held out must not change the network.
    is_class = value.isNotNull()
    if isinstance(label.dataType, StringType):
        value = value.cast("string")  # drops the collation, like the class ids
    if isinstance(label.dataType, NumericType):
        number = value.cast("double")
        is_class &= ~F.isnan(number) & (F.abs(number) < math.inf) & (value != F.lit(IGNORED))
    counts = (
        dataset.where(is_class)
        .groupBy(value.alias("label"))
        .agg(F.count(F.lit(1)).alias("rows"))
        .orderBy(F.desc("rows"), "label")
        .limit(_MAX_CLASSES + 1)
        .collect()
    )
    if not 1 < len(counts) <= _MAX_CLASSES:
        many = f"over {_MAX_CLASSES:,}" if counts[1:] else f"{len(counts)}"
        raise ValueError(
            f"label {label.name!r} has {many} different values; a classification "
            f"takes 2 to {_MAX_CLASSES:,} classes"
            + ("; for a number that is no class use TorchRegressor" if counts[1:] else "")
        )
    is_text = isinstance(label.dataType, StringType)
    classes = len(counts) if is_text else int(max(row["label"] for row in counts)) + 1
    if classes > _MAX_CLASSES:
        raise ValueError(
            f"label {label.name!r} has the class {classes - 1}, and class numbers must lie in 0 to "
            f"{_MAX_CLASSES - 1}; cast it to a string: the values of strings are numbered automatically"
        )
    share = counts[0]["rows"] / sum(row["rows"] for row in counts)
    target = ((value == F.lit(counts[0]["label"])).cast("double") - share) / (share * (1 - share)) ** 0.5
    return F.coalesce(target, F.lit(0.0)), {"out_features": classes, "averages": "probabilities"}


def _recipe(estimator: Any, plan: TablePlan, network: str) -> dict[str, Any]:
    """Returns values for training settings that the user has not set, and always a classifier's metrics."""

    def given(name: str, value: Any) -> Any:
        param = estimator.getParam(name)
        return estimator.getOrDefault(param) if estimator.isSet(param) else value

    batch = _ROWS_PER_STEP
    while batch > 32 and plan.rows < 20 * batch:
        batch //= 2
    is_large = plan.rows > _LARGE
    used = given("batchSize", 4 * batch if is_large else batch)
    # Larger batches do not pass over the rows more often.
    passes = _STEPS // max(1, plan.rows // min(used, batch))
    epochs = given("epochs", max(1, min(_MAX_EPOCHS, passes)))
    batch, steps = used, max(1, plan.rows // used)
    least_epochs = epochs if estimator.getTimeBudgetSeconds() is None else 1
    is_pack = network == "tabpack"
    undecayed = ["*bias*", "head.*"] if is_pack else ["*bias*", "*.inputs", "*.outputs"]
    if plan.kind.cardinalities:
        undecayed.append("embeddings.*")
    if any(n > RARE_FROM for n in plan.kind.cardinalities):
        undecayed.append("effects.*")
    is_regression = estimator._task == "regression"
    recipe: dict[str, Any] = {
        "loss": "mse_per_member" if is_regression else "cross_entropy_per_member",
        "optimizer": "adamw",
        # The members of a pack take shares of the rate. In a large table, often of many months, fast networks
        # follow the days that they saw last.
        "learningRate": (2e-3 if is_large else 3e-3) if is_pack else 1e-3,
        "weightDecay": 1e-2,
        "maxGradNorm": None if is_pack else 1.0,
        "lrSchedule": "cosine",
        "warmupSteps": steps * epochs // 30 if not estimator.isSet(estimator.lrSchedule) else None,
        "batchSize": batch,
        "epochs": epochs,
        "patience": max(8, epochs // 3),
        "keep": "best",
        # Over the steps of one epoch, because small tables are overfitted after a few epochs. In the end not
        # more than 1 % of the initial weights may remain in the average; a budget may end after one epoch.
        "emaDecay": min(1 - 1 / max(10, min(200, steps)), 0.01 ** (1 / (steps * least_epochs + 1))),
        "parameterGroups": [{"params": undecayed, "weightDecay": 0.0}],
    }
    if recipe["patience"] >= epochs:
        del recipe["patience"]
    if estimator._task == "any":
        del recipe["loss"]
    elif not is_regression:
        # Also if the user has other metrics.
        own = estimator.getMetrics()
        recipe["metrics"] = own if "temperature" in own else [*own, "temperature"]
        return {**_unset(estimator, recipe), "metrics": recipe["metrics"]}
    return _unset(estimator, recipe)


def _unset(estimator: Any, recipe: dict[str, Any]) -> dict[str, Any]:
    unset = {name for name in recipe if not estimator.isSet(estimator.getParam(name))}
    return {name: value for name, value in recipe.items() if name in unset and value is not None}
