"""A network as a chain of links, which pipeline parallelism divides into stages on different workers.

    class Net(nn.Module):
        def links(self):
            return [
                Link("embed", self.embed, ("embed",)),
                *(Link(f"blocks.{i}", block, (f"blocks.{i}",)) for i, block in enumerate(self.blocks)),
                Link("head", self._normed_head, ("norm", "head")),
            ]

The first link takes the network's arguments. Each further link takes the result of the previous link: a
tensor, or a tuple of tensors and Nones. Running the links in order must compute `forward`. Every parameter
and buffer belongs to a link. An `nn.Sequential` needs no method `links`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringspark.models.adapters import find_library
from ringspark.models.module_hooks import find_hook

State = tuple[torch.Tensor, ...] | None


@dataclass(frozen=True)
class Link:
    """One part of a network.

    Attributes:
        name: Name of the link. If the link is a submodule, the name of the submodule.
        run: Submodule or bound method of the network that computes the link. A closure is not allowed,
            because a copy of the network would use the weights of the original.
        parts: Names of the submodules and parameters that the link uses.
        over_time: Function that computes the link on one sequence chunk, (batch, time, ...). The function
            takes the state and the chunk, and returns the chunk's result and the new state. The state is a
            tuple of tensors, or None at the start of a row or for a link without a state. The function must
            not change its arguments in place. `over_time` is None if a result depends on later time steps.
    """

    name: str
    run: Callable[..., Any]
    parts: tuple[str, ...]
    over_time: Callable[..., tuple[Any, State]] | None = None


def links_of(network: nn.Module) -> list[Link]:
    """Returns the network's links in order. Raises ValueError if they do not form a complete chain."""
    own = getattr(network, "links", None)
    if callable(own):
        links = list(own())
    elif type(network).forward is nn.Sequential.forward:
        links = _items(network, "")
    elif (support := find_library(network)) is not None:
        links = support.links(network)
    else:
        raise ValueError(
            f"a pipeline needs a chain of links, but {type(network).__name__} has no method links(); add it "
            "as ringspark.models.chain describes, or use an nn.Sequential"
        )
    _check(network, links)
    return links


def run_links(links: Sequence[Link], values: tuple[Any, ...]) -> Any:
    result: Any = values
    for index, link in enumerate(links):
        result = link.run(*(values if index == 0 else as_values(result, link.name)))
    return result


def run_over_time(
    links: Sequence[Link], states: Sequence[State], values: tuple[Any, ...]
) -> tuple[Any, list[State]]:
    """Calls `over_time` of each link on one sequence chunk; returns the result and the new states."""
    result: Any = values
    after: list[State] = []
    for index, (link, state) in enumerate(zip(links, states, strict=True)):
        assert link.over_time is not None
        result, new = link.over_time(state, *(values if index == 0 else as_values(result, link.name)))
        after.append(new)
    return result, after


def as_values(result: object, name: str) -> tuple[torch.Tensor | None, ...]:
    values = result if isinstance(result, tuple) else (result,)
    for value in values:
        if value is not None and not isinstance(value, torch.Tensor):
            raise ValueError(
                f"link {name!r} must get a tensor, or a tuple of tensors and Nones, from the link "
                f"before, got a {type(value).__name__}; let links() split the network where only "
                "tensors pass"
            )
    return values


def belongs_to(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _items(network: nn.Module, prefix: str) -> list[Link]:
    links = []
    for key, item in network._modules.items():
        assert item is not None
        name = f"{prefix}{key}"
        if type(item) is nn.Sequential and len(item) and find_hook(item) is None:
            links += _items(item, f"{name}.")
        else:
            links.append(Link(name, item, (name,)))
    return links


def _check(network: nn.Module, links: Sequence[Link]) -> None:
    kind = type(network).__name__
    if not links:
        raise ValueError(f"links() of {kind} returns no link; return the network's parts in order")
    if wrong := [link for link in links if not isinstance(link, Link)]:
        raise ValueError(
            f"links() of {kind} must return ringspark.models.chain.Link, got a {type(wrong[0]).__name__}"
        )
    known = {name for name, _ in network.named_modules(remove_duplicate=False)}
    known |= {name for name, _ in network.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in network.named_buffers(remove_duplicate=False)}
    for link in links:
        for part in link.parts:
            if not part or part not in known:
                raise ValueError(
                    f"link {link.name!r} of {kind} names a part {part!r}, which the network does not have"
                )
    parts = {part for link in links for part in link.parts}
    tensors = [*network.named_parameters(), *network.named_buffers()]
    left = [name for name, _ in tensors if not any(belongs_to(name, part) for part in parts)]
    if left:
        raise ValueError(
            f"the links of {kind} omit {', '.join(left[:5])}; name every submodule and parameter in a "
            "link's parts"
        )
