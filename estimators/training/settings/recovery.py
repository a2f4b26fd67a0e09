"""Settings of checkpoints, resuming, restarts and steps with a loss or gradient that is not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from ringspark.estimators.options.checked import AtLeast1, Finite, NotNegative
from ringspark.estimators.training.settings.choices import NonFinite
from ringspark.estimators.training.settings.data import without_secrets
from ringspark.estimators.training.settings.setting import Section, setting


@dataclass(frozen=True, kw_only=True)
class Recovery(Section):
    GROUP = "recovery"
    MAY_DIFFER_ON_RESUME = True

    checkpoint_every_steps: AtLeast1 | None = setting(
        None,
        "optimizer steps between two checkpoints; unset: no checkpoints by steps",
        remedy="leave it unset for no checkpoints by steps",
    )
    checkpoint_every_seconds: Annotated[float, Ge(0), Finite] | None = setting(
        None,
        "seconds between two checkpoints; 0: no checkpoints by time; unset: chosen by their measured time",
        remedy="0 means no checkpoints by time",
    )
    checkpoint_every_epochs: AtLeast1 | None = setting(
        None,
        "epochs between two checkpoints; unset: no checkpoints by epochs",
        remedy="leave it unset for no checkpoints by epochs",
    )
    keep_checkpoints: AtLeast1 = setting(
        2,
        "newest checkpoints to keep while the training runs",
        without_effect=(
            lambda given: (
                given["checkpointEverySeconds"] == 0
                and not (given["checkpointEverySteps"] or given["checkpointEveryEpochs"])
            ),
            "no checkpoint interval is set",
        ),
    )
    keep_training_state: bool = setting(
        False, "whether the fitted model keeps its optimizer state, from which a later fit can continue"
    )
    certify: bool = setting(
        False,
        "whether the run keeps its rows and all checkpoints, and writes their hash chain for a certificate",
    )
    on_non_finite: NonFinite = setting(
        "stop",
        "what to do if a loss or gradient is not finite: 'stop', 'skip', or 'rollback' with half the rate",
        may_differ_on_resume=False,
    )
    max_restarts: NotNegative = setting(
        3,
        "number of restarts from the last checkpoint after workers are lost, before fit fails",
        remedy="0 means no restart",
    )
    min_workers: AtLeast1 | None = setting(
        None,
        "fewest workers with which a restart may continue if the cluster has no more; unset: numWorkers",
        without_effect=(lambda given: given["maxRestarts"] == 0, "maxRestarts=0 allows no restart"),
    )
    max_workers: AtLeast1 | None = setting(
        None,
        "largest number of workers to which the training grows when slots become free; unset: numWorkers",
    )
    timeout_seconds: Annotated[float, Gt(0), Finite] = setting(
        600.0, "seconds that a worker may wait in one collective call, or make no progress"
    )


@dataclass(frozen=True, kw_only=True)
class RunFolder(Section):
    GROUP = "recovery"
    ON_DRIVER = True

    run_uri: str | None = setting(
        None,
        "folder that all workers reach, for this training; unset: a new folder in storageUri",
        convert=without_secrets,
    )
    resume: bool = setting(
        False, "whether to resume the training in runUri, if there is one with the same settings and data"
    )
