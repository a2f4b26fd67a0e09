"""Descriptions of networks in JSON: of torch's layers, a library's class, or an adapted network."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import nn

from ringspark.models import layers
from ringspark.models.adapters import ADAPTERS, LIBRARIES, AdaptedNetwork, find_library
from ringspark.models.layers import Description


def describe_network(module: nn.Module) -> Description | None:
    if isinstance(module, AdaptedNetwork):
        return module.description()
    library = find_library(module)
    return layers.describe(module) or (library and library.describe(module))


def build_network(description: Mapping[str, Any]) -> nn.Module:
    packages = ADAPTERS | LIBRARIES
    for package in packages.keys() & description.keys():
        network: nn.Module = import_module(packages[package]).build(description)
        return network
    return layers.build(description)
