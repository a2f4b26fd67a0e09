"""Settings of checkpoints, resuming, restarts and steps that are not finite."""

from __future__ import annotations

from typing import get_args

from ringspark.estimators.training.settings.choices import NonFinite
from ringspark.estimators.training.settings.declaration import (
    Setting,
    above_0_and_finite,
    at_least,
    finite_from_0,
    one_of,
)
from ringspark.estimators.training.settings.places import without_secrets

CHECKPOINT_EVERY_STEPS = Setting[int | None](
    name="checkpointEverySteps",
    field="checkpoint_every_steps",
    words="optimizer steps between two checkpoints of the whole training; unset: not by steps",
    kind="int",
    accepts=at_least(1, remedy="leave it unset for none by steps"),
    may_differ_on_resume=True,
)
CHECKPOINT_EVERY_SECONDS = Setting(
    name="checkpointEverySeconds",
    field="checkpoint_every_seconds",
    words="seconds between two checkpoints of the whole training, 0 for none by the clock",
    default=600.0,
    accepts=finite_from_0("0 is for none by the clock"),
    may_differ_on_resume=True,
)
CHECKPOINT_EVERY_EPOCHS = Setting[int | None](
    name="checkpointEveryEpochs",
    field="checkpoint_every_epochs",
    words="epochs between two checkpoints of the whole training; unset: not by epochs",
    kind="int",
    accepts=at_least(1, remedy="leave it unset for none by epochs"),
    may_differ_on_resume=True,
)
KEEP_CHECKPOINTS = Setting(
    name="keepCheckpoints",
    field="keep_checkpoints",
    words="newest checkpoints to keep while the training runs; with one alone, a damaged one loses the run",
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
        "no checkpoints are asked for",
    ),
)
ON_NON_FINITE = Setting[NonFinite](
    name="onNonFinite",
    field="on_non_finite",
    words="what a step does whose loss or gradient is not finite: 'stop' (an error with epoch, step "
    "and worker), 'skip' (no worker takes the step) or 'rollback' (back to the last checkpoint, with "
    "half the rate)",
    default="stop",
    accepts=one_of(get_args(NonFinite)),
)
RUN_URI = Setting[str | None](
    name="runUri",
    words="folder of this one training, which all workers reach; unset: a new folder in storageUri",
    convert=without_secrets,
)
RESUME = Setting(
    name="resume",
    words="whether to go on with the training that runUri holds, if it holds one; a run of other settings or "
    "other data is refused",
    default=False,
)
MAX_RESTARTS = Setting(
    name="maxRestarts",
    field="max_restarts",
    words="how often lost workers are started again, from the last checkpoint, before fit fails",
    default=3,
    accepts=at_least(0, remedy="0 is for no restart"),
    may_differ_on_resume=True,
)
MIN_WORKERS = Setting[int | None](
    name="minWorkers",
    field="min_workers",
    words="workers with which a restart may go on where the cluster has no room for numWorkers any more; "
    "unset: numWorkers",
    kind="int",
    accepts=at_least(1),
    may_differ_on_resume=True,
    without_effect=(lambda given: given["maxRestarts"] == 0, "maxRestarts=0 lets nothing start again"),
)
TIMEOUT_SECONDS = Setting(
    name="timeoutSeconds",
    field="timeout_seconds",
    words="how long a worker may wait for the others in one operation, or stay without any progress",
    default=600.0,
    accepts=above_0_and_finite(),
    may_differ_on_resume=True,
)
