"""Settings of the optimization: rates, epochs, batches, the best epoch."""

from __future__ import annotations

from typing import get_args

from ringspark.estimators.training.settings.choices import Keep
from ringspark.estimators.training.settings.declaration import (
    Range,
    Setting,
    above_0,
    above_0_and_finite,
    at_least,
    not_negative,
    one_of,
)

LEARNING_RATE = Setting(
    name="learningRate",
    field="learning_rate",
    words="learning rate; never scaled by numWorkers",
    default=1e-3,
    accepts=above_0_and_finite(),
    without_effect=(
        lambda given: not isinstance(given["optimizer"], str),
        "the optimizer's factory sets the rate",
    ),
)
WARMUP_STEPS = Setting(
    name="warmupSteps",
    field="warmup_steps",
    words="optimizer steps in which the rate rises linearly, before the schedule",
    default=0,
    accepts=not_negative(),
)
WEIGHT_DECAY = Setting(
    name="weightDecay",
    field="weight_decay",
    words="weight decay of the optimizer",
    default=0.0,
    accepts=not_negative(),
    without_effect=(
        lambda given: not isinstance(given["optimizer"], str),
        "the optimizer's factory sets the weight decay",
    ),
)
MAX_GRAD_NORM = Setting[float | None](
    name="maxGradNorm",
    field="max_grad_norm",
    words="bound of the gradient's 2-norm; unset: no clipping",
    kind="float",
    accepts=above_0("leave it unset for no clipping"),
)
EPOCHS = Setting(
    name="epochs",
    field="epochs",
    words="passes over the training rows",
    default=1,
    accepts=at_least(1),
)
BATCH_SIZE = Setting(
    name="batchSize",
    field="batch_size",
    words="rows per optimizer step over all workers together",
    default=1024,
    accepts=at_least(1),
)
GRADIENT_ACCUMULATION = Setting(
    name="gradientAccumulation",
    field="gradient_accumulation",
    words="micro-batches per optimizer step, and per batch of validation",
    default=1,
    accepts=at_least(1, "micro-batch per step"),
)
SEED = Setting(
    name="seed",
    field="seed",
    words="seed of the first weights, of dropout, of the order of rows and of the rows held out",
    default=0,
)
SHUFFLE = Setting(
    name="shuffle",
    field="shuffle",
    words="whether each epoch has its own order of rows",
    default=True,
)
MONITOR = Setting[str | None](
    name="monitor",
    field="monitor",
    words="the loss or metric that tells which epoch is best, such as 'validation_auroc' or 'auroc'; unset: "
    "the loss of the held-out rows, or of the training rows where none is held out",
    kind="str",
    without_effect=(
        lambda given: given["keep"] == "last" and given["patience"] is None,
        "neither patience nor keep='best' asks for the best epoch",
    ),
)
PATIENCE = Setting[int | None](
    name="patience",
    field="patience",
    words="epochs without a better `monitor` before training stops; unset: all epochs",
    kind="int",
    accepts=at_least(1, "epoch", "leave it unset for no early stopping"),
    without_effect=(
        lambda given: (given["patience"] or 0) >= given["epochs"],
        "there are not more epochs than that",
    ),
)
MIN_DELTA = Setting(
    name="minDelta",
    field="min_delta",
    words="what `monitor` must gain to count as better for patience",
    default=0.0,
    accepts=not_negative(),
    without_effect=(lambda given: given["patience"] is None, "patience is not set"),
)
KEEP = Setting[Keep](
    name="keep",
    field="keep",
    words="the model that fit returns: of the 'last' epoch or of the 'best'",
    default="last",
    accepts=one_of(get_args(Keep)),
)
VALIDATION_FRACTION = Setting[float | None](
    name="validationFraction",
    words="share of the rows to hold out, drawn by the seed",
    kind="float",
    accepts=Range(lambda share: 0 < share < 1, lambda: "must lie between 0 and 1"),
    is_for_writing=True,
)
