"""Settings that were made and change nothing: said in a warning, one table of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ringspark.estimators.stages.params import _TrainingParams

Rule = tuple[str, Callable[[_TrainingParams], bool], str]


# Param -> when it has no effect, and why.
RULES: tuple[Rule, ...] = (
    (
        "learningRate",
        lambda s: not isinstance(s.getOptimizer(), str),
        "the optimizer's factory sets the rate",
    ),
    (
        "weightDecay",
        lambda s: not isinstance(s.getOptimizer(), str),
        "the optimizer's factory sets the weight decay",
    ),
    (
        "monitor",
        lambda s: s.getKeep() == "last" and s.getPatience() is None,
        "neither patience nor keep='best' asks for the best epoch",
    ),
    ("minDelta", lambda s: s.getPatience() is None, "patience is not set"),
    (
        "patience",
        lambda s: (s.getPatience() or 0) >= s.getEpochs(),
        "there are not more epochs than that",
    ),
    ("sharding", lambda s: s.getSharding() != "none" and s.getNumWorkers() == 1, "there is one worker"),
    ("minWorkers", lambda s: s.getMaxRestarts() == 0, "maxRestarts=0 lets nothing start again"),
    (
        "keepCheckpoints",
        lambda s: (
            not (s.getCheckpointEverySteps() or s.getCheckpointEverySeconds() or s.getCheckpointEveryEpochs())
        ),
        "no checkpoints are asked for",
    ),
    ("storageUri", lambda s: s.getRunUri() is not None, "runUri holds the shards and the run"),
    ("featuresCol", lambda s: s.isSet("inputCols"), "inputCols names the inputs"),
)

ON_SHARDS: tuple[str, ...] = ("validationFraction", "validationIndicatorCol", "handleInvalid")


def settings_without_effect(stage: _TrainingParams, on_shards: bool) -> Iterator[str]:
    """One sentence for each Param that was set and does nothing."""
    for name, is_idle, reason in RULES:
        if stage.isSet(name) and is_idle(stage):
            yield f"{name} has no effect: {reason}"
    if on_shards:
        for name in ON_SHARDS:
            if stage.isSet(name):
                yield f"{name} has no effect on fitOnShards: the shards were divided when they were written"
