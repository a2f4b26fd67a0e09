"""The interface between the trainer and a gradient synchronization."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.random import fork_rng

from ringspark.estimators.options.sync import AllReduce, Sync
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.optimizer_state import (
    OptimizerState,
    RootOf,
    first_rank,
    load_by_name,
    parameter_names,
    state_by_name,
)
from ringspark.models.network_copy import restore

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """Settings of the gradient synchronization; equal on all ranks except for `device`.

    Attributes:
        sync: How the ranks agree on their weights; `sync.strategy` is a key of `STRATEGIES`.
        micro_batches: Largest number of backward passes per optimizer step.
        noise_scale: Whether `GradientSync.local_square` is computed in each step.
        seed: Seed of random compressors.
        timeout_seconds: Longest wait for a rank that takes no step.
        autocast: Makes the context of a forward pass.
    """

    sync: Sync = AllReduce()
    micro_batches: int = 1
    noise_scale: bool = False
    seed: int = 0
    timeout_seconds: float = 600.0
    device: torch.device = _CPU
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext


class Scaler(Protocol):
    def step(self, optimizer: torch.optim.Optimizer) -> object: ...


def refuse_sparse(name: str, gradient: torch.Tensor) -> None:
    """Raises ValueError if the gradient is sparse: autograd refuses hooks that return a dense gradient."""
    if gradient.is_sparse:
        raise ValueError(
            f"parameter {name!r} got a sparse gradient, but a rank without rows has none to send; leave "
            "sparse=True out of the embedding call in the model's forward, or set numWorkers=1"
        )


def dense_values(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the values of each gradient; duplicate rows of a sparse gradient are summed first."""
    return [g.coalesce().values() if g.is_sparse else g for g in gradients]


