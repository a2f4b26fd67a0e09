"""The training loop of one rank.

Invariant: every rank takes the same number of steps and makes the same collective calls, whatever
rows it holds. The gradient of a step is the mean over the GLOBAL batch: each rank differentiates
its rows' loss divided by the global weight, and the ranks' gradients are summed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ringspark.estimators.collectives import Collective, GradientSync
from ringspark.estimators.collectives.base import backward_errors
from ringspark.estimators.training.config import TrainConfig
from ringspark.estimators.training.feed import Array, Batch, to_batch
from ringspark.estimators.training.history import EpochRecord, Progress, RunLog
from ringspark.estimators.training.losses import RowLoss
from ringspark.estimators.training.precision import autocast, loss_scaler
from ringspark.estimators.training.schedules import Schedule
from ringspark.estimators.training.status import Status
from ringspark.pipelines.readers import ShardReader


@dataclass
class Totals:
    """Sums over rows, kept on the device until the epoch ends: no synchronisation per batch."""

    loss: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def zero(cls, device: torch.device) -> Totals:
        # float64, so that the mean over many millions of rows stays exact to the printed digits.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return cls(torch.zeros((), dtype=dtype, device=device), torch.zeros((), dtype=dtype, device=device))

    def add(self, loss: torch.Tensor, weight: torch.Tensor) -> None:
        self.loss += loss.detach()
        self.weight += weight

    def mean(self, collective: Collective) -> float:
        """The mean loss over all ranks."""
        loss, weight = collective.all_reduce(torch.stack([self.loss, self.weight]).cpu()).tolist()
        return loss / weight if weight else 0.0


class Trainer:
    """Trains one module on one rank's shards of every global batch."""

    def __init__(
        self,
        config: TrainConfig,
        collective: Collective,
        module: nn.Module,
        sync: GradientSync,
        loss: RowLoss,
        schedule: Schedule,
        device: torch.device,
        log: RunLog,
        status: Status,
    ) -> None:
        self._config = config
        self._collective = collective
        self._module = module
        self._sync = sync
        self._loss = loss
        self._schedule = schedule
        self._device = device
        self._log = log
        self._status = status
        self._scaler = loss_scaler(config.precision, device)
        self._base_rates = [group["lr"] for group in sync.optimizer.param_groups]

    def fit(self, train: ShardReader, validation: ShardReader | None) -> None:
        """Runs all epochs. Runs on every rank."""
        start = time.monotonic()
        for epoch in range(self._config.epochs):
            epoch_start = time.monotonic()
            train_loss = self._train_epoch(epoch, train, start)
            # Every rank sees the same mean, so all of them stop here together.
            if not np.isfinite(train_loss):
                raise FloatingPointError(
                    f"the training loss is {train_loss} after epoch {epoch + 1}; "
                    "lower learningRate, set maxGradNorm, or scale the features"
                )
            validation_loss = None
            if validation is not None:
                validation_loss = self._validate(epoch, validation)
            self._log.epoch(
                EpochRecord(
                    epoch=epoch + 1,
                    steps=train.num_steps,
                    rows=train.manifest.num_rows,
                    seconds=time.monotonic() - epoch_start,
                    learning_rate=self._sync.optimizer.param_groups[0]["lr"],
                    train_loss=train_loss,
                    validation_loss=validation_loss,
                )
            )

    def _train_epoch(self, epoch: int, reader: ShardReader, start: float) -> float:
        totals = Totals.zero(self._device)
        num_steps = self._config.epochs * reader.num_steps
        plan = reader.plan(epoch)
        rows = epoch * reader.manifest.num_rows
        self._sync.module.train()
        for step, columns in enumerate(reader.batches(epoch)):
            self._status.phase = f"training, epoch {epoch + 1}, step {step + 1}"
            done = epoch * reader.num_steps + step
            self._set_rates(done, num_steps)
            global_rows = plan.global_rows(step)
            self._train_step(self._batch(columns), global_rows, totals)
            rows += global_rows
            self._log.progress(
                Progress(
                    epoch=epoch + 1,
                    epochs=self._config.epochs,
                    step=done + 1,
                    num_steps=num_steps,
                    rows=rows,
                    seconds=time.monotonic() - start,
                )
            )
        self._status.phase = f"training, end of epoch {epoch + 1}"
        return totals.mean(self._collective)

    def _train_step(self, batch: Batch, global_rows: int, totals: Totals) -> None:
        # A set gradient would be added to: set_to_none is left out, Horovod's zero_grad lacks it.
        self._sync.optimizer.zero_grad()
        weight = self._global_weight(batch, global_rows)
        if batch.num_rows:
            micro_batches = batch.split(self._config.gradient_accumulation)
            for i, micro_batch in enumerate(micro_batches):
                with self._sync.micro_batch(last=i == len(micro_batches) - 1):
                    self._backward(micro_batch, weight, totals)
        elif self._sync.needs_backward:
            self._empty_backward(batch)
        with backward_errors():
            self._sync.reduce()
        if self._config.max_grad_norm is not None:
            self._scaler.unscale_(self._sync.optimizer)
            # Of the parameters that are trained: others may keep gradients, which differ by rank.
            trained = [p for group in self._sync.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(trained, self._config.max_grad_norm)
        self._sync.step(self._scaler)
        self._scaler.update()

    def _backward(self, batch: Batch, global_weight: torch.Tensor, totals: Totals) -> None:
        loss, weight = self._weighted_loss(self._sync.module, batch)
        scaled = self._scaler.scale(loss / global_weight * self._sync.loss_factor)
        with backward_errors():
            scaled.backward()  # type: ignore[no-untyped-call]
        totals.add(loss, weight)

    def _empty_backward(self, batch: Batch) -> None:
        """A backward pass whose gradients are zero, for a rank without rows in this step.

        The forward pass, one row of zeros in eval mode, only arms the reducer: running statistics and
        random numbers stay untouched, and what the network makes of zeros (a logarithm, an infinity)
        takes no part. Every parameter gets its zero, also one that evaluation does not use.
        """
        inputs = tuple(t.new_zeros((1, *t.shape[1:])) for t in batch.inputs)
        self._sync.module.eval()
        with autocast(self._config.precision, self._device):
            self._sync.module(*inputs)
        zero = torch.stack([(p * 0.0).sum() for p in self._module.parameters() if p.requires_grad]).sum()
        with backward_errors():
            zero.backward()  # type: ignore[no-untyped-call]
        self._sync.module.train()

    def _weighted_loss(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the rows' weighted losses, and of their weights."""
        with autocast(self._config.precision, self._device):
            output = module(*batch.inputs)
        # fp32 outside autocast: a mean over many rows would lose digits in 16 bits.
        rows = self._loss(output.float(), batch.label)
        if batch.weight is None:
            return rows.sum(), torch.tensor(float(batch.num_rows), device=self._device)
        return (rows * batch.weight).sum(), batch.weight.sum()

    def _global_weight(self, batch: Batch, global_rows: int) -> torch.Tensor:
        """The weight that divides this step's losses; without weights it is known from the plan."""
        if batch.weight is None:
            return torch.tensor(float(global_rows), device=self._device)
        total = self._collective.all_reduce(batch.weight.sum().reshape(1))[0]
        # All rows of the batch may weigh nothing: then every loss is zero, and must not become NaN.
        return torch.where(total > 0, total, torch.ones_like(total))

    def _validate(self, epoch: int, reader: ShardReader) -> float:
        """Mean loss over the validation rows, each counted once. Runs on every rank."""
        self._status.phase = f"validation after epoch {epoch + 1}"
        totals = Totals.zero(self._device)
        self._module.eval()
        with torch.no_grad():
            for columns in self._with_rows(reader.batches(0)):
                totals.add(*self._weighted_loss(self._module, self._batch(columns)))
        return totals.mean(self._collective)

    def _with_rows(self, batches: Iterable[dict[str, Array]]) -> Iterable[dict[str, Array]]:
        return (columns for columns in batches if len(columns[self._config.label_column]))

    def _batch(self, columns: dict[str, Array]) -> Batch:
        config = self._config
        return to_batch(
            columns, config.input_columns, config.label_column, config.weight_column, self._device
        )

    def _set_rates(self, step: int, num_steps: int) -> None:
        factor = self._schedule(step, num_steps)
        for group, rate in zip(self._sync.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor
