"""Contributions of a table's columns to each prediction: the setting `contributionsCol`.

They are Shapley values (Lundberg and Lee 2017, "A Unified Approach to Interpreting Model Predictions"),
estimated by a few fixed orders of the columns and their reverses (Castro, Gomez and Tejada 2009, "Polynomial
Calculation of the Shapley Value Based on Sampling"; Mitchell et al. 2022, "Sampling Permutations for Shapley
Value Estimation"). In each order, the columns of a baseline row are replaced one by one by the columns of the
explained row; a column's contribution is the mean change. In every order the changes add up to the
difference between the explained row and the baseline, so the contributions do too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import DataType
from torch import nn

from ringspark.estimators.columns.inputs import ModelInput
from ringspark.estimators.inference.results import Classes, Forward, Results
from ringspark.estimators.techniques import Technique
from ringspark.estimators.training.feed import Array
from ringspark.extras.tables.drift import counted_table, no_table_error
from ringspark.models.outputs import as_outputs
from ringspark.pipelines.kinds import TableRow

# Each pair is an order and its reverse. Wide tables have fewer pairs.
PAIRS = 4
_MOST_PASSES = 512
# Up to this many columns, all orders are used, and the Shapley values are exact.
_FEW = 3


@dataclass(frozen=True, kw_only=True)
class ContributionResults(Results):
    """The columns of `base`, then a vector: a number for each of `kind.sources`, and the baseline's number.

    Attributes:
        own: The results of the network's own outputs, which are explained.
        parts: Suffix of each input of the network, see `ModelInput`; "" is no part of the table. Such an
            input, e.g. an offset, keeps the row's value in the baseline.
    """

    base: Results
    own: Results
    kind: TableRow
    parts: tuple[str, ...]

    @property
    def inner_widths(self) -> tuple[int, ...]:  # type: ignore[override]
        return (*self.base.inner_widths, len(self.kind.sources) + 1)

    @property
    def types(self) -> list[DataType]:
        return [*self.base.types, VectorUDT()]

    @property
    def widths(self) -> list[int]:
        return [*self.base.widths, self.inner_widths[-1]]

    def arrays(self, outputs: Array) -> list[Array]:
        others, found = np.split(outputs, [-self.inner_widths[-1]], axis=1)
        return [*self.base.arrays(others), found]

    @contextmanager
    def forward(self, module: nn.Module) -> Iterator[Forward]:
        with self.base.forward(module) as run:

            def explain(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                outputs = run([values.clone() for values in inputs])
                own = outputs[: len(outputs) - len(self.base.inner_widths)]
                return [*outputs, torch.from_numpy(self._contributions(module, inputs, own))]

            yield explain

    def _contributions(
        self, module: nn.Module, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> Array:
        """Returns contributions and the baseline's number, (rows, columns + 1) float64."""
        whole = _to_numbers(outputs)
        chosen = _chosen_class(self.own, whole)

        def score(given: Sequence[torch.Tensor]) -> Array:
            # A network may change its inputs in place. All passes have equal shapes, or the same row could
            # be rounded in two ways, and a column without effect would not get 0.
            values = as_outputs(module(*(each.clone() for each in given)))
            return _explained(self.own, _to_numbers(values), chosen)

        rows = dict(zip(self.kind.suffixes, baseline_of(self.kind), strict=True))
        start = [
            torch.from_numpy(rows[part]).to(values.device).expand(values.shape) if part else values
            for part, values in zip(self.parts, inputs, strict=True)
        ]
        entries = [[_entries(self.kind, name, part) for part in self.parts] for name in self.kind.sources]
        before_all, after_all = score(start), _explained(self.own, whole, chosen)
        changes = np.zeros((len(whole), len(entries)))
        orders = orders_of(len(entries))
        for order in orders:
            mixed, before = [values.clone() for values in start], before_all
            for column in order[:-1]:
                for values, given, places in zip(mixed, inputs, entries[column], strict=True):
                    if places:
                        values[:, places] = given[:, places]
                after = score(mixed)
                changes[:, column] += after - before
                before = after
            changes[:, order[-1]] += after_all - before
        return np.column_stack([changes / len(orders), before_all])


