"""Groups the values of a network's inputs into features.

If a column has few numbers per row, each number is a feature, and numbers with the same name are one feature.
Otherwise the whole column is one feature: its values, lengths and null mask are shuffled together.
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
        entries: For each of these arrays, the indexes of the feature's numbers in a row; None for whole rows.
    """

    name: str
    inputs: tuple[int, ...]
    entries: tuple[tuple[int, ...], ...] | None = None


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
            found.append(Feature(name=next(iter(distinct)) if is_named else column, inputs=places))
            continue
        for name in distinct:
            parts = {p: tuple(i for i, label in enumerate(labels[p]) if label == name) for p in places}
            parts = {place: entries for place, entries in parts.items() if entries}
            found.append(Feature(name=name, inputs=tuple(parts), entries=tuple(parts.values())))
    return found
