"""A fit whose DataFrame was completed: a network for a table, held-out rows, columns of techniques."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame

from ringspark.estimators import run_layout
from ringspark.estimators.held_out_rows import hold_out
from ringspark.estimators.techniques import FUNCTIONS, techniques_in
from ringspark.models import ModelSpec
from ringspark.pipelines import storage
from ringspark.pipelines.column_use import ColumnUse
from ringspark.pipelines.columns import check_batch
from ringspark.pipelines.fixed_rows import fix_rows
from ringspark.pipelines.local_python import choose_python
from ringspark.pipelines.spark_errors import explain_worker_errors

TABLE_COLUMN = "__ringspark_table"
"""Name of the struct with the table's columns."""

NETWORKS = ("tabpack", "tabm")
"""Networks that take the numbers and ids of a table; the first one is the default."""


@dataclass
class Plans:
    """State of fits on one DataFrame.

    Attributes:
        known: Inputs, label and held-out rows -> the `TablePlan`.
        rows: Result of `fix_rows`; None until a fit needs it.
        is_dry_run: Whether to check the fit without Spark jobs. Placeholders replace settings that depend on
            the rows.
    """

    known: dict[tuple[Any, ...], Any] = field(default_factory=dict)
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
    plan: Any = None
    recipe: frozenset[str] = frozenset()

    def keep_plan(self, uri: str) -> None:
        """Writes the plan for a resume: a second pass over the rows might choose other quantiles."""
        if self.plan is not None:
            storage.write_atomic(storage.join(uri, run_layout.TABLE), self.plan.to_json().encode())

    def complete_model(self, model: Any) -> None:
        """Calls the techniques' `complete_model`, for results that need the trained model and the rows."""
        for technique in techniques_in(self.estimator):
            technique.complete_model(model, self)

    def complete(self, changed: Any, names: Collection[str]) -> Any:
        """Returns `changed` with the network and the recipe for the table.

        `changed` is a copy of `estimator` with new values of the settings `names`, which change the recipe.
        """
        if self.plan is None:
            return changed
        model = changed.getModel()
        if not isinstance(model, ModelSpec) or model.target not in NETWORKS:
            raise ValueError(
                f"model must be a ModelSpec of {' or '.join(map(repr, NETWORKS))} for a table, "
                f"got {model!r:.80}; give the estimator a whole model and featuresCol or inputCols"
            )
        made = changed.copy()
        for name in self.recipe.difference(names):
            made.clear(made.getParam(name))
        return made._set(**FUNCTIONS["complete_table"](made, self.plan, model))

    @property
    def uses(self) -> Sequence[ColumnUse]:
        return () if self.plan is None else self.plan.uses


def is_for_tables(model: Any) -> bool:
    """Whether the model is a network for tables without its arguments about the table, which `fit` adds."""
    return isinstance(model, ModelSpec) and model.target in NETWORKS and "edges" not in model.kwargs


def wants_table(estimator: Any) -> bool:
    """Whether the table's columns decide the network: no model is given, or one for tables by name."""
    return not estimator.isDefined(estimator.model) or is_for_tables(estimator.getModel())


@explain_worker_errors()
def prepare_fit(
    estimator: Any, dataset: DataFrame, plans: Plans | None = None, search_uri: str | None = None
) -> PreparedFit:
    """Chooses the network for a table, and holds out the newest rows for `timeCol`.

    Fits on one DataFrame share `plans`. `search_uri` is the folder of a search, which may hold a plan.
    Techniques may add columns to the rows. Raises like `fit`. Runs a few Spark jobs, unless
    `plans.is_dry_run`.
    """
    plans = plans or Plans()
    check_batch(dataset, f"{type(estimator).__name__}.fit")
    choose_python(dataset.sparkSession)
    estimator = estimator._complete()
    for technique in techniques_in(estimator):
        technique.check_estimator(estimator, is_table=wants_table(estimator))
    fit = PreparedFit(estimator, dataset)
    if wants_table(estimator):
        fit = FUNCTIONS["prepare_table"](estimator, dataset, plans, search_uri)
    elif estimator.getTimeCol() and estimator.getValidationFraction() is not None:
        split = hold_out(estimator, dataset, (), plans.is_dry_run)
        copy = estimator.copy()
        for param in (copy.validationFraction, copy.timeCol):  # the indicator replaces both
            copy.clear(param)
        copy._set(validationIndicatorCol=split.indicator)
        fit = PreparedFit(copy, split.dataset)
    # If the settings alone decide the fit, `prepare_checked` adds the columns once.
    return fit if plans.is_dry_run and fit.dataset is dataset else add_columns(fit)


def add_columns(fit: PreparedFit) -> PreparedFit:
    """Returns the fit with the columns that techniques add to the rows."""
    for technique in techniques_in(fit.estimator):
        fit = technique.prepare(fit)
    return fit
