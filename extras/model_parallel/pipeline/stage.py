"""Removes the other ranks' stages from a network.

The network stays the same object, of the same class, and its tensors keep their names.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ringspark.models.chain import Link, State, belongs_to, run_links, run_over_time


class StageForward:
    """Replaces the network's `forward`. A class, so that networks can be copied and pickled."""

    def __init__(self, network: nn.Module, stages: Mapping[int, Sequence[Link]]) -> None:
        self.network = network
        self.stages = {number: list(links) for number, links in stages.items()}

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return functools.partial(type(self.network).forward, self.network)

    def __call__(
        self,
        *values: Any,
        stage: int | None = None,
        part: tuple[int, int, Sequence[State] | None] | None = None,
    ) -> Any:
        """Runs one stage, or some of its layers.

        Args:
            part: (first layer, end, states): the layers to run, and the states of these layers if the values
                are a sequence chunk. With `part`, returns (result, new states of the layers).
        """
        if stage is None:
            raise RuntimeError(
                "a callback cannot call state.module under parallelism 'pipeline', because this rank holds "
                f"only stages {sorted(self.stages)} of {type(self.network).__name__}; compute over the "
                "validation rows by metrics, or leave 'pipeline' out of parallelism"
            )
        links = self.stages[stage]
        states: Sequence[State] | None = None
        if part is not None:
            first, end, states = part
            links = links[first:end]
        if links and _overwrites(links[0]):
            # Neither leaves of the graph nor values of the previous stage may be changed in place.
            values = tuple(None if value is None else value.clone() for value in values)
        if states is not None:
            return run_over_time(links, states, values)
        result = run_links(links, values)
        if part is None:
            return result
        # Without layers, the result is the arguments.
        return (result[0] if not links and len(result) == 1 else result), ()


def _overwrites(link: Link) -> bool:
    return isinstance(link.run, nn.Module) and any(getattr(m, "inplace", False) for m in link.run.modules())


def keep_stages(network: nn.Module, stages: Mapping[int, Sequence[Link]]) -> None:
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
        elif any(True for _ in itertools.chain(child.parameters(), child.buffers())):
            del module._modules[key]
        # Keep modules without tensors: they cost nothing, and a layer may use them without naming them.


def _is_kept(name: str, parts: set[str]) -> bool:
    return any(belongs_to(name, part) for part in parts)
