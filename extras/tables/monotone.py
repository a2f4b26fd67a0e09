"""The setting `monotone`: the prediction of `TabPack` never falls, or never rises, with a number.

Runje and Shankaranarayana 2023, "Constrained Monotonic Neural Networks": weights of one sign on the path of
a constrained number, and units of both curvatures. Here this path is one layer. The free network, which does
not see the constrained numbers, sets the shares of its units. A missing number is exempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from ringspark.estimators.techniques import Technique
from ringspark.extras.tables.tabpack import Packed, PackedLinear

if TYPE_CHECKING:
    from ringspark.extras.tables.table_plan import TablePlan

UNITS = 32


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

    Raises ValueError if the network cannot do it, or if the table spells a name in another way.
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


class MonotoneUnits(Packed):
    """Units that rise with the features of each constrained number, times gates that the free network sets.

    Args:
        rates: See `Packed`.
        signs: For each constrained number, 1 if the prediction rises with it, -1 if it falls.
        features: Number of features per number; they rise with the number.
        width: Width of the free network.
    """

    def __init__(self, rates: torch.Tensor, signs: Sequence[int], features: int, width: int) -> None:
        shape = (len(rates), len(signs) * features, UNITS)
        super().__init__(rates, weight=torch.randn(shape) * 0.15, bias=torch.randn(len(rates), 1, UNITS))
        self.gates = PackedLinear(rates, width, UNITS)
        self.register_buffer("signs", torch.tensor(signs, dtype=torch.float32)[:, None], persistent=False)

    def forward(self, features: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        """Maps features (batch, numbers, features) and (members, batch, width) to (members, batch, 1)."""
        signed = (features * self.signs).flatten(1)  # type: ignore[operator]
        sums = signed @ self.get("weight").abs() + self.get("bias")
        convex, concave = sums.chunk(2, 2)
        units = torch.cat([convex.clamp_min(0), concave.clamp_max(0)], 2)
        return (functional.softplus(self.gates(free)) * units).mean(2, keepdim=True)
