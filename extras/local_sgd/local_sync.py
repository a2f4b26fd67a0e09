"""Base of local training: optional synchronous steps, then local steps.

In local steps, a rank's loss is the sum over its rows, divided by the rows of the whole batch and multiplied
by the number of ranks. The average of the ranks' gradients is therefore the gradient of a synchronous step,
even if ranks have different numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.options.sync import LocalTraining
from ringspark.estimators.parallel.base import (
    GradientSync,
    MakeOptimizer,
    Scaler,
    SyncSettings,
    apply_change,
    share_weights,
)
from ringspark.estimators.parallel.data.gradient_all_reduce import GradientAllReduce, synchronize
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.extras.local_sgd.flat_weights import FlatWeights
from ringspark.extras.local_sgd.rank_optimizer import load_tensors, state_tensors


class Statistics:
    """Averages floating-point buffers over the ranks, such as running statistics of batch normalization.

    A buffer is averaged only if some rank has changed the buffer since the last call. The rounding of an
    average could change a constant buffer, such as a mask.
    """

    def __init__(self, network: nn.Module, collective: Collective) -> None:
        self._network = network
        self._collective = collective
        saved = network.state_dict().keys()
        self._seen = {
            name: buffer.detach().clone()
            for name, buffer in network.named_buffers()
            if name in saved and buffer.is_floating_point()
        }

    @torch.no_grad()
    def average(self) -> None:
        """Averages the buffers. Runs on every rank."""
        if not self._seen:
            return
        buffers = dict(self._network.named_buffers())
        own = [buffers.get(name) for name in self._seen]
        first = next(iter(self._seen.values()))
        is_double = any(seen.dtype == torch.float64 for seen in self._seen.values())
        dtype = torch.float64 if is_double else torch.float32
        values, fits, changed = [], [], []
        for seen, buffer in zip(self._seen.values(), own, strict=True):
            # Every rank sends as much, whatever shapes its buffers have by now.
            has_shape = buffer is not None and buffer.shape == seen.shape
            is_other = has_shape and buffer is not None and not torch.equal(buffer, seen)
            source = buffer if has_shape and buffer is not None else torch.zeros_like(seen)
            values.append(source.detach().reshape(-1).to(dtype))
            fits.append(float(has_shape))
            changed.append(float(is_other))
        flags = torch.tensor([*fits, *changed], dtype=dtype, device=first.device)
        flat = torch.cat([*values, flags])
        self._collective.start_sum(flat, "local.buffers")()
        sizes = [seen.numel() for seen in self._seen.values()]
        *sums, flags = torch.split(flat, [*sizes, len(flags)])
        everywhere, anywhere = flags.view(2, -1).tolist()
        for index, (name, buffer) in enumerate(zip(self._seen, own, strict=True)):
            if buffer is None or everywhere[index] != self._collective.size or not anywhere[index]:
                continue
            buffer.copy_((sums[index] / self._collective.size).view(buffer.shape))
            self._seen[name] = buffer.detach().clone()


class LocalSync(GradientSync):
    """Base class; subclasses implement what happens after a local step and at the end of an epoch."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        collective: Collective,
        settings: LocalTraining,
    ) -> None:
        super().__init__(module, optimizer)
        self.ranks_differ = True
        self._collective = collective
        collective.operations.in_every_step = False
        # A text names a period that does not end after a number of steps.
        self._period: int | None = settings.steps if isinstance(settings.steps, int) else None
        self._after: int = settings.after
        self._synchronous = synchronize(module, optimizer, collective) if self._after else None
        held = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        self._trained = [p for p in module.parameters() if p in held]
        self._weights = FlatWeights(self._trained)
        self._moved: list[torch.Tensor] = []  # parameters with a gradient in the last step with rows
        self._steps = 0
        self._position = 0  # local steps since the last synchronization
        self._own: torch.Tensor | None = None
        self._equal: torch.Tensor | None = None  # weights that all ranks share, until the next local step
        self._begin_phase()

    @classmethod
    def prepare(
        cls, module: nn.Module, make_optimizer: MakeOptimizer, mesh: RankMesh, settings: SyncSettings
    ) -> GradientSync:
        assert isinstance(settings.sync, LocalTraining)
        share_weights(module, mesh)
        return cls(module, make_optimizer(module), mesh.gradients, settings.sync)

    @property
    def shown(self) -> bool:
        return self._own is not None

    def _begin_phase(self) -> None:
        self._is_local = self._steps >= self._after
        self.loss_factor = float(self._collective.size) if self._is_local else 1.0
        if self._is_local:
            if isinstance(self._synchronous, GradientAllReduce):
                self._synchronous.remove_hooks()
            self._synchronous = None
            self._statistics = Statistics(self.network, self._collective)
            self._begin_local()
            self._equal = self._weights.read()

    def _begin_local(self) -> None:
        """Stores the weights, which are equal on all ranks, before the first local step."""

    def _after_step(self) -> None:
        """Runs after a local step; `_position` already counts the step."""
        raise NotImplementedError

    def _end_epoch(self) -> None:
        """Makes the networks' weights equal on all ranks."""
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
        """Sets the network's weights to `values` until the next step.

        The next step continues from the rank's own weights.
        """
        self._own = self._weights.read()
        self._weights.write(values)

    def _apply_change(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Applies a callback's change of the network's weights to this rank's other copies of the weights."""
        if self._own is not None:
            self._own = apply_change(self._own, before, after)

    def _apply_callbacks(self) -> None:
        if self._equal is not None:
            present = self._weights.read()
            if not present.equal(self._equal):
                self._apply_change(self._equal, present)
                self._equal = present

    def _take_own(self) -> None:
        self._apply_callbacks()
        self._equal = None
        if self._own is not None:
            self._weights.write(self._own)
            self._own = None

    # ------------------------------------------------------------------ checkpoints

    def _shared_state(self) -> dict[str, torch.Tensor]:
        """Returns the state that is equal on all ranks; rank 0 saves it."""
        return {}

    def _load_shared(self, state: Mapping[str, torch.Tensor], *, is_same: bool) -> None:
        """Restores the result of `_shared_state`; `is_same` says whether the rank count is unchanged."""

    def _average_weights(self, ranks: Iterable[torch.Tensor]) -> torch.Tensor:
        """Returns the average of the ranks' weights; a resume with another number of ranks starts from it."""
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
        self._apply_callbacks()
        if self._collective.rank == 0:
            state |= {f"shared/{k}": v.to("cpu", copy=True) for k, v in self._shared_state().items()}
        moved = set(self._moved)
        state["moved"] = torch.tensor([p in moved for p in self._trained], dtype=torch.uint8)
        own = self._own if self._own is not None else self._weights.read()
        state["shown" if self.shown else "weights"] = own.to("cpu", copy=True)
        # The checkpoint's own files have rank 0's.
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
            # The network has the common weights, from which another number of ranks resumes.
            self._own = own["shown"].to(device, copy=True) if is_same else None
        elif is_same:
            self._weights.write(own["weights"].to(device))
        else:
            weights = (state["weights"].to(device, copy=True) for state in states)
            self._weights.write(self._average_weights(weights))
