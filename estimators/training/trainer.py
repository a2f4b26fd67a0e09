"""The training loop of one rank.

Invariant: every rank takes the same number of steps and makes the same collective calls, whatever rows it
has. A step's gradient is the gradient of the mean loss over the GLOBAL batch: each rank differentiates its
rows' loss divided by the global weight, and the ranks' gradients are summed.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from ringspark.estimators.collectives.base import backward_errors, gather_bytes
from ringspark.estimators.failures import RegroupError
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.arguments import read_layout
from ringspark.estimators.training.average import has_modes
from ringspark.estimators.training.batch_transforms import prepare_inputs
from ringspark.estimators.training.checkpoint.resume import Recovery
from ringspark.estimators.training.feed import Batch, move_batches
from ringspark.estimators.training.history import EpochRecord, TrainingProgress
from ringspark.estimators.training.non_finite import NonFiniteStep, RollBackError, raise_first_bad
from ringspark.estimators.training.objective.sums import MicroBatchOutput, Sums
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.selection import Pack
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.estimators.training.step import global_weights
from ringspark.estimators.training.step_log import StepRecord
from ringspark.estimators.training.train_state import TrainState
from ringspark.models.meta_device import dense_parts
from ringspark.models.network_copy import restore
from ringspark.pipelines.epoch_plan import EpochPlan
from ringspark.pipelines.readers import ShardReader

# The duration of the first epoch is estimated from its first sixteenth, but without its first step, which may
# compile the network or connect to a store.
_PACED_STEPS = 4
_PACED_FRACTION = 16


# Buffers of a layer, a buffer's name, the buffer itself, and a copy of its values.
_KeptBuffer = tuple[dict[str, torch.Tensor | None], str, torch.Tensor, torch.Tensor]


class _PauseError(Exception):
    """The training ends within an epoch, at `pause_after_step`."""


class Trainer:
    def __init__(
        self, config: TrainConfig, mesh: RankMesh, train_state: TrainState, recovery: Recovery, status: Status
    ) -> None:
        self._config, self._mesh, self._recovery, self._status = config, mesh, recovery, status
        self._train_state, self._sync, self._state = train_state, train_state.sync, train_state.state
        self._scaler, self._first_bad = train_state.scaler, train_state.first_bad
        self._observed, self._timeline = train_state.observation, train_state.observation.timeline
        self._guards = config.on_non_finite != "stop"
        network = train_state.sync.network
        # An ensemble needs an equal replica on every rank to choose its members.
        is_whole = not config.cuts_network and config.sync.sharding == "none" and config.is_in_step
        self._pack = network if isinstance(network, Pack) and is_whole else None
        # The ranks that synchronize in every step; None if each rank steps at its own pace.
        self._together = mesh.data if self._sync.in_step else None

    def fit(self, train: ShardReader, validation: ShardReader | None) -> None:
        """Runs all epochs, from the newest good checkpoint if there is one. Runs on every rank."""
        if has_modes(self._sync.optimizer):
            self._sync.optimizer.train()  # type: ignore[attr-defined]
        is_resumed = self._recovery.begin(self._train_state)
        self._call("on_train_start")
        if is_resumed:
            self._recovery.load(self._train_state)
        else:
            self._recovery.load_initial(self._train_state)
            if self._config.on_non_finite == "rollback" or self._config.certify:
                self._save()  # the first step may have to be rolled back, or is to be proved
        is_over = False
        while not is_over:
            try:
                is_over = self._epoch(train, validation)
            except RollBackError as event:
                self._recovery.roll_back(event.found, self._train_state)
            except _PauseError:
                return
        if self._config.pause_after is None:
            self._scaler.check_trained(self._state.step)
        self._call("on_train_end")

    def _epoch(self, train: ShardReader, validation: ShardReader | None) -> bool:
        """Runs the rest of an epoch; returns whether it was the last one."""
        train_state, pause = self._train_state, self._config.pause_after
        last = self._config.epochs if pause is None else pause
        epoch = train_state.finished_epochs
        # A training that stopped early may be interrupted before its result is written.
        if epoch >= last or (self._state.stop_reason is not None and train_state.step_in_epoch == 0):
            return True
        self._state.epoch = epoch + 1
        is_due = self._train_epoch(epoch, train)
        self._drain()
        with backward_errors():
            self._sync.settle()
        values = self._take(train_state.sums, "train")
        # Every rank sees the same mean, so all stop here together.
        loss = values.pop("train_loss", None)  # None if the rows are hidden
        if loss is not None and not np.isfinite(loss):
            self._raise_not_finite(epoch, loss)
        rows = train.manifest.num_rows
        cost = self._observed.meter.cost(rows, time.monotonic() - train_state.epoch_start)
        if validation is not None:
            with self._timeline.rare_span("validation", self._state):
                values |= self._validate(epoch, validation)
        if len(train_state.callbacks):
            logged = json.dumps(self._state.take_logged()).encode()
            for found in gather_bytes(self._mesh.world, logged):
                values |= json.loads(found)
        # Whoever reads the epoch's record must find its steps.
        self._observed.losses.flush()
        train_state.log.add_epoch(
            EpochRecord(
                epoch=epoch + 1,
                steps=train_state.steps.in_epoch(epoch),
                rows=rows,
                seconds=time.monotonic() - train_state.epoch_start,
                learning_rate=self._sync.optimizer.param_groups[0]["lr"],
                train_loss=loss,
                validation_loss=values.pop("validation_loss", None),
                skipped_steps=self._scaler.skipped_steps - train_state.skipped_before,
                metrics=values,
                cost=cost,
                batch_size=train_state.steps.batches.size(epoch),
                noise=None if train_state.noise is None else train_state.noise.take(),
            )
        )
        train_state.end_epoch()
        self._call("on_epoch_end")
        if self._all_stop() or epoch + 1 == last:
            if self._config.keeps_state:
                self._save()
            return True  # the final weights are written next
        self._pace_rates(epoch + 1, train_state.log.history[-1].seconds)
        if self._recovery.schedule.is_due_after_epoch(epoch + 1) or is_due:
            self._save()
        return False

    def _train_epoch(self, epoch: int, reader: ShardReader) -> bool:
        """Takes the remaining steps of an epoch; returns whether a checkpoint is due after it."""
        train_state, state = self._train_state, self._state
        plan = reader.plan(epoch)
        first = train_state.step_in_epoch
        rows = epoch * reader.manifest.num_rows + sum(plan.global_rows(step) for step in range(first))
        is_due = False
        self._first_bad.reset()
        self._observed.losses.begin(train_state.sums)
        self._observed.meter.begin(is_whole=first == 0)
        self._sync.module.train()
        # Closed also if the training rolls back, because the reader has threads.
        with closing(cast("Any", reader.batches(epoch, first))) as batches:
            read = self._observed.steps(self._on_device(reader, batches), state)
            for step, batch in enumerate(read, first):
                if step < first + 2 or train_state.callbacks.has_step_end:
                    self._hold_new_parameters()
                self._status.phase = f"training, epoch {epoch + 1}, step {step + 1}"
                train_state.rates.set(state.step)
                global_rows = plan.global_rows(step)
                with self._observed.step(step, reader.num_steps):
                    if train_state.own_step is None:
                        self._train_step(batch, global_rows, step + 1)
                    else:
                        self._own_step(batch, plan, step)
                self._share_moved_buffers(plan, step)
                rows += global_rows
                state.step += 1
                train_state.step_in_epoch = step + 1
                if epoch == first == 0:  # a budget may be shorter than the first epoch
                    if step == 0:
                        second_step = time.monotonic()
                    elif step == max(_PACED_STEPS, plan.num_steps // _PACED_FRACTION) < plan.num_steps - 1:
                        self._pace_rates(0, (time.monotonic() - second_step) * plan.num_steps / step)
                if self._observed.losses.is_due(state.step):
                    self._record_step(rows)
                if train_state.callbacks.has_step_end:
                    self._call("on_step_end")
                if train_state.log.wants_progress:
                    train_state.log.write_progress(
                        TrainingProgress(
                            epoch=epoch + 1,
                            epochs=self._config.epochs,
                            step=state.step,
                            num_steps=state.num_steps,
                            rows=rows,
                            seconds=self._recovery.seconds,
                        )
                    )
                if self._recovery.schedule.is_due_after_step(state.step):
                    # After the last step, the epoch's record and its callbacks come before the checkpoint.
                    is_due = step + 1 == plan.num_steps
                    if not is_due:
                        self._save()
                        if state.step == self._config.pause_after_step:
                            raise _PauseError
        self._status.phase = f"training, end of epoch {epoch + 1}"
        return is_due

    def _pace_rates(self, epochs: int, seconds: float) -> None:
        """Fits the end of the schedule to the last epoch that the time budget allows.

        `epochs`: Number of finished epochs. `seconds`: Duration of one epoch, measured or estimated.
        """
        config, steps, step = self._config, self._train_state.steps, self._state.step
        # A replay has no clock, and ranks that step on their own do not wait here.
        if config.time_budget_seconds is None or config.certify or self._together is None:
            return
        left = config.time_budget_seconds - (self._recovery.seconds if epochs else 0.0)
        more = max(1, int(min(left / seconds, config.epochs - epochs)))
        fits = min(int(each) for each in self._mesh.world.all_gather(torch.tensor([more])))
        self._train_state.rates.end_at(step, steps.after(epochs + fits))

    def _hold_new_parameters(self) -> None:
        """Trains layers that a callback or `forward` has thawed, as torch does, and names what it cannot."""
        names = self._sync.hold_new_parameters()
        self._train_state.average.add_new()
        if names and self._mesh.writes:
            warnings.warn(
                f"parameters {names[:10]} require a gradient since step {self._state.step}, but no optimizer "
                "holds them, so they are not trained; create them in the network's constructor, and thaw "
                "layers before fit or with sync=AllReduce()",
                UserWarning,
                stacklevel=2,
            )

    def _record_step(self, rows: int) -> None:
        """Records the mean loss of all ranks' rows since the last record.

        If ranks do not step together, it is the mean of rank 0's rows: a common mean would make ranks wait.
        """
        train_state, state = self._train_state, self._state
        loss = self._observed.losses.mean_loss(train_state.sums, self._together)
        if loss is None:
            return
        self._observed.losses.add(
            StepRecord(
                step=state.step,
                epoch=state.epoch,
                rows=rows,
                seconds=self._recovery.seconds,
                train_loss=loss,
                learning_rate=self._sync.optimizer.param_groups[0]["lr"],
            )
        )

    def _on_device(self, reader: ShardReader, batches: Any) -> Iterator[Batch]:
        layout = read_layout(reader.manifest, self._config.input_columns)
        return move_batches(self._train_state.device, batches, self._config, layout)

    def _train_step(self, batch: Batch, global_rows: int, step: int) -> None:
        train_state = self._train_state
        self._sync.optimizer.zero_grad()
        # Undoing a step also restores running statistics, including buffers that the forward pass replaced.
        buffers = [
            (own._buffers, name, buffer, buffer.clone())
            for own in (self._sync.network.modules() if self._guards else ())
            for name, buffer in own._buffers.items()
            if buffer is not None
        ]
        own_rows = batch.num_rows
        results = self._backward(batch, global_rows)
        if self._guards and not train_state.passes.steps_in_flight:
            # With steps in flight, the gradients of these losses belong to a later step.
            for result in results:
                self._scaler.check_loss(result.losses)
        if self._together is None:
            # Before its gradients spoil the weights of other ranks, which might be blamed while this one
            # waits.
            self._check_losses(step, results)
        self._take_step(own_rows, global_rows)
        if self._scaler.skipped:
            is_bad = not all(result.is_finite for result in results)
            flags = self._mesh.world.all_gather(torch.tensor([int(is_bad)]))
            bad = tuple(rank for rank, flag in enumerate(flags) if int(flag))
            # All ranks leave out the losses of this step, as one rank with all rows would.
            train_state.sums.add(results, metrics_only=bool(bad))
            if self._guards:
                self._on_skipped(step, bad, buffers)
            return
        if self._together is not None:
            self._check_losses(step, results)
        train_state.sums.add(results)

    def _own_step(self, batch: Batch, plan: EpochPlan, step: int) -> None:
        """Lets the user's own step take the step."""
        train_state = self._train_state
        assert train_state.own_step is not None
        if train_state.transform is not None:
            batch = train_state.transform(batch, self._state.step)
        result = train_state.own_step.train(batch, plan, step, self._state.step, self._state.epoch)
        if result is not None:
            train_state.average.update()
            self._check_losses(step + 1, [result])
            train_state.sums.add([result])

    def _drain(self) -> None:
        """Takes the optimizer steps for gradients that are still in flight in a pipeline without a flush."""
        for _ in range(self._train_state.passes.steps_in_flight):
            self._sync.optimizer.zero_grad()
            self._train_state.passes.drain()
            self._take_step(0, 0)
        self._train_state.passes.settle()

    def _take_step(self, own_rows: int, global_rows: int) -> None:
        """Sums the gradients over the ranks and steps the optimizer."""
        with self._timeline.span("exchange"), backward_errors():
            self._sync.reduce(lambda: self._scaler.current_scale)
        noise = self._train_state.noise
        if noise is not None:
            factor = self._scaler.current_scale * self._sync.loss_factor
            noise.solve(own_rows, global_rows, factor)
        with self._timeline.span("step"):
            if self._config.max_grad_norm is not None:
                # The check for non-finite gradients comes first: the norm would spread NaN over all of them.
                self._scaler.unscale(self._sync.optimizer)
                self._sync.clip_gradients(self._config.max_grad_norm)
            self._sync.step(self._scaler)
            self._scaler.update()
            if not self._scaler.skipped:
                self._train_state.average.update()
                if noise is not None:
                    noise.keep()

    def _backward(self, batch: Batch, global_rows: int) -> list[MicroBatchOutput]:
        train_state = self._train_state
        if train_state.transform is not None:
            with self._timeline.span("transform"):
                batch = train_state.transform(batch, self._state.step)
        divisor = global_weights(train_state.recipe, batch, global_rows, self._together)
        micro_batches = batch.split(self._config.gradient_accumulation) if batch.num_rows else []
        keeps = train_state.sums.takes_outputs and bool(micro_batches)
        return train_state.passes.train(micro_batches, divisor, inputs=batch.inputs, keeps_outputs=keeps)

    def _on_skipped(self, step: int, ranks: tuple[int, ...], buffers: list[_KeptBuffer]) -> None:
        if not ranks and self._config.precision == "fp16":
            return  # an overflow while the loss scale adapts
        with torch.no_grad():
            for own, name, buffer, values in buffers:
                own[name] = buffer
                restore(buffer, values)
        rolls_back = self._config.on_non_finite == "rollback"
        found = NonFiniteStep(
            epoch=self._state.epoch, step=step, ranks=ranks, action="rolled back" if rolls_back else "skipped"
        )
        self._recovery.report(found)
        if rolls_back:
            raise RollBackError(found)

    def _check_losses(self, step: int, results: list[MicroBatchOutput]) -> None:
        for result in results:
            self._first_bad.check(result.losses, step)
        if self._first_bad.is_immediate and (bad := self._first_bad.step) is not None:
            # The other ranks notice that this rank ends.
            first_bad = [0] * self._mesh.world.rank + [bad]
            raise_first_bad(self._state.epoch, first_bad, self._scaler.advice)

    def _raise_not_finite(self, epoch: int, loss: float) -> None:
        # A collective call carries numbers, so 0 means no step.
        first_bad = self._mesh.world.all_gather(torch.tensor([self._first_bad.step or 0]))
        raise_first_bad(epoch + 1, [int(step) for step in first_bad], self._scaler.advice)
        raise FloatingPointError(
            f"the training loss is {loss} after epoch {epoch + 1}; "
            f"lower learningRate, set maxGradNorm, or scale the features{self._scaler.advice}"
        )

    def _validate(self, epoch: int, reader: ShardReader) -> dict[str, float]:
        train_state, network = self._train_state, self._sync.network
        parts = self._config.gradient_accumulation
        self._status.phase = f"validation after epoch {epoch + 1}"
        self._share_buffers()
        network.eval()
        with train_state.average.in_place(), torch.no_grad():
            if self._pack is not None:
                is_classes = self._config.task == "classification"
                held_out, loss = self._held_out(reader), self._config.losses[0]
                self._pack.choose_on(held_out, self._mesh.data, is_classes=is_classes, loss=loss)
            plan = reader.plan(0)
            for step, batch in enumerate(self._held_out(reader)):
                if (own := train_state.own_step) is not None:
                    keeps, epoch = train_state.validation.takes_outputs, self._state.epoch
                    result = own.evaluate(batch, plan, step, epoch, keeps_outputs=keeps)
                    train_state.validation.add([result])
                    continue
                # Split, because a batch that does not fit in training does not fit here.
                micro_batches = batch.split(parts) if batch.num_rows else []
                for micro_batch in micro_batches:
                    keeps = train_state.validation.takes_outputs
                    results = train_state.passes.evaluate(micro_batch, keeps_outputs=keeps)
                    train_state.validation.add(results)
                # The other ranks may need this rank's shards of the weights in each of their passes.
                for _ in range(parts - len(micro_batches)):
                    train_state.passes.evaluate_without_rows(batch.inputs)
        return self._take(train_state.validation, "validation")

    def _take(self, sums: Sums, split: str) -> dict[str, float]:
        values = self._train_state.passes.share(sums.take(self._mesh.data))
        if (own := self._train_state.own_step) is not None:
            values = {name: v for name, v in values.items() if not name.startswith(f"{split}_loss_")}
            values |= own.take(split, self._mesh.data)
        return values

    def _held_out(self, reader: ShardReader) -> Iterator[Batch]:
        prepare, transform = self._train_state.prepare, self._train_state.transform
        with closing(cast("Any", reader.batches(0))) as batches:
            for batch in self._on_device(reader, batches):
                self._status.tick()
                held = replace(batch, inputs=prepare_inputs(prepare, batch.inputs, batch.layout))
                yield held if transform is None else transform.held_out(held)

    def _share_moved_buffers(self, plan: EpochPlan, step: int) -> None:
        """Gives ranks without rows, which ran no forward pass, the buffers that the others' passes moved."""
        size = self._mesh.data.size
        # With several rows per rank no rank is without; nor do ranks that step on their own wait here.
        if plan.global_rows(step) >= 16 * size or self._together is None or self._config.hides_rows:
            return
        has_rows = [plan.shard_rows(step, rank) > 0 for rank in range(size)]
        if not all(has_rows) and any(has_rows):
            self._share_buffers(has_rows.index(True), dict(self._sync.network.named_buffers()))

    def _share_buffers(self, root: int = 0, names: Collection[str] = ()) -> None:
        """Broadcasts a rank's buffers `names`, or all to save: the saved network has rank 0's statistics."""
        if self._mesh.data.size == 1:
            return
        network = self._sync.network
        names = list(names or network.state_dict())
        shared = [part for n, b in network.named_buffers() if n in names for part in dense_parts(b)]
        shapes = repr([(names, *((part.dtype, part.shape) for part in shared))]).encode()
        if shared and len(set(gather_bytes(self._mesh.data, shapes))) == 1:
            with torch.no_grad():
                self._mesh.data.broadcast(shared, root)

    def _save(self) -> None:
        self._drain()
        # A callback may have thawed a layer since the last step.
        self._hold_new_parameters()
        if not self._sync.in_step:
            # Other ranks may be far behind; this wait reports their progress, a collective call does not.
            with backward_errors():
                self._sync.settle()
        with self._timeline.rare_span("checkpoint", self._state):
            self._recovery.save(self._train_state)
        if self._recovery.schedule.must_regroup and self._recovery.is_written(self._state.step):
            raise RegroupError("the driver starts the workers again with more of them")

    def _call(self, event: str) -> None:
        if len(self._train_state.callbacks):
            self._status.phase = f"callbacks, {event}, epoch {self._state.epoch}"
            with self._train_state.recipe.criterion.gather_in_forward():
                self._train_state.callbacks.call(event, self._state)

    def _all_stop(self) -> bool:
        if not len(self._train_state.callbacks):
            return False
        reasons = gather_bytes(self._mesh.world, (self._state.stop_reason or "").encode())
        self._state.stop_reason = next((reason.decode() for reason in reasons if reason), None)
        return self._state.stop_reason is not None
