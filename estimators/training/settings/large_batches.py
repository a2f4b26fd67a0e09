"""Settings for batches that are larger than those of one worker: what they do to the steps."""

from __future__ import annotations

from ringspark.estimators.training.settings.declaration import Setting

NOISE_SCALE = Setting(
    name="noiseScale",
    field="noise_scale",
    words="whether the history holds the gradient noise scale of each epoch, which `advise_batch_size` "
    "reads; it costs two passes over the gradients per step",
    default=False,
    may_differ_on_resume=True,
    without_effect=(
        lambda given: (
            given["sharding"] != "none" or given["localSteps"] != 1 or given["consistency"]["name"] != "bsp"
            if given["numWorkers"] > 1
            else given["gradientAccumulation"] == 1
        ),
        "it compares the gradients of two batch sizes, which takes two workers that sum whole gradients in "
        "every step (sharding='none', localSteps=1, consistency='bsp'), or one with gradientAccumulation",
    ),
)
