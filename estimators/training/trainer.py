"""The training loop of one rank.

Invariant: every rank takes the same number of steps and makes the same collective calls, whatever
rows it holds. The gradient of a step is the mean over the GLOBAL batch: each rank differentiates
its rows' loss divided by the global weight, and the ranks' gradients are summed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ringspark.estimators.collectives import Collective, GradientSync
from ringspark.estimators.collectives.base import backward_errors
from ringspark.estimators.training.callbacks import Callbacks, TrainingState
from ringspark.estimators.training.config import TrainConfig
from ringspark.estimators.training.criterion import Criterion
from ringspark.estimators.training.feed import Array, Batch, to_batch
from ringspark.estimators.training.history import EpochRecord, Progress, RunLog
from ringspark.estimators.training.metric_set import MetricSet
from ringspark.estimators.training.outputs import as_outputs
from ringspark.estimators.training.precision import LossScaler, autocast
from ringspark.estimators.training.saved_tensors import saved_tensor_hooks
from ringspark.estimators.training.schedules import Rates
from ringspark.estimators.training.status import Status
from ringspark.estimators.training.totals import Totals
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
        self, config: TrainConfig, collective: Collective, parts: Parts, log: RunLog, status: Status
    ) -> None:
        self._config = config
        self._collective = collective
        self._parts = parts
        self._module, self._sync, self._device = parts.module, parts.sync, parts.device
        self._log = log
        self._status = status
        # Ranks with parts of the gradients must agree on overflows; with all of them, they see the same.
        combine = partial(collective.all_reduce, op="max") if config.sharding != "none" else None
        self._scaler = LossScaler(config.precision, parts.device, combine)
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
        """Runs all epochs, or fewer where a callback stops them. Runs on every rank."""
        start = time.monotonic()
        self._state.num_steps = self._config.epochs * train.num_steps
        self._rates = self._parts.make_rates(self._state.num_steps)
        self._call("on_train_start")
        for epoch in range(self._config.epochs):
            epoch_start, skipped_before = time.monotonic(), self._scaler.skipped_steps
            self._state.epoch = epoch + 1
            values = self._train_epoch(epoch, train, start)
            # Every rank sees the same mean, so all of them stop here together.
            if not np.isfinite(values["train_loss"]):
                raise FloatingPointError(
                    f"the training loss is {values['train_loss']} after epoch {epoch + 1}; "
                    f"lower learningRate, set maxGradNorm, or scale the features{self._scaler.advice}"
                )
            if validation is not None:
                values |= self._validate(epoch, validation)
            self._log.epoch(
                EpochRecord(
                    epoch=epoch + 1,
                    steps=train.num_steps,
                    rows=train.manifest.num_rows,
                    seconds=time.monotonic() - epoch_start,
                    learning_rate=self._sync.optimizer.param_groups[0]["lr"],
                    train_loss=values.pop("train_loss"),
                    validation_loss=values.pop("validation_loss", None),
                    skipped_steps=self._scaler.skipped_steps - skipped_before,
                    metrics=values,
                )
            )
            self._call("on_epoch_end")
            if self._all_stop():
                break
        self._scaler.check_trained(self._state.step)
        self._call("on_train_end")

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

    def _train_epoch(self, epoch: int, reader: ShardReader, start: float) -> dict[str, float]:
        totals = Totals(self._num_losses, self._device)
        plan = reader.plan(epoch)
        rows = epoch * reader.manifest.num_rows
        self._sync.module.train()
        for step, columns in enumerate(reader.batches(epoch)):
            self._status.phase = f"training, epoch {epoch + 1}, step {step + 1}"
            self._rates.set(self._state.step)
            global_rows = plan.global_rows(step)
            self._train_step(self._batch(columns), global_rows, totals)
            rows += global_rows
            self._state.step += 1
            if self._parts.callbacks.has_step_end:
                self._call("on_step_end")
            self._log.progress(
                Progress(
                    epoch=epoch + 1,
                    epochs=self._config.epochs,
                    step=self._state.step,
                    num_steps=self._state.num_steps,
                    rows=rows,
                    seconds=time.monotonic() - start,
                )
            )
        self._status.phase = f"training, end of epoch {epoch + 1}"
        return self._values("train", totals)

    def _train_step(self, batch: Batch, global_rows: int, totals: Totals) -> None:
        # A set gradient would be added to: set_to_none is left out, Horovod's zero_grad lacks it.
        self._sync.optimizer.zero_grad()
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
            self._scaler.unscale(self._sync.optimizer)
            self._sync.clip_gradients(self._config.max_grad_norm)
        self._sync.step(self._scaler)
        self._scaler.update()
        self._count(totals, finite_only=self._scaler.skipped)

    def _backward(self, batch: Batch, global_weights: torch.Tensor) -> None:
        losses = self._losses(self._sync.module, batch, "train")
        loss = self._parts.criterion.total(losses / global_weights)
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
