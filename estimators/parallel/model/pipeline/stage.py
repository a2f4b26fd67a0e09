"""Leaves a network with a rank's own stages only.

The network stays the same object, of the same class, and its tensors keep their names: what belongs to other
stages is deleted from it, and `forward` runs the links of a stage. So its state dict is a part of the whole
one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ringspark.models.chain import Link, State, belongs_to, run_links, run_over_time


class StageForward:
    """Stands in for the network's `forward`. A class, so that networks are copied and pickled."""

    def __init__(self, network: nn.Module, stages: Mapping[int, Sequence[Link]]) -> None:
        self.network = network
        self.stages = {number: list(links) for number, links in stages.items()}

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Lets `inspect.signature(network.forward)` see the arguments of the network's own forward."""
        return functools.partial(type(self.network).forward, self.network)

    def __call__(
        self,
        *values: Any,
        stage: int | None = None,
        part: tuple[int, int, Sequence[State] | None] | None = None,
    ) -> Any:
        """Runs one stage, or some of its links.

        Args:
            stage: Number of the stage.
            part: (first link, end, states of the links): what runs, and from which states where the values
                are a chunk of time. The result is then (result, states after it).

        Raises:
            RuntimeError: `stage` is None, because user code called the network.
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
        if links and (stage > 0 or part is not None) and _overwrites(links[0]):
            # A leaf of the graph must not be changed in place, nor may what the stage before keeps.
            values = tuple(None if value is None else value.clone() for value in values)
        if states is not None:
            return run_over_time(links, states, values)
        result = run_links(links, values)
        if part is None:
            return result
        # Without links, what comes is what goes.
        return (result[0] if not links and len(result) == 1 else result), ()


def _overwrites(link: Link) -> bool:
    """Whether a link may change its arguments in place, as `nn.ReLU(inplace=True)` does."""
    return isinstance(link.run, nn.Module) and any(getattr(m, "inplace", False) for m in link.run.modules())


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
        elif any(True for _ in itertools.chain(child.parameters(), child.buffers())):
            del module._modules[key]
        # What has no tensors costs nothing, and a link may use it without naming it.


def _is_kept(name: str, parts: set[str]) -> bool:
    return any(belongs_to(name, part) for part in parts)
