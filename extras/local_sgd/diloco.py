"""DiLoCo: an outer optimizer uses the change of the weights over a period as its gradient.

Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models".

Streaming (Douillard et al. 2025, "Streaming DiLoCo with overlapping communication"): the parameters are split
into fragments, and every `steps` / `fragments` steps one fragment synchronizes. The ranks send a fragment's
outer gradient `delay` steps before the outer step. Then each rank's weights become `alpha` * the rank's
weights + (1 - `alpha`) * the outer optimizer's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.options.sync import DiLoCo
from ringspark.estimators.parallel.base import apply_change
from ringspark.extras.local_sgd.compact_sum import start_average
from ringspark.extras.local_sgd.flat_weights import FlatWeights, split_into_fragments
from ringspark.extras.local_sgd.local_sync import LocalSync


@torch.no_grad()
def outer_step(
    start: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, rate: float, decay: float
) -> None:
    """Takes one SGD step with Nesterov momentum; changes `start` and `momentum` in place.

    All tensors are (weights,).
    """
    momentum.mul_(decay).add_(gradient)
    start.sub_(gradient + decay * momentum, alpha=rate)


@dataclass
class Fragment:
    """Parameters that synchronize together, with the state of their outer optimizer.

    Attributes:
        start: Weights of the outer optimizer.
        is_settled: Whether the weights of all ranks equal `start`.
        pending: Function that waits for the outer gradient in flight and returns it; None if none is in
            flight.
    """

    weights: FlatWeights
    start: torch.Tensor
    momentum: torch.Tensor
    is_settled: bool = True
    pending: Callable[[], torch.Tensor] | None = None


class OuterSync(LocalSync):
    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, collective: Collective, settings: DiLoCo
    ) -> None:
        self._settings = settings
        self._fragments: list[Fragment] = []
        self._turn = 0
        super().__init__(module, optimizer, collective, settings)
        if settings.delay:
            collective.operations.sees_all = False  # an exchange takes several steps
        # An error keeps this object alive, and a synchronization in progress would keep the connections open.
        collective.on_leave(self._drop)

    def _begin_local(self) -> None:
        self._fragments = []
        for weights in split_into_fragments(self._trained, self._settings.fragments):
            start = weights.read()
            self._fragments.append(Fragment(weights, start, torch.zeros_like(start)))

    def _drop(self) -> None:
        for fragment in self._fragments:
            fragment.pending = None

    def _after_step(self) -> None:
        for fragment in self._fragments:
            fragment.is_settled = False
        if self._period is None:
            return
        between = self._period // len(self._fragments)
        if self._position == between - self._settings.delay:
            self._send(self._turn)
        if self._position == between:
            self._receive(self._turn, self._settings.alpha)
            self._position = 0
            self._turn = (self._turn + 1) % len(self._fragments)
            if self._turn == 0:
                self._statistics.average()

    def _end_epoch(self) -> None:
        # First all-reduces in flight, then the other fragments, in the same order on all ranks.
        for number, fragment in enumerate(self._fragments):
            if fragment.pending is not None:
                self._receive(number, 0.0)
        for number, fragment in enumerate(self._fragments):
            if not fragment.is_settled:
                self._send(number)
                self._receive(number, 0.0)
        if self._position or self._turn:
            self._statistics.average()
        self._position = self._turn = 0

    def _apply_change(self, before: torch.Tensor, after: torch.Tensor) -> None:
        sizes = [len(fragment.start) for fragment in self._fragments]
        moves = zip(torch.split(before, sizes), torch.split(after, sizes), strict=True)
        for fragment, move in zip(self._fragments, moves, strict=True):
            fragment.start = apply_change(fragment.start, *move)

    def _send(self, number: int) -> None:
        fragment = self._fragments[number]
        gradient = fragment.start - fragment.weights.read()
        fragment.pending = start_average(
            gradient, fragment.weights.sizes, self._collective, self._settings.send, f"local.{number}"
        )

    def _receive(self, number: int, alpha: float) -> None:
        """Waits for a fragment's outer gradient and takes its outer step.

        Does nothing if no gradient is in flight, as after a resume with another number of ranks.
        """
        fragment = self._fragments[number]
        if fragment.pending is None:
            return
        gradient = fragment.pending()
        fragment.pending = None
        outer_step(
            fragment.start,
            fragment.momentum,
            gradient,
            self._settings.outer_rate,
            self._settings.outer_momentum,
        )
        if alpha:
            fragment.weights.write(fragment.start.lerp(fragment.weights.read(), alpha))
        else:
            fragment.weights.write(fragment.start)
        fragment.is_settled = not alpha

    def rank_state(self) -> dict[str, torch.Tensor]:
        # Wait for all-reduces in flight, to save their results, which are used later.
        for fragment in self._fragments:
            if fragment.pending is not None:
                fragment.pending = fragment.pending().clone
        return super().rank_state()

    def _shared_state(self) -> dict[str, torch.Tensor]:
        settled = [f.is_settled for f in self._fragments]
        state = {"outer": torch.tensor([self._turn, *settled])}
        for number, fragment in enumerate(self._fragments):
            state |= {f"start/{number}": fragment.start, f"momentum/{number}": fragment.momentum}
            if fragment.pending is not None:
                state[f"pending/{number}"] = fragment.pending()
        return state

    def _load_shared(self, state: Mapping[str, torch.Tensor], *, is_same: bool) -> None:
        self._turn, *settled = state["outer"].tolist()
        for number, fragment in enumerate(self._fragments):
            fragment.start = state[f"start/{number}"].clone()
            fragment.momentum = state[f"momentum/{number}"].clone()
            fragment.is_settled = bool(settled[number])
            pending = state.get(f"pending/{number}")
            # With other ranks, drop it: the fragment's next outer gradient includes it.
            fragment.pending = pending.clone if is_same and pending is not None else None
