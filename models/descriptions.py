"""Descriptions of networks in JSON: of torch's own layers, or of a class of the transformers library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ringspark.models import hugging_face, layers
from ringspark.models.layers import Description


def describe_network(module: nn.Module) -> Description | None:
    return layers.describe(module) or hugging_face.describe(module)


def build_network(description: Mapping[str, Any]) -> nn.Module:
    if hugging_face.LIBRARY in description:
        return hugging_face.build(description)
    return layers.build(description)
