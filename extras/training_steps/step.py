"""One step of a training on one rank, as the setting `trainingStep` gets it.

Each rank has a share of every loss: the sum of the shares over all ranks is the loss of the global batch. The
gradients of the shares are summed over the ranks, so the optimizers see the gradient of the whole loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from ringspark.estimators.training.feed import Batch
from ringspark.extras.training_steps.engine import Engine
from ringspark.extras.training_steps.gathering import StepRows
from ringspark.models.reports import Reports

# Name of the loss among the logged values.
LOSS = ""


class Step:
    """The rows of one step, and the operations that need other ranks.

    A rank without rows gets one placeholder row: a copy of an earlier row, or random numbers. `mean` and
    `gather` leave it out. Every rank makes the same calls of `gather` and `minimize`, in the same order.

    Attributes:
        module: The network.
        inputs: One tensor per input column, each (rows, ...).
        labels: One tensor per label column, each (rows, ...).
        weight: The weight column, (rows,); None without one.
        optimizers: The optimizers by name. A single optimizer has the name "".
        generator: Random number generator that is equal on all ranks, and depends only on seed and step.
        epoch: Epoch, from 1.
        number: Step within the epoch, from 0.
        is_training: Whether `minimize` takes steps; False for held-out rows.
        reports: Losses and counts that layers report, see `models.reports`.
        engine: The optimizers' gradients and steps; None for held-out rows.
        total_rows: Number of rows of all ranks.
        positions: Positions of the rows among the rows of all ranks, (rows,), as in the result of `gather`.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        batch: Batch,
        optimizers: Mapping[str, torch.optim.Optimizer],
        rows: StepRows,
        num_rows: int,
        divisor: torch.Tensor | float,
        seed: int,
        epoch: int,
        engine: Engine | None,
        log: Callable[[str, torch.Tensor, torch.Tensor | float], None],
    ) -> None:
        self.module = module
        self.inputs, self.labels, self.weight = batch.inputs, batch.labels, batch.weight
        self.optimizers, self.epoch, self.number = dict(optimizers), epoch, rows.step
        self.engine, self.is_training = engine, engine is not None
        self.generator = torch.Generator().manual_seed(seed)
        self.total_rows = rows.total
        self.num_own = num_rows
        self.reports = Reports()
        self._rows, self._divisor, self._log = rows, divisor, log

    @property
    def num_rows(self) -> int:
        """Number of rows of `labels` on this rank, at least 1."""
        return len(self.labels[0])

    @property
    def positions(self) -> torch.Tensor:
        return self._rows.own if self.num_own else torch.zeros(1, dtype=torch.int64, device=self._device)

    @property
    def share(self) -> torch.Tensor | float:
        """Weight of this rank's rows, divided by the weight of all ranks' rows."""
        own = self.num_own if self.weight is None else self.weight[: self.num_own].sum()
        return own / self._divisor

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of the mean of `values`, (rows,), over the rows of all ranks.

        The mean is weighted by the weight column.
        """
        if values.shape != (self.num_rows,):
            raise ValueError(
                f"step.mean needs one value per row, shape ({self.num_rows},), got {tuple(values.shape)}; "
                "reduce the other dimensions first, for example by values.flatten(1).mean(1)"
            )
        own = values[: self.num_own].float()
        if self.weight is not None:
            own = own * self.weight[: self.num_own]
        return own.sum() / self._divisor

    def whole(self, value: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of a value that all ranks compute equally, as from gathered rows."""
        return value / self._rows.collective.size

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all ranks, (total_rows, ...). Runs on every rank.

        The order does not depend on the number of ranks. The gradient of a row is the sum over all ranks.
        """
        if not rows.dim() or len(rows) != self.num_rows:
            raise ValueError(
                f"step.gather needs one entry per row, shape ({self.num_rows}, ...), got {tuple(rows.shape)}"
                "; give it a result of the network for step.inputs"
            )
        return self._rows.gather(rows[: self.num_own])

    def randn(self, *shape: int) -> torch.Tensor:
        """Returns normal random numbers, (rows, *shape). Runs on every rank.

        A row gets the same numbers for any number of ranks.
        """
        return self._own(torch.randn(self.total_rows, *shape, generator=self.generator))

    def rand(self, *shape: int) -> torch.Tensor:
        """Returns random numbers from 0 to 1, otherwise like `randn`."""
        return self._own(torch.rand(self.total_rows, *shape, generator=self.generator))

    def minimize(self, loss: torch.Tensor, name: str = "", *, retain_graph: bool = False) -> None:
        """Takes a step of one optimizer. Runs on every rank.

        Computes the gradients of the optimizer's parameters, sums them over the ranks, clips them to
        `maxGradNorm` and steps. Other parameters keep their gradients. On held-out rows it only records the
        loss.

        With one optimizer, it adds the losses that layers of the network report by `add_loss`.

        Args:
            loss: This rank's share of the loss: a sum of results of `mean` and `whole`.
            name: Name of the optimizer; not needed if there is only one.
            retain_graph: Whether another loss will be differentiated through the same graph.
        """
        if name not in self.optimizers:
            raise ValueError(f"step.minimize got optimizer {name!r}; give one of {list(self.optimizers)}")
        if loss.dim():
            raise ValueError(
                f"step.minimize needs a loss without dimensions, got {tuple(loss.shape)}; use step.mean"
            )
        self.record_loss(loss)
        if self.reports.losses and len(self.optimizers) == 1:
            loss = loss + self.mean(torch.stack([rows.float() for rows in self.reports.losses]).sum(0))
            self.reports.losses.clear()
        if self.engine is not None:
            self.engine.zero_grad(name)
            self.engine.backward(loss, name, retain_graph=retain_graph)
            self.engine.step(name)

    def record_loss(self, loss: torch.Tensor) -> None:
        """Adds this rank's share of a loss to the loss in the history; `minimize` calls it."""
        self._log(LOSS, loss.detach(), self._divisor)

    def log(self, name: str, value: torch.Tensor | float) -> None:
        """Adds a value to the history, as the epoch's mean over rows, called train_<name>.

        `value` has one number per row, or it is this rank's share of the whole value, such as a result of
        `mean`. A Python number is the whole value and equal on all ranks.
        """
        if name in ("", "loss"):
            raise ValueError(
                f"step.log got the name {name!r}, but the history has the sum of the minimized losses under "
                "'loss'; give another name"
            )
        if not isinstance(value, torch.Tensor):
            value = self.whole(torch.tensor(float(value), device=self._device))
        value = value.detach()
        self._log(name, self.mean(value) if value.dim() else value, self._divisor)

    @property
    def _device(self) -> torch.device:
        return self.labels[0].device

    def _own(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._device)[self.positions]
