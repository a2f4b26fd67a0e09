"""Groups the values of a network's inputs into features.

If a column has few numbers per row, each number is a feature, and numbers with the same name are one feature.
Otherwise the whole column is one feature: its values, lengths and null mask are shuffled together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType

from ringspark.estimators.training.feed import Array

# Columns with more numbers per row than this are one feature.
MOST_FEATURES = 200

# Index of a feature's numbers in a row; `...` is the whole row.
Entries = list[int] | EllipsisType


@dataclass(frozen=True)
class Feature:
    """A part of a network's inputs whose importance is measured: `parts` has its entries of each input."""

    name: str
    parts: Mapping[int, Entries]


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
        labels = {place: list(names[place]) for place in places}
        array = arrays[places[0]]
        if len(places) == 1 and array.ndim == 2 and len(labels[places[0]]) != array.shape[1]:
            labels[places[0]] = [f"{column}[{i}]" for i in range(array.shape[1])]
        has_names = all(arrays[p].ndim == 2 and len(labels[p]) == arrays[p].shape[1] for p in places)
        distinct = dict.fromkeys(label for place in places for label in labels[place])
        if not has_names or not 1 < len(distinct) <= MOST_FEATURES:
            is_named = len(distinct) == 1 and any(names[place] for place in places)
            name = next(iter(distinct)) if is_named else column
            found.append(Feature(name, dict.fromkeys(places, ...)))
            continue
        for name in distinct:
            parts = {p: [i for i, label in enumerate(labels[p]) if label == name] for p in places}
            found.append(Feature(name, {place: entries for place, entries in parts.items() if entries}))
    return found
