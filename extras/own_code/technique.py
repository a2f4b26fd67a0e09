"""A user's own optimizer, and hooks of her parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ringspark.estimators.techniques import Technique
from ringspark.estimators.training.build import build_configured_optimizer
from ringspark.extras.own_code.optimizer_check import check_own_optimizer
from ringspark.extras.own_code.parameter_check import check_parameters
from ringspark.models.network_copy import HOOKS


class OwnCode(Technique):
    def check_network(self, config: Any, network: nn.Module) -> None:
        named = dict(network.named_parameters()) if config.num_workers > 1 else {}
        hooked = [name for name, p in named.items() if any(getattr(p, kind, None) for kind in HOOKS)]
        if hooked or config.sync.sharding != "none":
            check_parameters(config, f"model {type(network).__name__}", named, hooked)

    def check_optimizer(self, config: Any, objects: Any, network: nn.Module) -> None:
        if objects.optimizer is not None:
            check_own_optimizer(config, partial(build_configured_optimizer, config, objects), network)