class ContributionsColumn(Technique):
    def check_estimator(self, estimator: Any, *, is_table: bool, is_on_shards: bool = False) -> None:
        if not is_table or estimator._task == "any":
            raise no_table_error("contributionsCol")

    def output_columns(self, estimator: Any) -> list[str]:
        return [estimator.getContributionsCol()]


def contribution_results(base: Results, own: Results, inputs: Sequence[ModelInput]) -> ContributionResults:
    """Returns `base` with contributions; raises ValueError if the model cannot have them."""
    kind = counted_table(inputs, "contributionsCol")
    if not isinstance(own, Classes) and own.widths[0] != 1:
        raise no_table_error("contributionsCol")
    parts = [item.part if item.column and item.column.kind == kind else "" for item in inputs]
    return ContributionResults(base=base, own=own, kind=kind, parts=tuple(parts))


def orders_of(columns: int) -> list[list[int]]:
    """Returns the orders in which columns are replaced; each order's reverse is among them."""
    if columns <= _FEW:
        return [list(order) for order in permutations(range(columns))]
    first = np.random.default_rng(0).permutation(columns)
    pairs = max(1, min(PAIRS, _MOST_PASSES // (2 * columns)))
    # Shifts spread the places of each column evenly over the orders.
    shifted = [np.roll(first, place * columns // pairs).tolist() for place in range(pairs)]
    return [*shifted, *(order[::-1] for order in shifted)]


def baseline_of(kind: TableRow) -> tuple[Array, Array]:
    """Returns the row with medians and most frequent names: numbers float32 and ids int64.

    If a column's numbers are also ids, it has the most frequent number. The baseline has no missing values,
    because a network that never saw one computes arbitrary outputs for it.
    """
    typical = {c.source: c.levels[int(np.argmax(c.counts[1:-1]))] for c in kind.columns if c.levels}
    numbers: list[Array] = []
    ids: list[int] = []
    for column in kind.columns:
        value = np.array([typical.get(column.source, column.center)])
        if column.form == "words":
            ids.append(int(np.argmax(column.counts[1:-1])) + 1)
        elif column.form == "levels":
            ids += column.ids_of(pa.array(value)).tolist()
        else:
            # The median of times is already on the clock of the training.
            numbers.append(replace(column, zone="").numbers_of(value)[0])
    return np.concatenate([*numbers, np.zeros(0, np.float32)]), np.array(ids, np.int64)


def _entries(kind: TableRow, name: str, part: str) -> list[int]:
    """Returns the places of a column's values in the input `part`."""
    numbers = [c.name for c in kind.columns for _ in range(c.num_numbers)]
    owners = {kind.suffixes[0]: numbers, kind.suffixes[1]: [c.name for c in kind.columns if c.num_ids]}
    return [place for place, owner in enumerate(owners.get(part, ())) if owner == name]


def _to_numbers(outputs: Sequence[torch.Tensor]) -> Array:
    return torch.cat([each.double().reshape(len(each), -1) for each in outputs], 1).cpu().numpy()


def _chosen_class(own: Results, outputs: Array) -> Array | None:
    """Returns the class that is explained in each row: class 1 of two, else the predicted class."""
    if not isinstance(own, Classes):
        return None
    predicted = np.nan_to_num(own.decide(outputs)).astype(np.int64)
    return predicted if own.num_classes > 2 else np.ones_like(predicted)


def _explained(own: Results, outputs: Array, chosen: Array | None) -> Array:
    """Returns the prediction of a regression, or the log-odds of each row's `chosen` class, (rows,)."""
    if chosen is None:
        return own.arrays(outputs)[0]
    if outputs.shape[1] == 1:
        return outputs[:, 0]
    is_chosen = np.arange(outputs.shape[1]) == chosen[:, None]
    others = np.logaddexp.reduce(np.where(is_chosen, -np.inf, outputs), axis=1)
    log_odds: Array = outputs[is_chosen] - others
    return log_odds
