"""Descriptions of networks in JSON: of torch's layers, a class of transformers, or an adapted network."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import nn

from ringspark.models import hugging_face, layers
from ringspark.models.adapters import ADAPTERS, AdaptedNetwork
from ringspark.models.layers import Description


def describe_network(module: nn.Module) -> Description | None:
    if isinstance(module, AdaptedNetwork):
        return module.description()
    return layers.describe(module) or hugging_face.describe(module)


def build_network(description: Mapping[str, Any]) -> nn.Module:
    if hugging_face.LIBRARY in description:
        return hugging_face.build(description)
    for package in ADAPTERS.keys() & description.keys():
        network: nn.Module = import_module(ADAPTERS[package]).build(description)
        return network
    return layers.build(description)
