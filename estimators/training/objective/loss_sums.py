"""Losses summed over rows on the device, so that no batch waits for a number."""

from __future__ import annotations

import torch

from ringspark.estimators.collectives import Collective


class Totals:
    """Weighted loss sums and weights of each label, until the end of the epoch."""

    def __init__(self, num_losses: int, device: torch.device) -> None:
        # float64, so that the mean over many millions of rows stays exact to the printed digits.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums = torch.zeros((2, num_losses), dtype=dtype, device=device)

    def add(self, losses: torch.Tensor, weights: torch.Tensor) -> None:
        """Adds the sums of some rows, both (num_losses,)."""
        self._sums[0] += losses.detach()
        self._sums[1] += weights

    def means(self, collective: Collective) -> list[float]:
        """Each label's mean loss over all ranks; NaN where nothing has weight. Runs on every rank."""
        losses, weights = collective.all_reduce(self._sums.cpu().flatten()).view_as(self._sums)
        means: list[float] = (losses / weights).tolist()
        return means

    def state(self) -> torch.Tensor:
        """A copy of the sums on the CPU, (2, num_losses)."""
        return self._sums.detach().cpu().clone()

    def load(self, state: torch.Tensor) -> None:
        """Goes on from `state`'s result, or from the sum of several ranks' results.

        Raises:
            ValueError: It is of another number of losses.
        """
        if state.shape != self._sums.shape:
            raise ValueError(
                f"the checkpoint has sums of {state.shape[-1]} losses, this training has "
                f"{self._sums.shape[1]}; give runUri a folder of its own"
            )
        self._sums.copy_(state)
