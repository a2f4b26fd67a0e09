"""Decides when to write checkpoints of a training, writes them, and resumes from one.

Invariant: every rank comes here at the same steps and makes the same collective calls. Rank 0 broadcasts the
facts that only it knows.
"""

from __future__ import annotations

import logging
import math
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import torch

from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.techniques import first_made, techniques_of
from ringspark.estimators.training.checkpoint.attributes import read_attributes, write_attributes
from ringspark.estimators.training.checkpoint.folders import (
    checkpoints_uri,
    find_newest_good,
    is_committed,
    step_uri,
)
from ringspark.estimators.training.checkpoint.rank_state import (
    RankState,
    gather_ranks,
    restore_rank,
    restore_strategy,
)
from ringspark.estimators.training.checkpoint.rank_zero import RankZeroSection
from ringspark.estimators.training.checkpoint.reading import load_training_state, read_record
from ringspark.estimators.training.checkpoint.record import Position
from ringspark.estimators.training.checkpoint.snapshot import take_snapshot
from ringspark.estimators.training.checkpoint.writer import BackgroundWriter
from ringspark.estimators.training.non_finite import MAX_REPORTED, NonFiniteStep, raise_first_bad
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.train_state import TrainState
from ringspark.pipelines import ShardManifest

MAX_ROLLBACKS = 5
ROLLBACK_FACTOR = 0.5
# A checkpoint is left out if the write before it takes longer than this share of `timeout_seconds`.
_WAIT_SHARE = 0.25
# Seconds between two looks at the clock if the next checkpoint is far away.
_LOOK_SECONDS = 10.0
# Mean time between two losses of a worker, from which the interval between checkpoints is chosen.
_SECONDS_BETWEEN_LOSSES = 3600.0
# Largest share of the time in which steps may wait for a checkpoint.
_MOST_SHARE = 0.01
_FIRST_SECONDS = 15.0
# Interval for a run that keeps all checkpoints: many of them would fill the store.
_KEPT_SECONDS = 600.0
# Wait after a checkpoint that failed, until the ranks try again to end at one.
_PUT_OFF_SECONDS = 60.0


def choose_interval(seconds: float | None) -> float:
    """Returns the interval between checkpoints, in seconds, if training waits `seconds` for each checkpoint.

    `seconds` is None before the first checkpoint. The interval sqrt(2 * wait * time between losses) minimizes
    the sum of two costs: the wait, and the steps that a loss repeats (Young 1974, Daly 2006).
    """
    if seconds is None:
        return _FIRST_SECONDS
    best = math.sqrt(2 * seconds * _SECONDS_BETWEEN_LOSSES)
    return max(_FIRST_SECONDS, best, seconds / _MOST_SHARE)


_log = logging.getLogger(__name__)


