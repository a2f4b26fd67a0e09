"""The interface between the trainer and a parallelization strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.exchange import Exchange
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.optimizer_state import OptimizerState, load_by_name, state_by_name

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Scaler(Protocol):
    """Decides whether the optimizer takes a step: `LossScaler`, or torch's GradScaler."""

    def step(self, optimizer: torch.optim.Optimizer) -> object:
        """Lets the optimizer take its step, unless its gradients overflowed."""


def refuse_sparse(name: str, gradient: torch.Tensor) -> None:
    """Refuses a gradient that the ranks cannot exchange; no hook can make it dense, autograd forbids that.

    Raises:
        ValueError: The gradient of parameter `name` is sparse.
    """
    if gradient.is_sparse:
        raise ValueError(
            f"parameter {name!r} got a sparse gradient, and ranks would wait for one without rows; leave "
            "sparse=True out where the model's forward looks it up, or set numWorkers=1"
        )


def held_values(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns dense gradients as they are, and of sparse ones the values of their rows, each row once.

    They are in the gradients' own memory, except for a sparse one that was not coalesced.
    """
    return [g.coalesce().values() if g.is_sparse else g for g in gradients]


def follow(own: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Applies a callback's change of weights, from `before` to `after`, to `own`; returns the result.

    Adds the difference. Without rounding errors in two cases: an element that equals `before` becomes exactly
    `after`, and an element that the callback did not change stays exactly as it is.
    """
    before, after = before.to(own), after.to(own)
    moved = torch.where(own == before, after, own + (after - before))
    return torch.where(after == before, own, moved)


class GradientSync(Protocol):
    """Keeps one module and its optimizer equal on all ranks.

    Each rank differentiates its share of the global batch's mean loss, times `loss_factor`. After `reduce`,
    the optimizer of a rank sees gradients of the whole mean: all of them, or the part that a sharding leaves
    to the rank. A parameter that got a gradient on no rank keeps None, as it would on one rank, so that no
    optimizer decays or moves it. `.grad` may be the same memory in every step: who keeps it clones it.

    Attributes:
        module: The module to call in training, in the wrapper that the exchange needs.
        network: The module without that wrapper; its names are those of the state dict.
        loss_factor: What the loss of a rank is multiplied by before it is differentiated.
        ranks_differ: Whether the ranks step on different gradients, so that they must agree on overflows.
        in_step: Whether the ranks take each step together. If not, what a step needs of all ranks, such as
            the weight of all rows, is taken from this rank's own, and each rank has weights of its own
            between two calls of `settle`.
        progress: Called while this rank waits by design for steps of others, with each such step.
        local_square: After `reduce`, the squared 2-norm of this rank's gradients before the ranks summed
            them, on the device; None where `Exchange.noise_scale` does not ask for it, or nobody knows.
    """

    module: nn.Module
    network: nn.Module
    optimizer: torch.optim.Optimizer
    loss_factor: float
    ranks_differ: bool
    in_step: bool
    progress: Callable[[], None]
    local_square: torch.Tensor | None

    def backward_without_rows(self, inputs: Sequence[torch.Tensor] = ()) -> None:
        """Takes part in the exchange of a step in which this rank has no rows.

        Args:
            inputs: Arguments of `module` with zero rows, which show the shapes and dtypes.
        """

    def forward_without_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        """Takes part in an evaluation of `network` on a batch in which this rank has no rows."""

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Returns a context for the forward and backward pass of one micro-batch.

        Only the last one communicates, unless the rank may hold no more than its part of the gradients.
        """

    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        """Waits until the gradients of this step are summed over all ranks.

        Args:
            scale: Returns the factor that the gradients have from fp16's loss scale; it waits for the device.
        """

    def clip_gradients(self, max_norm: float) -> None:
        """Scales reduced gradients so that the 2-norm of all of them together is at most `max_norm`."""

    def step(self, scaler: Scaler) -> None:
        """Takes the optimizer step on reduced gradients."""

    def settle(self) -> None:
        """Ends what the ranks have under way, so that their weights are equal. Runs on every rank.

        The trainer calls it after the last step of an epoch, before anybody validates or saves the network.
        """

    def optimizer_state(self) -> OptimizerState:
        """Returns the optimizer state by parameter name, complete on rank 0. Runs on every rank."""

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Loads this rank's part of a whole optimizer state, saved by any number of ranks and sharding."""

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Returns copies of what this rank alone knows, such as residuals, on the CPU. Runs on every rank.

        A checkpoint asks for it first, before the weights and `optimizer_state`.
        """

    def load_rank_states(self, states: Sequence[Mapping[str, torch.Tensor]], *, is_same: bool) -> None:
        """Restores what the ranks alone knew, after the weights and the optimizer. Runs on every rank.

        Args:
            states: `rank_state` of all ranks at the checkpoint, in rank order; empty ones if the training
                before had another kind of exchange.
            is_same: Whether the gang has as many ranks as then, so that each finds its own.
        """


class Strategy(Protocol):
    """Spreads a module over the ranks."""

    def prepare(
        self, module: nn.Module, make_optimizer: MakeOptimizer, collective: Collective, exchange: Exchange
    ) -> GradientSync:
        """Ties the module to its copies or parts on the other ranks. Runs on every rank.

        The strategy calls the factory of the optimizer, because it may change the parameters first.

        Args:
            module: The module on the rank's device, with activation checkpointing applied.
            make_optimizer: Makes the optimizer over the trainable parameters of a module.
            exchange: The settings of the exchange.
        """


def _nothing() -> None:
    return


class PlainSync:
    """`GradientSync` without communication, the base class of the others."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module = module
        self.network = module
        self.optimizer = optimizer
        self.loss_factor = 1.0
        self.ranks_differ = False
        self.in_step = True
        self.progress: Callable[[], None] = _nothing
        self.local_square: torch.Tensor | None = None

    def backward_without_rows(self, inputs: Sequence[torch.Tensor] = ()) -> None:
        return

    def forward_without_rows(self, inputs: Sequence[torch.Tensor]) -> None:
        return

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        return

    def clip_gradients(self, max_norm: float) -> None:
        # Only trained parameters count: others may keep gradients, which differ by rank.
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        # torch has no norm of a sparse tensor. What it holds has one, once no row comes twice.
        for parameter in trained:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        with_gradients = [p for p in trained if p.grad is not None]
        held = held_values([p.grad for p in with_gradients if p.grad is not None])
        is_dense = not any(p.grad is not None and p.grad.is_sparse for p in trained)
        layout = layout_of(self.network)
        if layout is not None:
            names = {parameter: name for name, parameter in self.network.named_parameters()}
            norm = layout.norm({names[p]: g for p, g in zip(with_gradients, held, strict=True)}).float()
            if is_dense:
                nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
                return
        elif is_dense:
            nn.utils.clip_grad_norm_(trained, max_norm)
            return
        else:
            norm = nn.utils.get_total_norm(held)
        torch._foreach_mul_(held, (max_norm / (norm + 1e-6)).clamp(max=1.0))

    def step(self, scaler: Scaler) -> None:
        scaler.step(self.optimizer)

    def optimizer_state(self) -> OptimizerState:
        return state_by_name(self.network, self.optimizer)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        load_by_name(self.network, self.optimizer, state)

    def settle(self) -> None:
        return

    def rank_state(self) -> dict[str, torch.Tensor]:
        return {}

    def load_rank_states(self, states: Sequence[Mapping[str, torch.Tensor]], *, is_same: bool) -> None:
        return
