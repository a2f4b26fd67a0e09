"""Settings for batches that are larger than those of one worker: what they do to the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringspark.estimators.training.settings.declaration import Setting


def _hides_gradients(given: Mapping[str, Any]) -> bool:
    """Whether no step shows the gradients of a part of the batch and those of the whole."""
    if given["numWorkers"] == 1:
        return bool(given["gradientAccumulation"] == 1)
    found = (
        given["sharding"],
        given["gradientCompression"]["name"],
        given["consistency"]["name"],
        given["localSteps"],
    )
    return found != ("none", "none", "bsp", 1)


NOISE_SCALE = Setting(
    name="noiseScale",
    field="noise_scale",
    words="whether the history holds the gradient noise scale of each epoch, which `advise_batch_size` "
    "reads; it costs two passes over the gradients per step",
    default=False,
    may_differ_on_resume=True,
    without_effect=(
        _hides_gradients,
        "it compares the gradients of two batch sizes, which takes two workers that sum whole gradients in "
        "every step (sharding and gradientCompression 'none', consistency 'bsp', localSteps 1), or one with "
        "gradientAccumulation",
    ),
)