class CheckpointSchedule:
    """Decides after which steps and epochs to write a checkpoint. All ranks decide the same.

    Only the clock of rank 0 counts. Rank 0 does not read it at every step, and broadcasts the number of steps
    until the next reading. 0 means that a checkpoint is due. -1 means that a checkpoint is due and that the
    gang ends after it, to start again with more workers (`must_regroup`).
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: RankMesh,
        clock: Callable[[], float] = time.monotonic,
        status: Status | None = None,
    ) -> None:
        self._status = status or Status()
        self.must_regroup = False
        self._regroups_from = 0.0
        self._steps = config.checkpoint_every_steps
        self._epochs = config.checkpoint_every_epochs
        self._seconds = config.checkpoint_every_seconds
        if self._seconds is None and config.certify:
            self._seconds = _KEPT_SECONDS
        self._in_step = config.is_in_step
        self._mesh = mesh
        self._clock = clock
        self._has_seconds = self._seconds != 0
        self._interval = choose_interval(None) if self._seconds is None else self._seconds
        self.is_enabled = config.writes_checkpoints or config.keeps_state
        self.restart(0)

    def restart(self, step: int) -> None:
        """Counts steps and time from `step`, at which a checkpoint was written or the training started."""
        self.last_step = step
        self._last = self._looked = self._clock()
        self._looked_at = step
        self._look_at = step + 1
        self._stride = 1

    def put_off(self) -> None:
        """Trains on for a while, although the driver asks the ranks to end."""
        self.must_regroup, self._regroups_from = False, self._clock() + _PUT_OFF_SECONDS

    def measure(self, seconds: float) -> None:
        """Chooses the interval by the time that steps waited for a checkpoint, unless the user chose it."""
        if self._seconds is None:
            self._interval = choose_interval(seconds)

    def is_due_after_step(self, step: int) -> bool:
        if self._steps and step % self._steps == 0:
            return True
        return self._has_seconds and self._in_step and step >= self._look_at and self._look(step)

    def is_due_after_epoch(self, epoch: int) -> bool:
        if self._epochs and epoch % self._epochs == 0:
            return True
        if not self._has_seconds or self._in_step:
            return False
        answer = torch.tensor([int(self._clock() - self._last >= self._interval)])
        self._mesh.world.broadcast([answer])
        return bool(answer)

    def _look(self, step: int) -> bool:
        answer = torch.zeros(1, dtype=torch.int64)
        if self._mesh.writes:
            must_regroup = self._status.must_regroup and self._clock() >= self._regroups_from
            answer[0] = -1 if must_regroup else self._steps_to_go(step)
        self._mesh.world.broadcast([answer])
        self.must_regroup = int(answer) < 0
        self._look_at = step + max(0, int(answer))
        return int(answer) <= 0

    def _steps_to_go(self, step: int) -> int:
        """Returns the number of steps until the next look at the clock; 0 if a checkpoint is due now."""
        now = self._clock()
        left = self._interval - (now - self._last)
        if left <= 0:
            return 0
        pace = max(1e-9, (now - self._looked) / max(1, step - self._looked_at))
        self._looked, self._looked_at = now, step
        # At most doubled, because the first steps say little about the pace of later ones.
        self._stride = max(1, min(2 * self._stride, int(0.9 * min(left, _LOOK_SECONDS) / pace)))
        return self._stride


class Recovery(AbstractContextManager["Recovery"]):
    """Writes the checkpoints of a training and resumes it from them. One per rank."""

    def __init__(self, config: TrainConfig, mesh: RankMesh, status: Status) -> None:
        self._config, self._mesh, self._status = config, mesh, status
        self._root = checkpoints_uri(config.run_uri)
        self.schedule = CheckpointSchedule(config, mesh, status=status)
        self._writer: BackgroundWriter | None = None
        if self.schedule.is_enabled and mesh.checkpoint_part is not None:
            keep = sys.maxsize if config.certify else config.keep_checkpoints
            self._writer = BackgroundWriter(self._root, keep)
        self._recorder: Any = None
        self._start = time.monotonic()
        self._rollbacks = 0
        self._rolled_to: int | None = None
        self.resumed_steps: tuple[int, ...] = ()
        self.non_finite: list[NonFiniteStep] = []

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.abandon()

    @property
    def seconds(self) -> float:
        """Training time over all continuations."""
        return time.monotonic() - self._start

    @property
    def errors(self) -> tuple[str, ...]:
        """Why checkpoints are missing, one line per checkpoint; empty except on rank 0."""
        return tuple(self._writer.errors) if self._writer is not None and self._mesh.writes else ()

    def record(self, objects: UserObjects, manifest: ShardManifest, device: torch.device) -> None:
        """Makes the recorder of checkpoints, if a technique has one. Call before `begin`.

        The recorder has `start(step)`, `add(...)` for each committed checkpoint, and `end(weights_uri)`.
        """
        if self._mesh.writes and self._writer is not None:
            techniques = techniques_of(self._config)
            made = (each.make_recorder(self._config, objects, manifest, device) for each in techniques)
            if (recorder := first_made(made)) is not None:
                self._recorder, self._writer.on_commit = recorder, recorder.add

    def record_end(self, weights_uri: str) -> None:
        """Gives the recorder the final weights, if there is a recorder."""
        if self._recorder is not None:
            self._recorder.end(weights_uri)

    def begin(self, train_state: TrainState) -> bool:
        """Finds a checkpoint and restores its position; returns whether there is one. Call `load` next."""
        self._status.phase = "looking for a checkpoint"
        if self.schedule.is_enabled:
            # A state that cannot be saved raises here, not at the first checkpoint.
            train_state.callbacks.state_dicts()
        step = self._find_newest()
        self.schedule.restart(step or 0)
        if self._recorder is not None:
            self._recorder.start(step)
        if step is None:
            train_state.log.restore([])
            return False
        position = read_record(step_uri(self._root, step)).position
        self._check_fits(step, position, train_state)
        self._take_position(position, train_state)
        self._start = time.monotonic() - position.seconds
        self.non_finite = list(position.non_finite)
        self.resumed_steps = (*position.resumed_steps, step)
        if self._mesh.writes:
            _log.info("training resumes from the checkpoint of step %d", step)
        return True

    def load(self, train_state: TrainState, factor: float = 1.0) -> None:
        """Restores weights, optimizer, generators, scaler and rates from the present step's checkpoint.

        `factor` scales the learning rates.
        """
        step = train_state.state.step
        self._status.phase = f"loading the checkpoint of step {step}"
        uri = step_uri(self._root, step)
        record, ranks = load_training_state(uri, train_state.sync, self._status.tick, train_state.average)
        restore_rank(train_state, ranks, self._mesh, self._config.seed)
        train_state.scaler.load_state_dict(record.position.scaler)
        scales = [scale * factor for scale in record.position.rate_scales]
        train_state.rates.resume(scales, record.position.first_rate_step, record.position.rate_pace)
        if record.position.rate_pace and self._config.time_budget_seconds is None:
            train_state.rates.end_at(step, train_state.steps.total)

    def load_initial(self, train_state: TrainState) -> None:
        """Starts from the training state of `initialModel`, if the config names one. Runs on every rank.

        Loads the state of the model's last step: weights, average, optimizer, residuals of compression, loss
        scale, rate changes of callbacks, and the position in a schedule without an end. Random generators,
        callbacks and sums of the epoch start new.
        """
        uri = self._config.initial_training_state
        if uri is None:
            return
        self._status.phase = "loading the training state of the initial model"
        record, ranks = load_training_state(
            uri, train_state.sync, self._status.tick, train_state.average, is_new=True
        )
        restore_strategy(train_state, ranks, self._mesh)
        position = record.position
        if position.scaler:
            train_state.scaler.load_state_dict({**position.scaler, "skipped_steps": 0})
        train_state.rates.resume(position.rate_scales, position.first_rate_step + position.step)

    def save(self, train_state: TrainState) -> None:
        """Copies the state of the training on every rank, and starts to write the copy."""
        state = train_state.state
        self._status.phase = f"checkpoint, epoch {state.epoch}, step {train_state.step_in_epoch}"
        train_state.rates.take_changes()
        reason, patience = "", self._config.timeout_seconds * _WAIT_SHARE
        is_free = self._wait_for_shards()
        if self._writer is not None and self._mesh.writes:
            is_free = self._writer.wait(patience, self._status.tick)
            if is_free and self._mesh.num_checkpoint_parts > 1:
                # Before the other ranks begin; they wait for this rank's numbers below.
                reason = self._writer.clear(state.step, patience, self._status.tick)
        # A collective call carries numbers, so 0 means no step.
        mine = torch.tensor(
            [train_state.first_bad.step or 0, int(is_free and not reason), secrets.randbits(62)]
        )
        first_bad, free, tokens = torch.stack(self._mesh.world.all_gather(mine)).T.tolist()
        raise_first_bad(state.epoch, first_bad, train_state.scaler.advice)
        self.schedule.restart(state.step)
        if not all(free):
            self._note(state.step, reason or "the previous checkpoint is still being written")
            return
        began = time.monotonic()
        ranks = gather_ranks(RankState.of(train_state, self._mesh), self._mesh.world, self._status.tick)
        position = self._position(train_state)
        average = None if self._config.ema_decay is None else train_state.average.values
        sync, snapshot = train_state.sync, None
        try:
            snapshot = take_snapshot(sync, position, ranks, self._mesh, self._status.tick, average)
        except ValueError as error:
            # With sharded weights, other ranks may be waiting for this one, so training must end.
            if self._config.sync.sharding != "none" or self._mesh.cuts_network:
                raise
            self._note(state.step, str(error))
        if not sync.in_step:
            # The other ranks step next on the weights and optimizer that rank 0 copies.
            self._mesh.world.barrier()
        if snapshot is not None and self._writer is not None:
            shard = replace(snapshot.shard, token=f"{tokens[0]:x}", seconds=self._config.timeout_seconds)
            self._writer.start(replace(snapshot, shard=shard))
        self.schedule.measure(time.monotonic() - began)

    def roll_back(self, found: NonFiniteStep, train_state: TrainState) -> None:
        """Returns to the newest good checkpoint; each return halves the learning rate. Runs on every rank."""
        self._status.phase = f"rollback from epoch {found.epoch}, step {found.step}"
        if self._writer is not None:
            self._writer.wait(self._config.timeout_seconds * _WAIT_SHARE, self._status.tick)
        step = self._find_newest()
        self._rollbacks = self._rollbacks + 1 if step == self._rolled_to else 1
        self._rolled_to = step
        if step is None or self._rollbacks > MAX_ROLLBACKS:
            tried = (
                "there is no checkpoint to return to"
                if step is None
                else f"{MAX_ROLLBACKS} rollbacks to step {step}, each with half the last rate, did not help"
            )
            raise FloatingPointError(
                f"{found}, and {tried}; lower learningRate, or look for rows that are not finite"
            )
        self._take_position(read_record(step_uri(self._root, step)).position, train_state)
        train_state.first_bad.reset()
        factor = ROLLBACK_FACTOR**self._rollbacks
        # A network's own counters and generators continue, or what they caused would repeat.
        network, attributes = train_state.sync.network, read_attributes(train_state.sync.network)
        self.load(train_state, factor)
        write_attributes(network, attributes, train_state.device)
        self.schedule.restart(step)
        if self._mesh.writes:
            text = "training rolls back to the checkpoint of step %d, with its learning rates times %g"
            _log.warning(text, step, factor)

    def report(self, found: NonFiniteStep) -> None:
        if self._mesh.writes:
            _log.warning("%s", found)
        if len(self.non_finite) < MAX_REPORTED:
            self.non_finite.append(found)

    def is_written(self, step: int) -> bool:
        """Whether the checkpoint of `step`, which was just started, is complete. Runs on every rank."""
        self.finish()
        answer = torch.zeros(1, dtype=torch.int64)
        section = RankZeroSection(self._mesh, self._status.tick)
        if self._mesh.writes:
            with suppress(OSError):
                answer[0] = int(is_committed(self._root, step))
        section.end()
        self._mesh.world.broadcast([answer])
        if not int(answer):
            self.schedule.put_off()
        return bool(answer)

    def finish(self) -> None:
        """Waits for the last write. Runs on every rank, before the final weights are written."""
        if not self.schedule.is_enabled:
            return
        self._status.phase = "waiting for the last checkpoint"
        self._wait_for_shards()
        section = RankZeroSection(self._mesh, self._status.tick)
        timeout = self._config.timeout_seconds
        if self._mesh.writes and self._writer and not self._writer.wait(timeout, section.progress):
            # The final weights matter more than one more checkpoint before them.
            self._note(self.schedule.last_step, "it was still being written when the training ended")
            self._writer.abandon()
        section.end()

    def _wait_for_shards(self) -> bool:
        """Waits a limited time for the shards of ranks above 0; returns False if this rank still writes."""
        if self._mesh.num_checkpoint_parts == 1:
            return True
        is_over, is_mute = True, False
        if self._writer is not None and not self._mesh.writes:
            is_over = self._writer.wait(self._config.timeout_seconds * _WAIT_SHARE, self._status.tick)
            is_mute = is_over and self._writer.is_mute
        flags = self._mesh.world.all_gather(torch.tensor([int(is_mute)]))
        mute = [rank for rank, flag in enumerate(flags) if int(flag)]
        if mute and self._mesh.writes and self._writer is not None:
            self._writer.give_up(f"rank {mute[0]} could neither write its shard nor report why; see its log")
        return is_over

    def _find_newest(self) -> int | None:
        answer = torch.tensor([-1])
        section = RankZeroSection(self._mesh, self._status.tick)
        if self._mesh.writes and (step := find_newest_good(self._root, section.progress)) is not None:
            answer[0] = step
        section.end()
        self._mesh.world.broadcast([answer])
        return int(answer) if int(answer) >= 0 else None

    def _note(self, step: int, error: str) -> None:
        if self._writer is not None and self._mesh.writes:
            self._writer.note(step, error)

    def _check_fits(self, step: int, position: Position, train_state: TrainState) -> None:
        uri = step_uri(self._root, step)
        epoch, steps = position.finished_epochs, train_state.steps
        if position.steps_per_epoch != steps.in_epoch(epoch):
            raise ValueError(
                f"{uri} is of a training with {position.steps_per_epoch} steps per epoch, this training has "
                f"{steps.in_epoch(epoch)}; give the same data and batchSize, or set runUri to a new folder"
            )
        if position.step - position.step_in_epoch != steps.before(epoch):
            raise ValueError(
                f"{uri} is of a training with {position.step - position.step_in_epoch} steps before epoch "
                f"{epoch + 1}, this training has {steps.before(epoch)}; give the same batchSizeSchedule, or "
                "set runUri to a new folder"
            )
        if position.finished_epochs >= self._config.epochs and position.step_in_epoch:
            raise ValueError(
                f"{uri} is in the middle of epoch {epoch + 1}, but epochs is {self._config.epochs}; set it "
                f"to {epoch + 1} or more, or set runUri to a new folder"
            )
        if position.finished_epochs > self._config.epochs:
            raise ValueError(
                f"{uri} is of a training with {position.finished_epochs} finished epochs, but epochs is "
                f"{self._config.epochs}; raise epochs, or set runUri to a new folder"
            )

    def _take_position(self, position: Position, train_state: TrainState) -> None:
        state = train_state.state
        state.epoch, state.step = position.epoch, position.step
        train_state.log.restore(position.history)
        train_state.finished_epochs = position.finished_epochs
        train_state.step_in_epoch = position.step_in_epoch
        train_state.skipped_before = position.skipped_before
        train_state.epoch_start = time.monotonic() - position.epoch_seconds

    def _position(self, train_state: TrainState) -> Position:
        state = train_state.state
        return Position(
            epoch=state.epoch,
            step=state.step,
            finished_epochs=train_state.finished_epochs,
            step_in_epoch=train_state.step_in_epoch,
            steps_per_epoch=train_state.steps.in_epoch(train_state.finished_epochs),
            seconds=self.seconds,
            epoch_seconds=time.monotonic() - train_state.epoch_start,
            skipped_before=train_state.skipped_before,
            scaler=train_state.scaler.state_dict(),
            rate_scales=tuple(train_state.rates.scales),
            first_rate_step=train_state.rates.first_step,
            rate_pace=train_state.rates.pace,
            resumed_steps=self.resumed_steps,
            non_finite=tuple(self.non_finite),
            history=tuple(state.history),
        )
