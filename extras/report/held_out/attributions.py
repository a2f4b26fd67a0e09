"""Importance of the features of a network's inputs: permutation importance and integrated gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import nn

from ringspark.estimators.training.feed import Array
from ringspark.extras.report.held_out.findings import Attribution
from ringspark.models.outputs import as_outputs

# Columns with more numbers per row than this are one feature.
MOST_FEATURES = 200
REPEATS = 5
# Rows per pass; captum computes 50 points of each.
ROWS_AT_ONCE = 16

# Index of a feature's numbers in a row; `...` is the whole row.
Entries = list[int] | EllipsisType


@dataclass(frozen=True)
class Feature:
    """A part of a network's inputs whose importance is measured.

    `parts` maps the index of an input to the feature's indexes in a row.
    """

    name: str
    parts: Mapping[int, Entries]


def features_of(
    columns: Sequence[str], arrays: Sequence[Array], names: Sequence[Sequence[str]]
) -> list[Feature]:
    """Returns the features of a network's inputs.

    If a column has few numbers per row, each number is a feature, and numbers with the same name are one
    feature. Otherwise the whole column is one feature: its values, lengths and null mask are shuffled
    together.

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


def permutation_importance(
    loss: Callable[[Sequence[Array]], float],
    arrays: Sequence[Array],
    features: Sequence[Feature],
    *,
    unit: str,
    seed: int = 0,
) -> Attribution:
    """Returns the mean growth of the loss for each feature, if it is shuffled among the rows.

    Breiman, Random Forests (2001); Fisher, Rudin and Dominici (2019). If two features carry the same
    information, the model can use either, so both look unimportant.

    Args:
        arrays: The inputs, each (rows, ...).
        unit: Name of the loss, such as "log loss".
    """
    before, rows = loss(arrays), len(arrays[0])
    growth = np.zeros((len(features), REPEATS))
    for number, feature in enumerate(features):
        # One generator per feature, so that a feature's value does not depend on the other features.
        generator = np.random.default_rng([seed, number])
        for repeat in range(REPEATS):
            growth[number, repeat] = loss(_shuffle(arrays, feature, generator.permutation(rows))) - before
    return Attribution(
        method="permutation",
        features=[feature.name for feature in features],
        values=growth.mean(axis=1).tolist(),
        spread=growth.std(axis=1).tolist(),
        rows=rows,
        unit=f"growth of the {unit} when shuffled",
        note=f"Means of {REPEATS} shuffles; before, the {unit} is {before:.4g}.",
    )


def _shuffle(arrays: Sequence[Array], feature: Feature, order: Array) -> list[Array]:
    changed = list(arrays)
    for place, entries in feature.parts.items():
        changed[place] = arrays[place].copy()
        changed[place][:, entries] = arrays[place][order][:, entries]
    return changed


def integrated_gradients(
    module: nn.Module, arrays: Sequence[Array], features: Sequence[Feature], *, is_classifier: bool
) -> Attribution:
    """Returns the mean absolute attribution of each feature with real-valued inputs, by captum.

    They are relative to the mean row: Sundararajan, Taly and Yan, Axiomatic Attribution for Deep Networks
    (2017). The explained output is the logit of the predicted class. For a regression it is the sum of a
    row's predictions.

    Args:
        module: The network in eval mode, on the CPU, with one output.
        arrays: The inputs, each (rows, ...). Inputs of whole numbers are not varied.
    """
    from captum.attr import IntegratedGradients

    real = [place for place, array in enumerate(arrays) if array.dtype.kind == "f"]
    explained = [feature for feature in features if feature.parts.keys() <= set(real)]
    sums = [np.zeros(arrays[place].shape[1:]) for place in real]
    means = [torch.from_numpy(_mean_row(arrays[place])) for place in real]
    rows = len(arrays[0])
    others = [place for place in range(len(arrays)) if place not in real]

    def network(*inputs: torch.Tensor) -> torch.Tensor:
        # captum passes the unchanged inputs after the changed ones.
        given = dict(zip([*real, *others], inputs, strict=True))
        return as_outputs(module(*(given[place] for place in range(len(arrays)))))[0].flatten(1)

    def weighted_output(*inputs: torch.Tensor) -> torch.Tensor:
        return (network(*inputs[:-1]) * inputs[-1]).sum(dim=1)

    if real and explained:
        method: Any = IntegratedGradients(weighted_output)
        for start in range(0, rows, ROWS_AT_ONCE):
            chunks = [torch.from_numpy(array[start : start + ROWS_AT_ONCE]) for array in arrays]
            changed, kept = tuple(chunks[p] for p in real), tuple(chunks[p] for p in others)
            with torch.no_grad():
                factors = _factors(network(*changed, *kept), is_classifier)
            found = method.attribute(
                changed,
                baselines=tuple(mean.expand_as(chunk) for mean, chunk in zip(means, changed, strict=True)),
                additional_forward_args=(*kept, factors),
            )
            for total, part in zip(sums, found, strict=True):
                # A number that is missing, NaN, cannot be varied.
                total += part.detach().abs().nan_to_num().sum(dim=0).double().numpy()
    totals = dict(zip(real, sums, strict=True))
    values = [
        sum(float(totals[place][entries].sum()) for place, entries in feature.parts.items()) / rows
        for feature in explained
    ]
    left_out = [feature.name for feature in features if feature not in explained]
    note = f"Inputs of whole numbers are not explained: {', '.join(left_out[:10])}." if left_out else ""
    return Attribution(
        method="integrated_gradients",
        features=[feature.name for feature in explained],
        values=values,
        rows=rows,
        unit="mean absolute attribution",
        note=f"Relative to the mean row. {note}".strip(),
    )


def _mean_row(array: Array) -> Array:
    """Returns each number's mean over the rows that have a value; 0 if no row has a value."""
    known = ~np.isnan(array)
    counts = np.maximum(known.sum(axis=0, keepdims=True), 1)
    mean: Array = np.where(known, array, 0).sum(axis=0, keepdims=True) / counts
    return mean.astype(array.dtype)


def _factors(outputs: torch.Tensor, is_classifier: bool) -> torch.Tensor:
    """Returns factors for the outputs of each row; the explained value is the sum of the weighted outputs."""
    if not is_classifier:
        return torch.ones_like(outputs)
    # A single logit counts for class 1 and against class 0.
    if outputs.shape[1] == 1:
        return torch.where(outputs > 0, 1.0, -1.0)
    return torch.nn.functional.one_hot(outputs.argmax(dim=1), outputs.shape[1]).to(outputs.dtype)
