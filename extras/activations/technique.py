"""The settings `activationOffload` and `activationCompression`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ringspark.estimators.techniques import Technique
from ringspark.extras.activations.hooks import saved_tensor_hooks


class SavedActivations(Technique):
    def around_forward(self, config: Any, network: nn.Module, device: Any) -> AbstractContextManager[Any]:
        return saved_tensor_hooks(
            offload=config.activation_offload,
            compression=config.activation_compression,
            module=network,
            device=device,
        )
