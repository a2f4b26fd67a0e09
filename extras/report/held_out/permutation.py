"""Permutation importance: how much the loss grows when one feature is shuffled among the rows.

Breiman, Random Forests (2001); Fisher, Rudin and Dominici (2019). If two features carry the same information,
the model can use either, so both look unimportant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ringspark.estimators.training.feed import Array
from ringspark.extras.report.held_out.features import Feature
from ringspark.extras.report.held_out.findings import Attribution

REPEATS = 5


def permutation_importance(
    loss: Callable[[Sequence[Array]], float],
    arrays: Sequence[Array],
    features: Sequence[Feature],
    *,
    unit: str,
    seed: int = 0,
) -> Attribution:
    """Returns the mean growth of the loss for each feature.

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
