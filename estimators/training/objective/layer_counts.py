"""Sums what layers count, such as an expert's rows, over the rows of a split, for the history.

With pipeline parallelism, each rank has counts for all layers of the network; they are zero for other ranks'
layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.models.reports import CountingLayer, CountingLayerInfo, find_counting_layers


class LayerCounts:
    """The counts of one network's layers on one rank.

    Args:
        network: This rank's pipeline stages.
        layers: Layers of the whole network; None if `network` is whole.
        stages: The ranks of the pipeline.
    """

    def __init__(
        self,
        network: nn.Module | None,
        device: torch.device,
        layers: Sequence[CountingLayerInfo] | None = None,
        stages: Collective | None = None,
    ) -> None:
        if layers is None:
            layers = [] if network is None else find_counting_layers(network)
        self._layers, self._stages = tuple(layers), stages
        # float64, so that counts of an epoch's many tokens are exact.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        sizes = [layer.num_counts for layer in self._layers]
        self._totals = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self._views: dict[CountingLayer, torch.Tensor] = {}
        known = {} if network is None else dict(network.named_modules(remove_duplicate=False))
        for own, view in zip(self._layers, torch.split(self._totals, sizes) if sizes else (), strict=True):
            for name in own.names:
                if isinstance(layer := known.get(name), CountingLayer):
                    self._views[layer] = view

    def add(self, counts: Mapping[CountingLayer, torch.Tensor]) -> None:
        """Adds the counts of a forward pass, without waiting for the device."""
        for layer, own in counts.items():
            if layer in self._views:
                self._views[layer].add_(own)

    def take(self, data: Collective) -> dict[str, float]:
        """Returns the history's entries from the counts of all ranks and stages. Runs on every rank."""
        values: dict[str, float] = {}
        if not self._layers:
            return values
        summed = data.all_reduce(self._totals.cpu())
        if self._stages is not None:
            summed = self._stages.all_reduce(summed)
        totals = torch.split(summed, [layer.num_counts for layer in self._layers])
        for numbers in dict.fromkeys(layer.numbers for layer in self._layers):
            own = zip(self._layers, totals, strict=True)
            values |= numbers([counts for layer, counts in own if layer.numbers is numbers])
        return values

    def reset(self) -> None:
        self._totals.zero_()

    def state(self) -> torch.Tensor | None:
        """Copies the counts to the CPU; None if no layer counts."""
        return self._totals.detach().cpu().clone() if self._layers else None

    def load_all(self, states: Sequence[torch.Tensor], takes_all: bool) -> None:
        """On the first stage, sums all ranks' checkpointed counts if `takes_all`; else starts at zero."""
        first = self._stages is None or self._stages.rank == 0
        self.load(states if takes_all and first else ())

    def load(self, states: Sequence[torch.Tensor]) -> None:
        """Starts from the sum of results of `state`. Raises ValueError for another network."""
        self._totals.zero_()
        for state in states:
            if state.shape != self._totals.shape:
                raise ValueError(
                    f"the checkpoint has {len(state)} counts of layers, this network has "
                    f"{len(self._totals)}; give runUri a new folder"
                )
            self._totals.add_(state.to(self._totals.device))
