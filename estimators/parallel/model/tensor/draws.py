"""Random numbers inside the parts of a network that are cut: every rank draws its own there.

Outside, all ranks hold the same values and must drop the same ones, so they draw from one stream. Inside,
between a layer that is cut by its outputs and the one by its inputs, each has other heads or hidden units:
the same mask on all ranks would drop units in groups, which no single worker does.

Invariant: a rank's own numbers follow from the common stream and its place alone, so whoever restores the
common stream, to recompute a block or to resume a training, draws the same again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.model.stand_in import StandIn

# Odd, so that the streams of neighbouring seeds and ranks keep apart.
_RANK_FACTOR = 1_000_003
_LARGEST_SEED = 2**62


class OwnDraws:
    """Where one rank stands: in the common stream of random numbers, or in its own."""

    def __init__(self, collective: Collective) -> None:
        self._rank = collective.rank
        # A plan of memory only looks at shapes, and its tensors have no numbers to seed by.
        self._draws = not isinstance(collective, StandIn)
        self._seed = 0
        self._common: tuple[torch.Tensor, dict[torch.device, torch.Tensor]] | None = None

    @property
    def _is_own(self) -> bool:
        # The common stream may be back without `end`: recomputing a single layer restores it.
        return self._common is not None and torch.initial_seed() == self._seed

    def watch(self, module: nn.Module, *, always: bool = False) -> None:
        """Ends what a pass of the whole network leaves open.

        Args:
            always: Whether each rank draws its own numbers in all of the network.
        """

        def begin(module: nn.Module, inputs: Any) -> None:
            if module.training:
                self.begin(_device_of(module))

        def end(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self.end()

        if always:
            module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    def begin(self, device: torch.device) -> None:
        """Goes over to this rank's own stream, if it is not there yet."""
        if not self._draws or self._is_own:
            return
        # Drawn, so that the next region has another one, also where nothing else draws.
        seed = int(torch.randint(_LARGEST_SEED, ())) * _RANK_FACTOR + self._rank
        gpus = {device: torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
        self._seed, self._common = seed % 2**63, (torch.get_rng_state(), gpus)
        torch.default_generator.manual_seed(self._seed)
        if gpus:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(self._seed)

    def end(self) -> None:
        """Goes back to the common stream, if this rank is in its own."""
        if not self._is_own:
            return
        assert self._common is not None
        cpu, gpus = self._common
        self._common = None
        torch.set_rng_state(cpu)
        for device, state in gpus.items():
            torch.cuda.set_rng_state(state, device)


def _device_of(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))
