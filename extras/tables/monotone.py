"""The setting `monotone`: the prediction of `TabPack` never falls, or never rises, with a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringspark.estimators.techniques import Technique

if TYPE_CHECKING:
    from ringspark.extras.tables.table_plan import TablePlan


class Monotone(Technique):
    def check_estimator(self, estimator: Any, *, is_table: bool, is_on_shards: bool = False) -> None:
        model = estimator.getModel() if estimator.isDefined(estimator.model) else None
        is_pack = model is None or getattr(model, "target", "") == "tabpack"
        if not is_table or estimator._task == "any" or not is_pack:
            raise ValueError(
                "monotone needs the network 'tabpack', which fit completes for a table; call fit of a "
                "TorchClassifier or TorchRegressor without model, or leave monotone unset"
            )


def find_signs(monotone: dict[str, str], plan: TablePlan, out_features: int) -> list[int]:
    """Returns for each number of a row 1 if the prediction rises with it, -1 if it falls, or 0.

    Raises ValueError for an unknown column, a category, or more than two classes.
    """
    if unknown := sorted(monotone.keys() - {*plan.asked[2:]}):
        raise ValueError(f"monotone names {unknown[0]!r}, and the inputs are {plan.asked[2:]}; name an input")
    if out_features > 2:
        raise ValueError(
            f"monotone needs two classes or a regression, and the label has {out_features} classes; leave "
            "monotone unset"
        )
    signs: list[int] = []
    for column in plan.kind.columns:
        sign = {"increasing": 1, "decreasing": -1}.get(monotone.get(column.name, ""), 0)
        if sign and column.num_ids:
            raise ValueError(
                f"the plan of the table uses {column.name!r} as a category, too, because it was made without "
                "monotone; give runUri a new folder, or leave initialModel unset"
            )
        signs += [sign] * column.num_numbers
    return signs
