"""The description of a network in JSON, by whichever of the two forms serves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ringspark.models import hugging_face, layers
from ringspark.models.layers import Description


def describe_network(module: nn.Module) -> Description | None:
    """Returns the description of a network of torch's own layers or of transformers; else None."""
    return layers.describe(module) or hugging_face.describe(module)


def build_network(description: Mapping[str, Any]) -> nn.Module:
    """Builds the network, with weights as its own code draws them.

    Raises:
        ValueError: This is no description, or not one for the libraries that are installed here.
    """
    if hugging_face.LIBRARY in description:
        return hugging_face.build(description)
    return layers.build(description)
