"""Trains on a plain table: every column becomes an input, and a network for tables is built for it.

`fit` uses this module if the estimator has no model, or only names a network for tables. It packs the columns
of the table into one struct column of type `TableRow`. `transform` makes the same struct from a table.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DecimalType, NumericType, StructField, StructType

from ringspark.estimators import run_layout
from ringspark.estimators.columns.schema import FieldIndex, find_field
from ringspark.estimators.held_out_rows import HeldOut, hold_out
from ringspark.estimators.initial_model import OR_NEW, table_kind
from ringspark.estimators.prepared_fit import NETWORKS, TABLE_COLUMN, Plans, PreparedFit
from ringspark.estimators.stages.declared import value_of
from ringspark.estimators.training.objective.deviance import find_power
from ringspark.extras.tables.label import check_label_type, look_at_label
from ringspark.extras.tables.recipe import LARGE, complete_table, unset
from ringspark.extras.tables.table_plan import TablePlan, count_table, plan_table
from ringspark.models import ModelSpec
from ringspark.pipelines import storage
from ringspark.pipelines.column_use import ColumnUse
from ringspark.pipelines.columns import is_case_sensitive, quote
from ringspark.pipelines.kinds import TableRow
from ringspark.pipelines.kinds.table_row import TableColumn

# Spark's tuners add a column of random numbers to the rows of a fold.
_OF_TUNERS = re.compile(r"(CrossValidator|TrainValidationSplit)_[0-9a-f]+_rand")
# The plan of a dry run: with one row, the recipe has the most epochs.
_UNKNOWN_ROWS = TablePlan(kind=TableRow((TableColumn(name=""),)), edges=[[0.0, 1.0]], uses=[], rows=1)


def prepare_table(estimator: Any, dataset: DataFrame, plans: Plans, search_uri: str | None) -> PreparedFit:
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
        check_label_type(label, task)
    names = _input_names(estimator, schema, exact, label_names)
    if not names:
        besides = f" besides the label {label.name!r}" if label else ""
        raise ValueError(f"the DataFrame has no column{besides}; give it some inputs")
    check_names_differ(names, exact)
    monotone = _monotone(estimator, schema, exact, names)
    kinds = estimator.getColumns()
    if chosen := sorted(kinds.keys() - {*label_names}):
        raise ValueError(
            f"columns sets the type of {chosen[0]!r}, but without a model, fit chooses the types; "
            "remove it, or give a model"
        )
    split = hold_out(estimator, plans.fix_rows(dataset), [*label_names, *names], plans.is_dry_run)
    asked, initial = [task, label.name if label else "", *names], estimator.getInitialModel()
    offset = estimator._find_offset(FieldIndex(schema, exact))
    of_label = {"loss": estimator.getLoss(), "offset": offset}
    key = (
        *asked,
        split.indicator,
        estimator.getRunUri(),
        id(initial),
        str(of_label),
        str(sorted(monotone.items())),
    )
    if key not in plans.known:
        stored = _stored_plan(search_uri or _begun_run(estimator, dataset), asked)
        plans.known[key] = stored or _plan(split, label, asked, initial, plans.is_dry_run, of_label, monotone)
    plan = plans.known[key]
    if not plans.is_dry_run:
        _warn_of_columns(plan.uses)
    inner = estimator.copy({estimator.monotone: monotone} if monotone else None)
    inner._resetUid(estimator.uid)
    for name in ("featuresCol", "validationFraction", "timeCol"):
        inner.clear(inner.getParam(name))
    model = ModelSpec(NETWORKS[0]) if initial is None else initial._network_to_train()
    if initial is None and estimator.isDefined(estimator.model):
        model = estimator.getModel()
    completion = complete_table(inner, plan, model)
    if plans.is_dry_run:
        # Both depend on the rows; these placeholders pass every check that real values pass.
        completion |= unset(estimator, {"batchSize": LARGE, "warmupSteps": 0})
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
    others = (
        find_field(name, setting, schema, exact)
        for name, setting in ((weight, "weightCol"), (offset, "offsetCol"))
        if name
    )
    for each in (label, *others):
        if each and isinstance(each.dataType, DecimalType):
            frame = frame.withColumn(each.name, F.col(quote(each.name)).cast("double"))
    return PreparedFit(inner, frame, plan, frozenset(unset(estimator, completion)) - {"model"})


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
    split: HeldOut,
    label: StructField | None,
    asked: list[str],
    initial: Any,
    is_dry_run: bool,
    of_label: dict[str, Any],
    monotone: Collection[str],
) -> TablePlan:
    held = F.coalesce(F.col(quote(split.indicator)).cast("boolean"), F.lit(False))
    outputs: dict[str, Any] = {}
    if label is None:
        target = F.lit(0.0)
    elif is_dry_run:
        outputs = {"out_features": 1 if asked[0] == "regression" else 2}
        outputs |= {"link": "log"} if find_power(of_label["loss"]) else {}
    elif initial is None or initial.without_label:
        target, outputs = look_at_label(split.dataset, held, label, asked[0], **of_label)
    if initial is None:
        plan = _UNKNOWN_ROWS if is_dry_run else plan_table(split.dataset, asked[2:], held, target, monotone)
        return replace(plan, outputs=outputs, asked=asked)
    plan = initial_plan(initial, asked[2:], 1 if is_dry_run else split.dataset.where(~held).count(), asked)
    # Models of earlier versions have no bins to count rows in.
    if not is_dry_run and all(column.counts for column in plan.kind.columns):
        schema = split.dataset.schema
        plan.kind.adopt(TABLE_COLUMN, StructType([schema[name] for name in plan.kind.sources]))
        plan = replace(plan, kind=count_table(split.dataset, held, plan.kind, plan.rows))
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
    offset = estimator._find_offset(fields)
    param = next((p for p in ("inputCols", "featuresCol") if estimator.isSet(estimator.getParam(p))), None)
    if param is None:
        teacher = value_of(estimator, "teacher")
        taught = {field.name for field in fields.all(teacher)} if isinstance(teacher, str) else set()
        others = {*labels, *taught, indicator, weight, offset}
        return [name for name in schema.names if name not in others and not _OF_TUNERS.fullmatch(name)]
    # Only a named weight or offset is an input, too.
    named = estimator.inputColumns()
    names = [fields.find(name, param).name for name in (named if offset is None else named[:-1])]
    for name in {*labels, indicator}.intersection(names):
        setting = "validationIndicatorCol" if name == indicator else "labelCol"
        raise ValueError(
            f"{param} and {setting} both name {name!r}, which the network must not read as an input; choose "
            f"other columns for {param}"
        )
    return names


def _monotone(estimator: Any, schema: StructType, exact: bool, inputs: Sequence[str]) -> dict[str, str]:
    """Returns the setting `monotone` with the names as the DataFrame spells them."""
    found = {}
    for name, direction in (estimator.getMonotone() or {}).items():
        field = find_field(name, "monotone", schema, exact)
        if field.name not in inputs or not isinstance(field.dataType, NumericType):
            what = "no input" if field.name not in inputs else f"of type {field.dataType.simpleString()}"
            raise ValueError(
                f"monotone names the column {field.name!r}, which is {what}; name numeric inputs"
            )
        found[field.name] = direction
    return found


def _warn_of_columns(uses: Sequence[ColumnUse]) -> None:
    left_out = [use.column for use in uses if use.use == "left out"]
    leaks = [use.column for use in uses if use.leaks]
    for columns, problem, advice in (
        (left_out, "left out of the table", "model.summary.columns says why"),
        (leaks, "predicts the label almost perfectly", "drop the column if it is known only after the label"),
    ):
        if columns:
            shown = ", ".join(map(repr, columns[:20]))
            warnings.warn(f"{problem}: {shown}; {advice}", UserWarning, stacklevel=6)


def initial_plan(model: Any, names: Sequence[str], rows: int, asked: list[str]) -> TablePlan:
    """Returns the plan with which the model was trained, for a table with the columns `names`."""
    kind, spec = table_kind(model), model.getModel()
    if kind is None:
        raise ValueError(
            "initialModel has its own network, and the estimator names a network for a table; leave "
            f"model unset, {OR_NEW}"
        )
    if missing := [name for name in kind.sources if name not in names]:
        raise ValueError(
            f"initialModel was trained on the column {missing[0]!r}, and the table has {list(names)}; add "
            f"the column, {OR_NEW}"
        )
    uses = list(model.summary.column_uses) if model.hasSummary else []
    return TablePlan(kind=kind, edges=spec.kwargs["edges"], uses=uses, rows=rows, asked=asked)
