"""Which values of a network's inputs make one feature, so that a feature can be shuffled or summed up.

A feature is one number of a row where a column has few, else the column as a whole. The arrays of one column
(its values, their lengths, the mask of its nulls) belong together: a row's are shuffled together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringspark.estimators.training.feed import Array

# Numbers of a row that are features of their own, over all columns; beyond, columns count as wholes.
MOST_FEATURES = 200


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One feature.

    Attributes:
        inputs: Places of the input arrays that belong to it.
        entry: Place of its number in a row of the one array; None for all of the row.
    """

    name: str
    inputs: tuple[int, ...]
    entry: int | None = None


def features_of(
    columns: Sequence[str], arrays: Sequence[Array], names: Sequence[Sequence[str]]
) -> list[Feature]:
    """Returns the features of a network's inputs.

    Args:
        columns: Name of the column that each array is made from.
        arrays: The inputs, each (rows, ...).
        names: Names of the numbers of a row of each array; empty if they have none.
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
