"""How a fit uses one column of a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ColumnUse:
    """How a plan uses one column.

    Attributes:
        column: Name of the column, such as `column.field[3]`.
        type: Spark type.
        distinct: Approximate number of different values; None if not counted.
        missing: Share of the training rows without a value.
        use: Form in which the network gets the column, or "left out".
        reason: Details of the use, or why the column is left out.
        leaks: Whether the column alone predicts the label almost perfectly.
    """

    column: str
    type: str
    distinct: int | None
    missing: float
    use: str
    reason: str
    leaks: bool = False
