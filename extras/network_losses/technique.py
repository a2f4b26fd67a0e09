"""Losses that take the network, as a gradient penalty does."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ringspark.estimators.techniques import Technique
from ringspark.estimators.training.feed import Batch
from ringspark.extras.network_losses.calls import calls_in
from ringspark.extras.network_losses.check import check_network_losses


class NetworkLosses(Technique):
    def check(self, training: Any) -> None:
        batch = Batch(inputs=training.inputs, labels=training.labels, weight=None)
        check_network_losses(training.config, training.heads, training.module, batch)

    def around_losses(self, config: Any, network: nn.Module, device: Any) -> AbstractContextManager[Any]:
        return calls_in(network, config.precision, device)
