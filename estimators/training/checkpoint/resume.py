"""Writes the checkpoints of a training, and resumes it from one.

Invariant: every rank comes here at the same steps and makes the same collective calls. Rank 0 alone knows
the clock, the good files and whether the writer is done; it tells the others before they decide by it.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import replace
from types import TracebackType

import torch

from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.checkpoint.folders import checkpoints_uri, newest_good, step_uri
from ringspark.estimators.training.checkpoint.rank_state import RankState, gather_ranks, restore_rank
from ringspark.estimators.training.checkpoint.reading import load_training_state, read_record
from ringspark.estimators.training.checkpoint.record import Position
from ringspark.estimators.training.checkpoint.snapshot import take_snapshot
from ringspark.estimators.training.checkpoint.solo import Solo
from ringspark.estimators.training.checkpoint.timing import Due
from ringspark.estimators.training.checkpoint.writer import BackgroundWriter
from ringspark.estimators.training.non_finite import MAX_REPORTED, NonFiniteStep, raise_first_bad
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.running import Running
from ringspark.estimators.training.settings.config import TrainConfig

MAX_ROLLBACKS = 5
ROLLBACK_FACTOR = 0.5
# The next checkpoint is left out if a write takes longer than this share of `timeout_seconds`.
_WAIT_SHARE = 0.25

_log = logging.getLogger(__name__)


class Recovery:
    """Writes the checkpoints of a training and resumes it from them. One per rank; use it in `with`.

    Attributes:
        due: Decides after which steps and epochs `save` is called.
        resumed_steps: Steps from which the training was resumed.
        non_finite: The first steps that `onNonFinite` handled.
    """

    def __init__(self, config: TrainConfig, mesh: RankMesh, status: Status) -> None:
        self._config = config
        self._mesh = mesh
        self._status = status
        self._root = checkpoints_uri(config.run_uri)
        self.due = Due(config, mesh)
        self._writer: BackgroundWriter | None = None
        if self.due.is_asked and mesh.part is not None:
            self._writer = BackgroundWriter(self._root, config.keep_checkpoints)
        self._start = time.monotonic()
        self._rollbacks = 0
        self._rolled_to: int | None = None
        self.resumed_steps: tuple[int, ...] = ()
        self.non_finite: list[NonFiniteStep] = []

    def __enter__(self) -> Recovery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.abandon()

    @property
    def seconds(self) -> float:
        """Training time so far, in seconds, over all continuations."""
        return time.monotonic() - self._start

    @property
    def errors(self) -> tuple[str, ...]:
        """Why checkpoints are missing, one line each; empty on other ranks than rank 0."""
        return tuple(self._writer.errors) if self._writer is not None and self._mesh.writes else ()

    def begin(self, running: Running) -> bool:
        """Looks for a checkpoint to resume from, and restores its position; see `load`.

        Returns:
            Whether there is one.

        Raises:
            ValueError: It belongs to another training.
        """
        self._status.phase = "looking for a checkpoint"
        if self.due.is_asked:
            # A state that cannot be saved raises here, not at the first checkpoint.
            running.callbacks.state_dicts()
        step = self._newest()
        self.due.written(step or 0)
        if step is None:
            running.log.restore([])
            return False
        position = read_record(step_uri(self._root, step)).position
        self._check_fits(step, position, running)
        self._take_position(position, running)
        self._start = time.monotonic() - position.seconds
        self.non_finite = list(position.non_finite)
        self.resumed_steps = (*position.resumed_steps, step)
        if self._mesh.writes:
            _log.info("the training goes on from the checkpoint of step %d", step)
        return True

    def load(self, running: Running, factor: float = 1.0) -> None:
        """Restores weights, optimizer and everything else from the checkpoint of the present position.

        Args:
            factor: Scales the learning rates.
        """
        step = running.state.step
        self._status.phase = f"loading the checkpoint of step {step}"
        uri = step_uri(self._root, step)
        record, ranks = load_training_state(uri, running.sync, self._status.tick, running.average)
        restore_rank(running, ranks, self._mesh, self._config.seed)
        running.scaler.load_state_dict(record.position.scaler)
        running.rates.resume([scale * factor for scale in record.position.rate_scales])

    def save(self, running: Running) -> None:
        """Copies the training and starts to write the copy. Runs on every rank; waits only for the copy.

        Raises:
            FloatingPointError: A loss or the weights are not finite, so nothing could resume from here.
        """
        state = running.state
        self._status.phase = f"checkpoint, epoch {state.epoch}, step {running.step_in_epoch}"
        running.rates.take_changes()
        reason, patience = "", self._config.timeout_seconds * _WAIT_SHARE
        is_free = self._wait_for_parts()
        if self._writer is not None and self._mesh.writes:
            is_free = self._writer.wait(patience, self._status.tick)
            if is_free and self._mesh.num_parts > 1:
                # Before the others begin, who wait for this rank's numbers.
                reason = self._writer.clear(state.step, patience, self._status.tick)
        # Collective calls carry numbers, so 0 stands for no step.
        mine = torch.tensor([running.first_bad.step or 0, int(is_free and not reason), secrets.randbits(62)])
        first_bad, free, tokens = torch.stack(self._mesh.world.all_gather(mine)).T.tolist()
        raise_first_bad(state.epoch, first_bad, running.scaler.advice)
        self.due.written(state.step)
        if not all(free):
            self._note(state.step, reason or "the one before is still being written")
            return
        ranks = gather_ranks(RankState.of(running, self._mesh), self._mesh.world, self._status.tick)
        position = self._position(running)
        average = None if self._config.ema_decay is None else running.average.values
        snapshot = None
        try:
            snapshot = take_snapshot(
                running.sync, position, ranks, self._mesh.writes, self._status.tick, average
            )
        except ValueError as error:
            # Where ranks hold parts, others may be waiting for this one, so the training must end.
            if self._config.sharding != "none" or self._mesh.cuts_network:
                raise
            self._note(state.step, str(error))
        if not running.sync.in_step:
            # The weights and the optimizer that rank 0 copies are those which the others step on next.
            self._mesh.world.barrier()
        if snapshot is not None and self._writer is not None:
            part = replace(snapshot.part, token=f"{tokens[0]:x}", seconds=self._config.timeout_seconds)
            self._writer.start(replace(snapshot, part=part))

    def roll_back(self, found: NonFiniteStep, running: Running) -> None:
        """Goes back to the newest good checkpoint and halves its learning rates. Runs on every rank.

        Raises:
            FloatingPointError: There is none, or `MAX_ROLLBACKS` rollbacks to it did not help.
        """
        self._status.phase = f"rollback from epoch {found.epoch}, step {found.step}"
        if self._writer is not None:
            self._writer.wait(self._config.timeout_seconds * _WAIT_SHARE, self._status.tick)
        step = self._newest()
        self._rollbacks = self._rollbacks + 1 if step == self._rolled_to else 1
        self._rolled_to = step
        if step is None or self._rollbacks > MAX_ROLLBACKS:
            tried = (
                "no checkpoint is there to go back to"
                if step is None
                else (f"{MAX_ROLLBACKS} times half the rate from step {step} did not help")
            )
            raise FloatingPointError(
                f"{found}, and {tried}; lower learningRate, or look for rows that are not finite"
            )
        self._take_position(read_record(step_uri(self._root, step)).position, running)
        running.first_bad.reset()
        self.load(running, ROLLBACK_FACTOR**self._rollbacks)
        self.due.written(step)
        if self._mesh.writes:
            _log.warning(
                "the training goes back to the checkpoint of step %d, with its learning rates times %g",
                step,
                ROLLBACK_FACTOR**self._rollbacks,
            )

    def report(self, found: NonFiniteStep) -> None:
        """Keeps and logs how a step was handled."""
        if self._mesh.writes:
            _log.warning("%s", found)
        if len(self.non_finite) < MAX_REPORTED:
            self.non_finite.append(found)

    def finish(self) -> None:
        """Waits for the last write. Runs on every rank, before the final weights are written."""
        if not self.due.is_asked:
            return
        self._status.phase = "waiting for the last checkpoint"
        self._wait_for_parts()
        solo = Solo(self._mesh, self._status.tick)
        is_first = self._mesh.writes
        if is_first and self._writer and not self._writer.wait(self._config.timeout_seconds, solo.progress):
            # The final weights matter more than one more checkpoint before them.
            self._note(self.due.last_step, "it was still being written when the training ended")
            self._writer.abandon()
        solo.end()

    def _wait_for_parts(self) -> bool:
        """Waits for the other ranks' parts; returns whether this one's is over. Runs on every rank.

        Rank 0 gives up a checkpoint of which a rank could neither write its part nor leave a word about it.
        """
        is_over = True
        if self._mesh.num_parts == 1:
            return is_over
        is_mute = False
        if self._writer is not None and not self._mesh.writes:
            is_over = self._writer.wait(self._config.timeout_seconds * _WAIT_SHARE, self._status.tick)
            is_mute = is_over and self._writer.is_mute
        flags = self._mesh.world.all_gather(torch.tensor([int(is_mute)]))
        mute = [rank for rank, flag in enumerate(flags) if int(flag)]
        if mute and self._mesh.writes and self._writer is not None:
            self._writer.give_up(f"rank {mute[0]} could neither write its part nor tell why; its log does")
        return is_over

    def _newest(self) -> int | None:
        """Returns the step of the checkpoint that rank 0 finds good."""
        answer = torch.full((1,), -1, dtype=torch.int64)
        solo = Solo(self._mesh, self._status.tick)
        if self._mesh.writes:
            found = newest_good(self._root, solo.progress)
            if found is not None:
                answer[0] = found[0]
        solo.end()
        self._mesh.world.broadcast([answer])
        return int(answer) if int(answer) >= 0 else None

    def _note(self, step: int, error: str) -> None:
        if self._writer is not None and self._mesh.writes:
            self._writer.note(step, error)

    def _check_fits(self, step: int, position: Position, running: Running) -> None:
        uri = step_uri(self._root, step)
        epoch, steps = position.finished_epochs, running.steps
        if position.steps_per_epoch != steps.in_epoch(epoch):
            raise ValueError(
                f"{uri} is of a training with {position.steps_per_epoch} steps an epoch, this one has "
                f"{steps.in_epoch(epoch)}; give the same data and batchSize, or runUri a folder of its own"
            )
        if position.step - position.step_in_epoch != steps.before(epoch):
            raise ValueError(
                f"{uri} is of a training with {position.step - position.step_in_epoch} steps before epoch "
                f"{epoch + 1}, this one has {steps.before(epoch)}; give the same batchSizeSchedule, or "
                "runUri a folder of its own"
            )
        if position.finished_epochs > self._config.epochs:
            raise ValueError(
                f"{uri} has {position.finished_epochs} epochs behind it, this training has "
                f"{self._config.epochs}; raise epochs, or give runUri a folder of its own"
            )

    def _take_position(self, position: Position, running: Running) -> None:
        state = running.state
        state.epoch, state.step = position.epoch, position.step
        running.log.restore(position.history)
        running.finished_epochs = position.finished_epochs
        running.step_in_epoch = position.step_in_epoch
        running.skipped_before = position.skipped_before
        running.epoch_start = time.monotonic() - position.epoch_seconds

    def _position(self, running: Running) -> Position:
        state = running.state
        return Position(
            epoch=state.epoch,
            step=state.step,
            finished_epochs=running.finished_epochs,
            step_in_epoch=running.step_in_epoch,
            steps_per_epoch=running.steps.in_epoch(running.finished_epochs),
            seconds=self.seconds,
            epoch_seconds=time.monotonic() - running.epoch_start,
            skipped_before=running.skipped_before,
            scaler=running.scaler.state_dict(),
            rate_scales=tuple(running.rates.scales),
            resumed_steps=self.resumed_steps,
            non_finite=tuple(self.non_finite),
            history=tuple(state.history),
        )
