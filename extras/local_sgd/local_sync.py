"""What all ways of local training share: own steps, a count of them, the synchronous steps before.

A rank differentiates the loss of its own rows over the rows of the whole batch, times the number of ranks.
So the average of the ranks' gradients is that of the synchronous step, also where shares are uneven. A rank
without rows in a step takes it with gradients of zero for the parameters that had one before: what momentum
and weight decay do goes on, as the average of the ranks needs it.

Invariant: all ranks take the same number of steps, so they meet without asking each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.options.sync import LocalTraining
from ringspark.estimators.parallel.base import PlainSync, Scaler, follow
from ringspark.estimators.parallel.data.data_parallel import synchronize
from ringspark.estimators.parallel.data.gradient_sum import SummedGradients
from ringspark.extras.local_sgd.flat_weights import FlatWeights
from ringspark.extras.local_sgd.rank_optimizer import load_tensors, state_tensors
from ringspark.extras.local_sgd.statistics import Statistics


class LocalSync(PlainSync):
    """Lets a rank step on its own; a subclass says what happens after a step and at an epoch's end.

    Attributes:
        shown: Whether the network holds what the ranks found together, not the rank's own weights, which
            come back before the next step.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        settings: LocalTraining,
    ) -> None:
        """Stands before the first step; all ranks hold equal weights.

        Args:
            settings: The options of the local training.
        """
        super().__init__(module, optimizer)
        self.ranks_differ = True
        self._collective = collective
        collective.operations.in_every_step = False
        # A text stands for periods that no number of steps ends.
        self._period: int | None = settings.steps if isinstance(settings.steps, int) else None
        self._after: int = settings.after
        self._synchronous = synchronize(module, optimizer, collective) if self._after else None
        held = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        self._trained = [p for p in module.parameters() if p in held]
        self._weights = FlatWeights(self._trained)
        self._moved: list[torch.Tensor] = []  # had a gradient in the last step with rows
        self._steps = 0
        self._position = 0  # local steps since the last meeting
        self._own: torch.Tensor | None = None
        self._equal: torch.Tensor | None = None  # weights that all ranks share, until the next local step
        self._begin_phase()

    @property
    def shown(self) -> bool:
        return self._own is not None

    def _begin_phase(self) -> None:
        """Makes the steps from now on synchronous or local, by their number."""
        self._is_local = self._steps >= self._after
        self.loss_factor = float(self._collective.size) if self._is_local else 1.0
        if self._is_local:
            if isinstance(self._synchronous, SummedGradients):
                self._synchronous.remove_hooks()
            self._synchronous = None
            self._statistics = Statistics(self.network, self._collective)
            self._begin_local()
            self._equal = self._weights.read()

    def _begin_local(self) -> None:
        """Notes the weights from which the ranks part."""

    def _after_step(self) -> None:
        """Ends a local step; `_position` counts it."""
        raise NotImplementedError

    def _end_epoch(self) -> None:
        """Makes the weights of the networks equal."""
        raise NotImplementedError

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        self._take_own()
        if self._synchronous is not None:
            return self._synchronous.micro_batch(last)
        return super().micro_batch(last)

    def backward_without_rows(self, inputs: Sequence[torch.Tensor] = ()) -> None:
        self._take_own()
        if self._is_local:
            for parameter in self._moved:
                parameter.grad = torch.zeros_like(parameter)

    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        if self._synchronous is not None:
            self._synchronous.reduce()
        self._moved = [p for p in self._trained if p.grad is not None]

    def step(self, scaler: Scaler) -> None:
        super().step(scaler)
        self._steps += 1
        if self._is_local:
            self._position += 1
            self._after_step()
        elif self._steps == self._after:
            self._begin_phase()

    def settle(self) -> None:
        if self._is_local and not self.shown:
            self._end_epoch()
            self._equal = self._weights.read()

    def _show(self, values: torch.Tensor) -> None:
        """Has the network hold `values` until the next step."""
        self._own = self._weights.read()
        self._weights.write(values)

    def _follow(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Applies the change that callbacks made to the shared weights to this rank's other vectors."""
        if self._own is not None:
            self._own = follow(self._own, before, after)

    def _follow_callbacks(self) -> None:
        if self._equal is not None:
            present = self._weights.read()
            if not present.equal(self._equal):
                self._follow(self._equal, present)
                self._equal = present

    def _take_own(self) -> None:
        self._follow_callbacks()
        self._equal = None
        if self._own is not None:
            self._weights.write(self._own)
            self._own = None

    # ------------------------------------------------------------------ checkpoints

    def _shared_state(self) -> dict[str, torch.Tensor]:
        """Returns what is equal on all ranks, beside the steps; rank 0 saves it."""
        return {}

    def _load_shared(self, state: Mapping[str, torch.Tensor], *, is_same: bool) -> None:
        """Restores `_shared_state`."""

    def _weights_of_others(self, ranks: Iterable[torch.Tensor]) -> torch.Tensor:
        """Returns the average of the ranks' own weights, from which another number of ranks resumes.

        Args:
            ranks: Read one at a time; each may be changed.
        """
        rest, count = iter(ranks), 1
        total = next(rest)
        for own in rest:
            total += own
            count += 1
        return total / count

    def rank_state(self) -> dict[str, torch.Tensor]:
        state = {"steps": torch.tensor([self._steps, self._position])}
        if not self._is_local:
            return state
        self._follow_callbacks()
        if self._collective.rank == 0:
            state |= {f"shared/{k}": v.to("cpu", copy=True) for k, v in self._shared_state().items()}
        moved = set(self._moved)
        state["moved"] = torch.tensor([p in moved for p in self._trained], dtype=torch.uint8)
        own = self._own if self._own is not None else self._weights.read()
        state["shown" if self.shown else "weights"] = own.to("cpu", copy=True)
        # What rank 0 has of these is in the checkpoint's own files.
        if self._collective.rank:
            state |= state_tensors(self.network, self.optimizer)
        return state

    def load_rank_states(self, states: Sequence[Mapping[str, torch.Tensor]], *, is_same: bool) -> None:
        first = states[0]
        if "steps" not in first:
            self._begin_phase()
            return
        self._steps, position = first["steps"].tolist()
        self._begin_phase()
        self._position = position
        if not self._is_local or not ("weights" in first or "shown" in first):
            return
        own = states[self._collective.rank] if is_same else first
        flags = own["moved"].tolist()
        self._moved = [p for p, moved in zip(self._trained, flags, strict=True) if moved]
        device = self._trained[0].device
        self._load_shared(
            {k.removeprefix("shared/"): first[k].to(device) for k in first if k.startswith("shared/")},
            is_same=is_same,
        )
        self._own = self._equal = None
        if is_same:
            load_tensors(self.network, self.optimizer, own)
        if "shown" in first:
            # The network has what the ranks found together, from where another number of ranks goes on.
            self._own = own["shown"].to(device, copy=True) if is_same else None
        elif is_same:
            self._weights.write(own["weights"].to(device))
        else:
            weights = (state["weights"].to(device, copy=True) for state in states)
            self._weights.write(self._weights_of_others(weights))
