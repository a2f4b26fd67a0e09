"""Adapters turn networks of other libraries into torch modules with train mode, parameters and buffers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torch import nn

# Package -> module of its adapter, with `adapt(model)` and `build(description)`.
ADAPTERS = dict.fromkeys(("keras", "tf_keras"), "ringspark.extras.keras_models")
# Package of torch networks -> module about them. `describe(network)`, `build(description)`,
# `build_from_config(name, ...)` and `shorten(spec, num_blocks)` are for specs and saved models,
# `stop_caching(network)` for a training, and `links(network)`, `prepare_sequence(network)`,
# `find_experts(network)` and `prepare_experts(network)` for a mesh.
LIBRARIES = {"transformers": "ringspark.extras.hugging_face"}


class AdaptedNetwork(nn.Module):
    """Base class of the modules that adapters return."""

    def description(self) -> dict[str, Any]:
        """Returns JSON for the adapter's `build`; one key is the name of the package."""
        raise NotImplementedError

    def check_settings(self, task: str, losses: Sequence[str]) -> None:
        """Raises ValueError if the network does not fit the task or the losses' names. Runs on the driver."""


def find_library(network: nn.Module) -> Any:
    """Returns the module of `LIBRARIES` for a network; None if its package has none."""
    name = LIBRARIES.get(type(network).__module__.partition(".")[0])
    return None if name is None else import_module(name)


def adapt_network(model: Any) -> Any:
    """Returns the adapter's network for the model, or the model itself if it needs no adapter.

    Raises ValueError if the adapter refuses the model, or if only a layer of the model needs an adapter.
    """
    for layer in (model, *(model.modules() if isinstance(model, nn.Module) else ())):
        packages = [kind.__module__.partition(".")[0] for kind in type(layer).__mro__]
        for package in ADAPTERS.keys() & packages:
            if layer is model:
                return import_module(ADAPTERS[package]).adapt(model)
            raise ValueError(
                f"model {type(model).__name__} contains the {package} layer {type(layer).__name__}, which "
                f"ignores train() and eval(); give a whole {package} model instead, or use a torch layer"
            )
    return model
