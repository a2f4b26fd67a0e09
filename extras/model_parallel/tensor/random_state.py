"""Random number generators inside regions of sharded layers: one stream per rank.

Outside a region all ranks must drop the same values, so they share a common stream. Inside, each rank seeds
its own stream from the common stream and its rank. So restoring the common stream repeats all numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.extras.model_parallel.fake_collective import FakeCollective

# Odd, so that neighbouring seeds and ranks give different streams.
_RANK_FACTOR = 1_000_003
_LARGEST_SEED = 2**62


class RankRandomState:
    def __init__(self, collective: Collective) -> None:
        self._rank = collective.rank
        # A memory plan only uses shapes, and its tensors have no values for a seed.
        self._draws = not isinstance(collective, FakeCollective)
        self._seed = 0
        self._common: tuple[torch.Tensor, dict[torch.device, torch.Tensor]] | None = None

    @property
    def _is_own(self) -> bool:
        # Recomputing a single layer restores the common stream without `end`.
        return self._common is not None and torch.initial_seed() == self._seed

    def watch(self, module: nn.Module, *, always: bool = False) -> None:
        """Switches back to the random stream that all ranks share, after each pass of `module`.

        With `always`, also switches to the rank's own stream before each pass in training. Without `always`,
        the sharded layers of `module` do so.
        """

        def begin(module: nn.Module, inputs: Any) -> None:
            if module.training:
                self.begin(next((p.device for p in module.parameters()), torch.device("cpu")))

        def end(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self.end()

        if always:
            module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    def begin(self, device: torch.device) -> None:
        if not self._draws or self._is_own:
            return
        # A random seed, so that each region has another stream.
        seed = int(torch.randint(_LARGEST_SEED, ())) * _RANK_FACTOR + self._rank
        gpus = {device: torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
        self._seed, self._common = seed % 2**63, (torch.get_rng_state(), gpus)
        torch.default_generator.manual_seed(self._seed)
        if gpus:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(self._seed)

    def end(self) -> None:
        if not self._is_own:
            return
        assert self._common is not None
        cpu, gpus = self._common
        self._common = None
        torch.set_rng_state(cpu)
        for device, state in gpus.items():
            torch.cuda.set_rng_state(state, device)
