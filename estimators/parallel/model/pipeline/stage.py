"""Leaves a network with a rank's own stages only.

The network stays the same object, of the same class, and its tensors keep their names: what belongs to other
stages is deleted from it, and `forward` runs the links of a stage. So its state dict is a part of the whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ringspark.models.chain import Link, belongs_to, run_links


class StageForward:
    """Stands in for the network's `forward`. A class, not a closure, so that networks are copied and pickled."""

    def __init__(self, network: nn.Module, stages: Mapping[int, Sequence[Link]]) -> None:
        self.network = network
        self.stages = {number: list(links) for number, links in stages.items()}

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Lets `inspect.signature(network.forward)` see the arguments of the network's own forward."""
        return type(self.network).forward.__get__(self.network)

    def __call__(self, *values: Any, stage: int | None = None) -> Any:
        """Runs one stage.

        Args:
            stage: Number of the stage; only left out where the rank has one alone.
        """
        if stage is None:
            (stage,) = self.stages
        return run_links(self.stages[stage], values)


def keep_stages(network: nn.Module, stages: Mapping[int, Sequence[Link]]) -> None:
    """Deletes from the network what its other stages need; its `forward` runs these stages.

    Args:
        stages: Links of each stage that this rank has.
    """
    parts = {part for links in stages.values() for link in links for part in link.parts}
    _prune(network, "", parts)
    network.forward = StageForward(network, stages)


def _prune(module: nn.Module, prefix: str, parts: set[str]) -> None:
    for tensors in (module._parameters, module._buffers):
        for key in list(tensors):
            if not _is_kept(f"{prefix}{key}", parts):
                del tensors[key]
                module._non_persistent_buffers_set.discard(key)
    for key, child in list(module._modules.items()):
        name = f"{prefix}{key}"
        if _is_kept(name, parts) or child is None:
            continue
        if any(belongs_to(part, name) for part in parts):
            _prune(child, f"{name}.", parts)
        else:
            del module._modules[key]


def _is_kept(name: str, parts: set[str]) -> bool:
    return any(belongs_to(name, part) for part in parts)