def apply_change(own: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Returns the weights `own` plus `after - before`, a callback's change of the shared weights.

    Elements of `own` that equal `before` become exactly `after`; elements without a change stay.
    """
    before, after = before.to(own), after.to(own)
    moved = torch.where(own == before, after, own + (after - before))
    return torch.where(after == before, own, moved)


@contextmanager
def keep_buffers(network: nn.Module) -> Iterator[None]:
    """Restores the network's buffers at the end."""
    kept = [(buffer, buffer.clone()) for buffer in network.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in kept:
            restore(buffer, value)


class GradientSync:
    """Synchronizes one module and its optimizer with the other ranks.

    This base class does not communicate. Each rank differentiates its part of the global batch's mean loss,
    times `loss_factor`. After `reduce`, each optimizer sees the gradients of the whole mean loss, or a shard.
    A parameter without a gradient on any rank keeps None, so no optimizer decays or moves it.

    Attributes:
        takes_sparse: Whether the strategy synchronizes sparse gradients of embeddings.
        module: The module to call in training, with any wrapper.
        network: The module without the wrapper; it has the names of the state dict.
        loss_factor: Factor of a rank's loss before it is differentiated.
        ranks_differ: Whether the ranks step on different gradients, so that they must agree on overflow.
        in_step: Whether the ranks take each step together. If not, weights may differ until `settle`.
        progress: Called at each step of another rank while this rank waits for slower ranks.
        make_optimizer: Makes the optimizer again; None if new parameters cannot be trained.
        left_out: Names of trainable parameters that the optimizer does not hold.
        local_square: Squared 2-norm of this rank's gradients before the all-reduce, on the device; None
            without `SyncSettings.noise_scale`, or if the strategy does not know it.
    """

    takes_sparse: ClassVar[bool] = False

    @classmethod
    def prepare(
        cls, module: nn.Module, make_optimizer: MakeOptimizer, mesh: RankMesh, settings: SyncSettings
    ) -> GradientSync:
        """Returns the synchronization of the module and its optimizer. Runs on every rank.

        Args:
            module: This rank's shard of the network on the rank's device. With sync=Zero(stage=3) the
                weights may still lack values, see `initial_weights`.
            make_optimizer: Makes the optimizer, after the strategy has changed the parameters.
        """
        raise NotImplementedError

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module = module
        self.network = module
        self.optimizer = optimizer
        self.loss_factor = 1.0
        self.ranks_differ = False
        self.in_step = True
        self.progress: Callable[[], None] = lambda: None
        self.local_square: torch.Tensor | None = None
        self.make_optimizer: MakeOptimizer | None = None
        self.left_out = set(self._find_unheld().values())

    def held(self) -> set[nn.Parameter]:
        """Returns the parameters that the optimizers of the ranks train."""
        return {p for group in self.optimizer.param_groups for p in group["params"]}

    def _find_unheld(self) -> dict[nn.Parameter, str]:
        named, held = self.network.named_parameters(), self.held()
        return {p: name for name, p in named if p.requires_grad and p not in held}

    def regroup(self) -> bool:
        """Synchronizes the parameters that the optimizer holds now; returns False if it cannot add any."""
        return type(self) is GradientSync

    def hold_new_parameters(self) -> list[str]:
        """Lets the optimizer hold parameters that require a gradient by now, such as a thawed layer's.

        Returns the names of the parameters that it cannot hold, once for each. Runs on every rank.
        """
        new = {p: name for p, name in self._find_unheld().items() if name not in self.left_out}
        fresh = self.make_optimizer(self.network) if new and self.make_optimizer and self.regroup() else None
        if fresh is not None and len(fresh.param_groups) == len(self.optimizer.param_groups):
            for group, made in zip(self.optimizer.param_groups, fresh.param_groups, strict=True):
                for parameter in made["params"]:
                    if new.pop(parameter, None) is not None:
                        group["params"].append(parameter)
                        if parameter in fresh.state:
                            self.optimizer.state[parameter] = fresh.state[parameter]
            self.regroup()
        self.left_out |= set(new.values())
        return list(new.values())

    def backward_without_rows(self, inputs: Sequence[torch.Tensor] = ()) -> None:
        """Runs a step on a rank without rows; subclasses also make the step's collective calls.

        `inputs` are the arguments of `module`, each with 0 rows. The network runs on a row of zeros, so that
        its own counters and frozen weights change as on the other ranks. Buffers stay: a rank with rows sends
        its own, and statistics must not see the zeros.
        """
        zeros = [values.new_zeros((1, *values.shape[1:])) for values in inputs]
        devices = {values.device for values in zeros if values.is_cuda}
        # User code may raise anything; then its counters stay.
        with fork_rng(devices=devices), torch.no_grad(), keep_buffers(self.network), suppress(Exception):
            self.network.forward(*zeros)  # a hook of the network itself sees real rows only

    def forward_without_rows(self, inputs: Sequence[torch.Tensor]) -> None: ...

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def reduce(self, scale: Callable[[], float] = lambda: 1.0) -> None:
        """Waits until the gradients of this step are summed over all ranks.

        `scale` returns fp16's loss scale, by which the gradients are multiplied. A call waits for the device.
        """

    def clip_gradients(self, max_norm: float) -> None:
        """Scales reduced gradients so that their common 2-norm is at most `max_norm`."""
        # Only trained parameters: frozen ones may keep gradients, which differ by rank.
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        # torch has no norm of a sparse tensor; the norm of its values is right once each row is unique.
        for parameter in trained:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        given = {p: p.grad for p in trained if p.grad is not None}
        held = dense_values(list(given.values()))
        layout = layout_of(self.network)
        if layout is None:
            norm: Any = nn.utils.get_total_norm(held)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        else:
            names = parameter_names(self.network)
            norm = layout.norm({names[p]: g for p, g in zip(given, held, strict=True)}).float()
        if any(gradient.is_sparse for gradient in given.values()):
            torch._foreach_mul_(held, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        else:
            nn.utils.clip_grads_with_norm_(trained, max_norm, norm)

    def step(self, scaler: Scaler) -> None:
        scaler.step(self.optimizer)

    def optimizer_state(self, root_of: RootOf = first_rank) -> OptimizerState:
        """Returns the optimizer state by parameter name. Runs on every rank.

        The root of a parameter has its whole tensors. Rank 0 has all values that are not tensors.
        """
        return state_by_name(self.network, self.optimizer, root_of)

    def load_optimizer_state(self, state: OptimizerState) -> None:
        """Loads this rank's shard of a whole optimizer state, from any number of ranks."""
        load_by_name(self.network, self.optimizer, state)

    def settle(self) -> None:
        """Makes all ranks have equal weights, at the end of an epoch. Runs on every rank."""

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Returns CPU copies of state that only this rank has, such as residuals. Runs on every rank."""
        return {}

    def load_rank_states(self, states: Sequence[Mapping[str, torch.Tensor]], *, is_same: bool) -> None:
        """Restores states that `rank_state` returned; call it after loading weights and optimizer.

        Runs on every rank.

        Args:
            states: `rank_state` of each rank at the checkpoint; empty dicts if the strategy was another.
            is_same: Whether the mesh is the same as at the checkpoint, so that each rank takes its own state.
        """


def share_weights(module: nn.Module, mesh: RankMesh) -> None:
    """Broadcasts rank 0's weights, except to shards, which are initialized equally. Runs on every rank."""
    if not mesh.cuts_network:
        with torch.no_grad():
            mesh.world.broadcast(list(module.state_dict().values()))
