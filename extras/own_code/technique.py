"""A user's own optimizer, hooks of her parameters, and a module of Lightning."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ringspark.estimators.techniques import Technique
from ringspark.estimators.training.build import build_configured_optimizer
from ringspark.extras.own_code.optimizer_check import check_own_optimizer
from ringspark.extras.own_code.parameter_check import check_parameters

_PACKAGES = ("lightning", "pytorch_lightning")


class OwnCode(Technique):
    def check_network(self, config: Any, objects: Any, network: nn.Module) -> None:
        if config.num_workers > 1:
            check_parameters(config, network)
        classes = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(network).__mro__}
        is_lightning = any((package, "LightningModule") in classes for package in _PACKAGES)
        # Its training_step computes a loss, which the default loss must not replace.
        if is_lightning and "auto" in config.losses and not config.has_own_step:
            raise ValueError(
                f"model {type(network).__name__} is a LightningModule, and only its forward is trained; set "
                "loss to what its training_step computes, and optimizer to what its configure_optimizers "
                "makes, as docs/lightning.md shows, or set trainingStep='lightning'"
            )

    def check_optimizer(self, config: Any, objects: Any, network: nn.Module) -> None:
        if objects.optimizer is not None:
            check_own_optimizer(config, partial(build_configured_optimizer, config, objects), network)
