"""Integrated gradients, by captum: how much each feature changes the output, relative to the mean row.

Sundararajan, Taly and Yan, Axiomatic Attribution for Deep Networks (2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ringspark.estimators.training.feed import Array
from ringspark.extras.report.held_out.features import Feature
from ringspark.extras.report.held_out.findings import Attribution
from ringspark.models.outputs import as_outputs

# Rows per pass; captum computes 50 points of each.
ROWS_AT_ONCE = 16


def integrated_gradients(
    module: nn.Module, arrays: Sequence[Array], features: Sequence[Feature], *, is_classifier: bool
) -> Attribution:
    """Returns the mean absolute attribution of each feature with real-valued inputs.

    The explained output is the logit of the predicted class. For a regression it is the sum of a row's
    predictions.

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
