"""The training summary of a fitted model."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from ringspark.estimators import run_layout
from ringspark.estimators.inference.precision import PrecisionDifference
from ringspark.estimators.options.privacy import PrivacySpent
from ringspark.estimators.techniques import FUNCTIONS
from ringspark.estimators.training import rank_log
from ringspark.estimators.training.history import EpochRecord
from ringspark.estimators.training.worker import FinishedRun, TrainResult
from ringspark.pipelines import storage
from ringspark.pipelines.column_use import ColumnUse

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """Facts of one training.

    Attributes:
        epochs: One record per epoch, in order.
        rows: Rows seen, over all epochs and workers.
        steps: Optimizer steps, including `skipped_steps`.
        seconds: Wall time of the training on rank 0, in seconds, without the launch of the gang.
        bytes_sent: Bytes that rank 0 sent, as `Traffic` counts them.
        model_epoch: Number of the epoch whose weights the model has.
        stop_reason: Why the training ended before its last epoch; None if it did not.
        run_uri: The run directory.
        restart_reasons: Why the workers were started again, one line per restart.
        preemption_reasons: What the cluster took away, one line per loss; these cost no `maxRestarts`.
        seconds_lost: Seconds from each such end of the workers until all of them trained again.
        resumed_steps: Steps whose checkpoints the training resumed from, one per resume.
        checkpoint_errors: One line per checkpoint that could not be written.
        setting_changes: One line per setting that a resume changed, with the first epoch and step.
        non_finite: One line per step whose loss or gradient was not finite.
        column_uses: What became of each column of a table; see `columns`.
        precision_difference: How predictions in `inferencePrecision` differ from fp32; None in fp32.
        privacy: Privacy loss of the training and its `initialModel`; None without the setting `privacy`.
        parallelism: Setting `parallelism` of the training, as a dict; {} for data parallelism.
    """

    epochs: tuple[EpochRecord, ...]
    rows: int
    steps: int
    seconds: float
    bytes_sent: int = 0
    model_epoch: int = 0
    stop_reason: str | None = None
    run_uri: str
    restart_reasons: tuple[str, ...] = ()
    preemption_reasons: tuple[str, ...] = ()
    seconds_lost: float = 0.0
    resumed_steps: tuple[int, ...] = ()
    checkpoint_errors: tuple[str, ...] = ()
    non_finite: tuple[str, ...] = ()
    setting_changes: tuple[str, ...] = ()
    parallelism: dict[str, Any] = field(default_factory=dict)
    column_uses: tuple[ColumnUse, ...] = ()
    privacy: PrivacySpent | None = None
    precision_difference: PrecisionDifference | None = None

    @property
    def columns(self) -> pd.DataFrame:
        """One row per column of the table: type, distinct values, missing share, use, reason for the use.

        The DataFrame is empty if the user gave the estimator a whole network.
        """
        names = [each.name for each in fields(ColumnUse)]
        return pd.DataFrame([vars(use) for use in self.column_uses], columns=names)

    @property
    def history(self) -> pd.DataFrame:
        """One row per epoch: losses, metrics, learning rate, rows, steps, skipped steps, seconds, cost.

        The cost columns `training_seconds`, `rows_per_second`, `bytes_sent`, `flops`, `flops_per_second`,
        `flops_utilization` and `energy_joules` count all ranks together. `communication_seconds` is the mean
        over the ranks, and `communication_hidden` is the share of this time in which ranks also computed.
        Unknown costs are None.
        """
        return pd.DataFrame([record.row() for record in self.epochs])

    @property
    def skipped_steps(self) -> int:
        """Steps that changed no weights because gradients overflowed; only in precision "fp16"."""
        return sum(record.skipped_steps for record in self.epochs)

    @property
    def restarts(self) -> int:
        return len(self.restart_reasons)

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def sentence(self) -> str:
        last = [record for record in self.epochs if record.epoch == self.model_epoch] or [*self.epochs[-1:]]
        losses = "".join(
            ("" if record.train_loss is None else f", training loss {record.train_loss:.4g}")
            + ("" if record.validation_loss is None else f", validation loss {record.validation_loss:.4g}")
            for record in last
        )
        return (
            f"Trained {len(self.epochs):,} epochs, {self.steps:,} steps, {self.rows:,} rows in "
            f"{self.seconds:,.1f} s; the model is of epoch {self.model_epoch:,}{losses}."
        )

    def plot(self) -> Figure:
        """Returns a figure of the losses and the learning rate, which a notebook shows.

        Raises ImportError if matplotlib is not installed (`pip install 'ringspark[report]'`).
        """
        return FUNCTIONS["loss_figure"](self)  # type: ignore[no-any-return]

    def timeline(self, path: str) -> str:
        """Writes a trace of the recorded steps for Perfetto, a `.json` file on any store; returns `path`.

        Raises ValueError if no step was recorded (`timelineEverySteps`), or the run's folder is gone.
        """
        return FUNCTIONS["write_trace"](self.run_uri, path)  # type: ignore[no-any-return]

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes one self-contained HTML page about the training to a file on any store.

        A model's own `report` can add predictions for held-out rows. A path without a scheme is on the local
        disk. Raises ImportError if a package of `pip install 'ringspark[report]'` is missing.
        """
        FUNCTIONS["summary_report"](self, path)

    def logs(self, rank: int | None = None) -> list[str]:
        """Returns the output of one rank, or of all ranks in order, each line as "[rank 1 host-a] ...".

        It is empty if nothing was printed or the run's folder is gone.
        """
        return rank_log.read_lines(self.run_uri, rank)

    @classmethod
    def of(cls, of: FinishedRun | TrainResult) -> TrainingSummary:
        finished = of if isinstance(of, FinishedRun) else FinishedRun(result=of)
        result = finished.result
        return cls(
            epochs=result.history,
            rows=result.rows,
            steps=result.steps,
            seconds=result.seconds,
            bytes_sent=result.bytes_sent,
            model_epoch=result.checkpoint_epoch,
            stop_reason=result.stop_reason,
            run_uri=result.run_uri,
            restart_reasons=finished.restarts,
            preemption_reasons=finished.preemptions,
            seconds_lost=finished.seconds_lost,
            resumed_steps=result.resumed_steps,
            checkpoint_errors=result.checkpoint_errors,
            non_finite=tuple(map(str, result.non_finite)),
            setting_changes=tuple(map(str, finished.changes)),
            parallelism=dict(finished.parallelism),
            privacy=result.privacy,
        )

    @classmethod
    def of_run(cls, finished: str, run_uri: str) -> tuple[TrainingSummary, TrainResult]:
        """Returns summary and result of a run; `finished`: text of `result.json`; `run_uri`: its folder."""
        try:
            found = FinishedRun.from_json(finished)
        except ValueError as error:
            raise ValueError(
                f"the run has finished, and its {run_layout.RESULT} is damaged ({error}); train again in "
                "another folder"
            ) from None
        weights = storage.join(storage.normalize(run_uri), found.result.checkpoint_uri.rpartition("/")[2])
        result = replace(found.result, run_uri=run_uri, checkpoint_uri=weights)
        return cls.of(replace(found, result=result)), result

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
