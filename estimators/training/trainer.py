"""The training loop of one rank.

Invariant: every rank takes the same number of steps and makes the same collective calls, whatever
rows it holds. The gradient of a step is the mean over the GLOBAL batch: each rank differentiates
its rows' loss divided by the global weight, and the ranks' gradients are summed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import backward_errors
from ringspark.estimators.parallel.gradient_sync import GradientSync
from ringspark.estimators.training.callbacks import Callbacks, TrainingState
from ringspark.estimators.training.checkpoint.rank_state import RankParts
from ringspark.estimators.training.checkpoint.resume import Recovery, Running, raise_first_bad
from ringspark.estimators.training.feed import Array, Batch, to_batch
from ringspark.estimators.training.history import EpochRecord, Progress, RunLog
from ringspark.estimators.training.non_finite import FirstBadLoss, NonFiniteStep, RollBackError, poisoned
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.objective.loss_sums import Totals
from ringspark.estimators.training.objective.metric_set import MetricSet
from ringspark.estimators.training.optimizers.schedules import Rates
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.precision import LossScaler, autocast
from ringspark.estimators.training.saved_tensors import saved_tensor_hooks
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models.outputs import as_outputs
from ringspark.pipelines.readers import ShardReader


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a training is made of on one rank, each already on its device.

    Attributes:
        module: Without wrappers; `sync` holds it as the forward pass takes it.
        metrics: One set a label.
        make_rates: Number of steps -> the learning rates of each step.
    """

    module: nn.Module
    sync: GradientSync
    criterion: Criterion
    metrics: list[MetricSet]
    make_rates: Callable[[int], Rates]
    callbacks: Callbacks
    device: torch.device


class _Seen(NamedTuple):
    """One micro-batch's losses and weights, both (num_losses,), and what metrics take: outputs and labels."""

    losses: torch.Tensor
    weights: torch.Tensor
    pairs: list[tuple[torch.Tensor, torch.Tensor]]


