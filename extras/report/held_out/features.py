"""Groups the values of a network's inputs into features.

If a column has few numbers per row, each number is a feature. Otherwise the whole column is one feature: its
values, lengths and null mask are shuffled together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringspark.estimators.training.feed import Array

# Columns with more numbers per row than this are one feature.
MOST_FEATURES = 200


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A part of a network's inputs whose importance is measured.

    Attributes:
        inputs: Indexes of the input arrays that belong to the feature.
        entry: Index of the feature's number in a row of its only array; None if the feature is the whole row.
    """

    name: str
    inputs: tuple[int, ...]
    entry: int | None = None


def features_of(
    columns: Sequence[str], arrays: Sequence[Array], names: Sequence[Sequence[str]]
) -> list[Feature]:
    """Returns the features of a network's inputs.

    Args:
        columns: Column name of each array.
        arrays: The inputs, each (rows, ...).
        names: For each array, the names of the numbers in a row; empty if they have no names.
    """
    found: list[Feature] = []
    for column in dict.fromkeys(columns):
        places = tuple(place for place, name in enumerate(columns) if name == column)
        array = arrays[places[0]]
        is_row = len(places) == 1 and array.ndim == 2 and 1 < array.shape[1] <= MOST_FEATURES
        if not is_row:
            found.append(Feature(name=column, inputs=places))
            continue
        own = names[places[0]]
        labels = own if len(own) == array.shape[1] else [f"{column}[{i}]" for i in range(array.shape[1])]
        found.extend(Feature(name=label, inputs=places, entry=entry) for entry, label in enumerate(labels))
    return found
