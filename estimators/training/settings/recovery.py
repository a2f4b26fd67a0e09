"""Settings of checkpoints, resuming, restarts and steps with a loss or gradient that is not finite."""

from __future__ import annotations

from typing import get_args

from ringspark.estimators.options.base import above_0_and_finite, at_least, finite_from_0, one_of
from ringspark.estimators.training.settings.choices import NonFinite
from ringspark.estimators.training.settings.data import without_secrets
from ringspark.estimators.training.settings.declaration import Setting

CHECKPOINT_EVERY_STEPS = Setting[int | None](
    name="checkpointEverySteps",
    field="checkpoint_every_steps",
    words="optimizer steps between two checkpoints; unset: not by steps",
    kind="int",
    accepts=at_least(1, remedy="leave it unset for no checkpoints by steps"),
    may_differ_on_resume=True,
)
CHECKPOINT_EVERY_SECONDS = Setting(
    name="checkpointEverySeconds",
    field="checkpoint_every_seconds",
    words="seconds between two checkpoints; 0: not by time",
    default=600.0,
    accepts=finite_from_0("0 means no checkpoints by time"),
    may_differ_on_resume=True,
)
CHECKPOINT_EVERY_EPOCHS = Setting[int | None](
    name="checkpointEveryEpochs",
    field="checkpoint_every_epochs",
    words="epochs between two checkpoints; unset: not by epochs",
    kind="int",
    accepts=at_least(1, remedy="leave it unset for no checkpoints by epochs"),
    may_differ_on_resume=True,
)
KEEP_CHECKPOINTS = Setting(
    name="keepCheckpoints",
    field="keep_checkpoints",
    words="newest checkpoints to keep while the training runs",
    default=2,
    accepts=at_least(1),
    may_differ_on_resume=True,
    without_effect=(
        lambda given: (
            not (
                given["checkpointEverySteps"]
                or given["checkpointEverySeconds"]
                or given["checkpointEveryEpochs"]
            )
        ),
        "no checkpoint interval is set",
    ),
)
KEEP_TRAINING_STATE = Setting(
    name="keepTrainingState",
    field="keep_training_state",
    words="whether the fitted model keeps its optimizer state, from which a later fit can continue",
    default=False,
    may_differ_on_resume=True,
)
CERTIFY = Setting(
    name="certify",
    field="certify",
    words="whether the run keeps its rows and all checkpoints, and writes their hash chain for a certificate",
    default=False,
    may_differ_on_resume=True,
)
ON_NON_FINITE = Setting[NonFinite](
    name="onNonFinite",
    field="on_non_finite",
    words="a step whose loss or gradient is not finite: 'stop', 'skip', or 'rollback' with half the rate",
    default="stop",
    accepts=one_of(get_args(NonFinite)),
)
RUN_URI = Setting[str | None](
    name="runUri",
    words="folder of this training that all workers reach; unset: a new folder in storageUri",
    convert=without_secrets,
)
RESUME = Setting(
    name="resume",
    words="whether to resume the training in runUri, if there is one with the same settings and data",
    default=False,
)
MAX_RESTARTS = Setting(
    name="maxRestarts",
    field="max_restarts",
    words="how often lost workers are restarted from the last checkpoint before fit fails",
    default=3,
    accepts=at_least(0, remedy="0 means no restart"),
    may_differ_on_resume=True,
)
MIN_WORKERS = Setting[int | None](
    name="minWorkers",
    field="min_workers",
    words="fewest workers with which a restart may continue if the cluster has no more; unset: numWorkers",
    kind="int",
    accepts=at_least(1),
    may_differ_on_resume=True,
    without_effect=(lambda given: given["maxRestarts"] == 0, "maxRestarts=0 allows no restart"),
)
TIMEOUT_SECONDS = Setting(
    name="timeoutSeconds",
    field="timeout_seconds",
    words="seconds that a worker may wait in one collective call, or make no progress",
    default=600.0,
    accepts=above_0_and_finite(),
    may_differ_on_resume=True,
)