class Trainer:
    """Trains one module on one rank's shards of every global batch."""

    def __init__(
        self,
        config: TrainConfig,
        collective: Collective,
        parts: Parts,
        log: RunLog,
        status: Status,
        recovery: Recovery | None = None,
    ) -> None:
        self._config = config
        self._collective = collective
        self._parts = parts
        self._module, self._sync, self._device = parts.module, parts.sync, parts.device
        self._log = log
        self._status = status
        # Ranks with parts of the gradients must agree on overflows; with all of them, they see the same.
        combine = partial(collective.all_reduce, op="max") if config.sharding != "none" else None
        self._guards = config.on_non_finite != "stop"
        self._scaler = LossScaler(config.precision, parts.device, combine, guards=self._guards)
        self._first_bad = FirstBadLoss(parts.device)
        self._recovery = recovery or Recovery(config, collective, status)
        self._seen: list[_Seen] = []
        self._num_losses = parts.criterion.num_losses
        # In training mode an ensemble gives the logits of its members, not a prediction.
        self._splits_with_metrics = ["train", "validation"]
        if any(loss.endswith("_per_member") for loss in config.losses):
            self._splits_with_metrics = ["validation"]
        if not any(metric_set.names for metric_set in parts.metrics):
            self._splits_with_metrics = []
        self._state = TrainingState(
            rank=collective.rank,
            size=collective.size,
            module=parts.module,
            optimizer=parts.sync.optimizer,
            num_steps=0,
            history=log.history,
        )

    @property
    def state(self) -> TrainingState:
        """Where the training stands, or how it ended."""
        return self._state

    def fit(self, train: ShardReader, validation: ShardReader | None) -> None:
        """Runs all epochs, or fewer where a callback stops them. Runs on every rank.

        Where the run has a checkpoint, it goes on from the newest good one.
        """
        self._state.num_steps = self._config.epochs * train.num_steps
        # Before anything is loaded: the bases are the rates that the user gave.
        self._rates = self._parts.make_rates(self._state.num_steps)
        running = self._running(train.num_steps)
        goes_on = self._recovery.begin(running)
        self._call("on_train_start")
        if goes_on:
            self._recovery.load(running)
        else:
            self._recovery.begin_anew(running)
        is_over = False
        while not is_over:
            try:
                is_over = self._epoch(running, train, validation)
            except RollBackError as event:
                self._seen.clear()
                self._recovery.roll_back(event.found, running)
        self._scaler.check_trained(self._state.step)
        self._call("on_train_end")

    def _running(self, steps_per_epoch: int) -> Running:
        parts = self._parts
        return Running(
            sync=self._sync,
            scaler=self._scaler,
            rates=self._rates,
            own=RankParts(
                module=self._module,
                totals=Totals(self._num_losses, self._device),
                metrics=parts.metrics,
                callbacks=parts.callbacks,
                state=self._state,
                device=self._device,
            ),
            log=self._log,
            first_bad=self._first_bad,
            steps_per_epoch=steps_per_epoch,
            epoch_start=time.monotonic(),
        )

    def _epoch(self, running: Running, train: ShardReader, validation: ShardReader | None) -> bool:
        """Runs what is left of an epoch; whether it was the last one. Runs on every rank."""
        epoch = running.finished_epochs
        if epoch >= self._config.epochs:
            return True
        self._state.epoch = epoch + 1
        is_due = self._train_epoch(epoch, train, running)
        values = self._values("train", running.own.totals)
        # Every rank sees the same mean, so all of them stop here together.
        if not np.isfinite(values["train_loss"]):
            self._raise_not_finite(epoch, values["train_loss"])
        if validation is not None:
            values |= self._validate(epoch, validation)
        self._log.epoch(
            EpochRecord(
                epoch=epoch + 1,
                steps=train.num_steps,
                rows=train.manifest.num_rows,
                seconds=time.monotonic() - running.epoch_start,
                learning_rate=self._sync.optimizer.param_groups[0]["lr"],
                train_loss=values.pop("train_loss"),
                validation_loss=values.pop("validation_loss", None),
                skipped_steps=self._scaler.skipped_steps - running.skipped_before,
                metrics=values,
            )
        )
        running.finished_epochs, running.step_in_epoch = epoch + 1, 0
        running.skipped_before = self._scaler.skipped_steps
        running.epoch_start = time.monotonic()
        running.own.totals = Totals(self._num_losses, self._device)
        self._call("on_epoch_end")
        if self._all_stop() or epoch + 1 == self._config.epochs:
            return True  # the final weights are written next
        if self._recovery.after_epoch(epoch + 1) or is_due:
            self._recovery.save(running)
        return False

    def _raise_not_finite(self, epoch: int, loss: float) -> None:
        mine = self._first_bad.step
        # Collective calls carry numbers: no step is 0.
        noted = self._collective.all_gather(torch.tensor([mine or 0]))
        raise_first_bad(epoch + 1, [int(step) or None for step in noted], self._scaler.advice)
        raise FloatingPointError(
            f"the training loss is {loss} after epoch {epoch + 1}; "
            f"lower learningRate, set maxGradNorm, or scale the features{self._scaler.advice}"
        )

    def _call(self, event: str) -> None:
        if len(self._parts.callbacks):
            self._status.phase = f"callbacks, {event}, epoch {self._state.epoch}"
            self._parts.callbacks.call(event, self._state)

    def _all_stop(self) -> bool:
        """Whether a callback of any rank wants to stop. Runs on every rank."""
        if not len(self._parts.callbacks):
            return False
        mine = (self._state.stop_reason or "").encode()
        reasons = self._collective.all_gather(
            torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            if mine
            else torch.zeros(0, dtype=torch.uint8)
        )
        said = [bytes(reason.tolist()).decode() for reason in reasons if len(reason)]
        if not said:
            return False
        self._state.stop_reason = said[0]
        return True

    def _train_epoch(self, epoch: int, reader: ShardReader, running: Running) -> bool:
        """Takes the steps that are left of an epoch; whether a checkpoint is due after it."""
        plan = reader.plan(epoch)
        first = running.step_in_epoch
        rows = epoch * reader.manifest.num_rows + sum(plan.global_rows(step) for step in range(first))
        is_due = False
        self._first_bad.reset()
        self._sync.module.train()
        # Closed also when the training goes back: the reader has threads.
        with closing(cast("Any", reader.batches(epoch, first))) as batches:
            for step, columns in enumerate(batches, first):
                self._status.phase = f"training, epoch {epoch + 1}, step {step + 1}"
                self._rates.set(self._state.step)
                global_rows = plan.global_rows(step)
                self._train_step(self._batch(columns), global_rows, running.own.totals, step)
                rows += global_rows
                self._state.step += 1
                running.step_in_epoch = step + 1
                if self._parts.callbacks.has_step_end:
                    self._call("on_step_end")
                self._log.progress(
                    Progress(
                        epoch=epoch + 1,
                        epochs=self._config.epochs,
                        step=self._state.step,
                        num_steps=self._state.num_steps,
                        rows=rows,
                        seconds=self._recovery.seconds,
                    )
                )
                if self._recovery.after_step(self._state.step):
                    # After the last step, the epoch's record and what callbacks make of it come first.
                    is_due = step + 1 == reader.num_steps
                    if not is_due:
                        self._recovery.save(running)
        self._status.phase = f"training, end of epoch {epoch + 1}"
        return is_due

    def _train_step(self, batch: Batch, global_rows: int, totals: Totals, step: int = 0) -> None:
        # A set gradient would be added to: set_to_none is left out, Horovod's zero_grad lacks it.
        self._sync.optimizer.zero_grad()
        # What a forward pass does to running statistics is undone if the step is.
        buffers = [(b, b.clone()) for b in self._module.buffers()] if self._guards else []
        weight = self._global_weights(batch, global_rows)
        if batch.num_rows:
            micro_batches = batch.split(self._config.gradient_accumulation)
            for i, micro_batch in enumerate(micro_batches):
                with self._sync.micro_batch(last=i == len(micro_batches) - 1):
                    self._backward(micro_batch, weight)
        else:
            self._sync.backward_without_rows(batch.inputs)
        with backward_errors():
            self._sync.reduce()
        if self._config.max_grad_norm is not None:
            # First looks for what is not finite: the norm would spread it over all gradients.
            self._scaler.unscale(self._sync.optimizer)
            self._sync.clip_gradients(self._config.max_grad_norm)
        self._sync.step(self._scaler)
        self._scaler.update()
        if self._guards and self._scaler.skipped:
            self._on_skipped(step + 1, buffers)
        elif not self._scaler.skipped:
            self._note_losses(step + 1)
        self._count(totals, finite_only=self._scaler.skipped)

    def _on_skipped(self, step: int, buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Says whose losses made all ranks skip a step, and goes back if that is asked for."""
        bad = any(not bool(seen.losses.isfinite().all()) for seen in self._seen)
        flags = self._collective.all_gather(torch.tensor([int(bad)]))
        ranks = tuple(rank for rank, flag in enumerate(flags) if int(flag))
        if not ranks and self._config.precision == "fp16":
            return  # an overflow of the loss scale, which finds its size
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)
        goes_back = self._config.on_non_finite == "rollback"
        found = NonFiniteStep(
            epoch=self._state.epoch, step=step, ranks=ranks, action="rolled back" if goes_back else "skipped"
        )
        self._recovery.report(found)
        if goes_back:
            raise RollBackError(found)

    def _note_losses(self, step: int) -> None:
        for seen in self._seen:
            self._first_bad.note(seen.losses, step)
        if self._first_bad.at_once and (bad := self._first_bad.step) is not None:
            # The other ranks notice that this one is gone.
            noted = [*[None] * self._collective.rank, bad]
            raise_first_bad(self._state.epoch, noted, self._scaler.advice)

    def _backward(self, batch: Batch, global_weights: torch.Tensor) -> None:
        losses = self._losses(self._sync.module, batch, "train")
        loss = self._parts.criterion.total(losses / global_weights)
        if self._guards:
            loss = poisoned(loss)
        scaled = self._scaler.scale(loss * self._sync.loss_factor)
        with backward_errors():
            scaled.backward()  # type: ignore[no-untyped-call]

    def _losses(self, module: nn.Module, batch: Batch, split: str) -> torch.Tensor:
        """Each label's sum of weighted losses over the rows, (num_losses,); `_count` counts them."""
        hooks = saved_tensor_hooks(
            offload=self._config.activation_offload,
            compression=self._config.activation_compression,
            module=self._module,
            device=self._device,
        )
        # Sharded parameters are gathered in here: the peers may be lost.
        with autocast(self._config.precision, self._device), hooks, backward_errors():
            outputs = as_outputs(module(*batch.inputs))
        if len(outputs) != self._num_losses:
            raise ValueError(
                f"model {type(self._module).__name__} returns {len(outputs)} tensors in {split} mode for "
                f"{self._num_losses} labels; return the same outputs in training as in evaluation"
            )
        # fp32 outside autocast: a mean over many rows would lose digits in 16 bits.
        outputs = tuple(output.float() for output in outputs)
        rows = self._parts.criterion.rows(outputs, batch.labels)
        if batch.weight is not None:
            rows = rows * batch.weight[:, None]
        losses = rows.sum(0)
        pairs = []
        if split in self._splits_with_metrics:
            pairs = [(output.detach(), label) for output, label in zip(outputs, batch.labels, strict=True)]
        self._seen.append(_Seen(losses.detach(), self._weights(batch), pairs))
        return losses

    def _count(self, totals: Totals, finite_only: bool = False) -> None:
        """Takes the rows since the last call into losses and metrics.

        Args:
            finite_only: For a step that fp16 skipped because of them: without the micro-batches whose
                losses overflowed, and in metrics without the rows whose outputs did.
        """
        for seen in self._seen:
            losses, weights = seen.losses, seen.weights
            if finite_only:
                finite = losses.isfinite()
                losses, weights = torch.where(finite, losses, 0.0), torch.where(finite, weights, 0.0)
            totals.add(losses, weights)
            for metric_set, (output, label) in zip(self._parts.metrics, seen.pairs, strict=False):
                if finite_only:
                    kept = output.reshape(len(output), -1).isfinite().all(1)
                    output, label = output[kept], label[kept]
                metric_set.update(output, label)
        self._seen.clear()

    def _weights(self, batch: Batch) -> torch.Tensor:
        """What this rank's rows weigh in the mean of each label's loss, (num_losses,)."""
        weights = self._parts.criterion.row_weights(batch.labels)
        if weights is None:
            total = float(batch.num_rows) if batch.weight is None else batch.weight.sum()
            return torch.ones(self._num_losses, device=self._device) * total
        return (weights if batch.weight is None else weights * batch.weight[:, None]).sum(0)

    def _global_weights(self, batch: Batch, global_rows: int) -> torch.Tensor:
        """The weights that divide this step's losses; without row weights they are known from the plan."""
        if batch.weight is None and self._parts.criterion.row_weights(batch.labels) is None:
            return torch.full((self._num_losses,), float(global_rows), device=self._device)
        total = self._collective.all_reduce(self._weights(batch))
        # All rows of the batch may weigh nothing: then every loss is zero, and must not become NaN.
        return torch.where(total > 0, total, torch.ones_like(total))

    def _validate(self, epoch: int, reader: ShardReader) -> dict[str, float]:
        """Losses and metrics over the validation rows, each counted once. Runs on every rank."""
        self._status.phase = f"validation after epoch {epoch + 1}"
        totals = Totals(self._num_losses, self._device)
        self._module.eval()
        with torch.no_grad():
            for columns in reader.batches(0):
                self._status.tick()
                batch = self._batch(columns)
                if not batch.num_rows:
                    # The others may need this rank's parts of the weights.
                    with backward_errors():
                        self._sync.forward_without_rows(batch.inputs)
                    continue
                self._losses(self._module, batch, "validation")
                self._count(totals)
        return self._values("validation", totals)

    def _values(self, split: str, totals: Totals) -> dict[str, float]:
        """The epoch's numbers of one split, by their names in the history. Runs on every rank."""
        means = totals.means(self._collective)
        labels = self._config.label_columns
        values = {f"{split}_loss": sum(w * m for w, m in zip(self._config.loss_weights, means, strict=True))}
        if len(labels) > 1:
            values |= {f"{split}_loss_{label}": mean for label, mean in zip(labels, means, strict=True)}
        if split not in self._splits_with_metrics:
            return values
        for label, metric_set in zip(labels, self._parts.metrics, strict=True):
            suffix = f"_{label}" if len(labels) > 1 else ""
            for name, value in metric_set.compute(self._collective).items():
                values[f"{split}_{name}{suffix}"] = value
            metric_set.reset()
        return values

    def _batch(self, columns: dict[str, Array]) -> Batch:
        config = self._config
        return to_batch(
            columns, config.input_columns, config.label_columns, config.weight_column, self._device
        )
