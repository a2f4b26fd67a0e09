"""A network as a chain of links, so that it can be cut into stages that lie on different workers.

A network offers `links()`: the pieces that its forward pass calls one after the other. Each takes the values
that travel, as positional arguments (the first link takes the network's own), and returns those for the next:
a tensor, or a tuple of tensors and Nones, such as hidden states and a mask. An `nn.Sequential` needs no
method.

    class Net(nn.Module):
        def links(self):
            return [
                Link("embed", self.embed, ("embed",)),
                *(Link(f"blocks.{i}", block, (f"blocks.{i}",)) for i, block in enumerate(self.blocks)),
                Link("head", self._normed_head, ("norm", "head")),
            ]

Invariant: the links one after the other compute what `forward` computes, and every parameter and buffer
belongs to one of them. Two links may use the same parameter: then it is tied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringspark.models.module_hooks import find_hook

State = tuple[torch.Tensor, ...] | None


@dataclass(frozen=True)
class Link:
    """One piece of a network.

    Attributes:
        name: Name by which a cut names it: that of its submodule, where it is one.
        run: What computes it: a submodule or a method of the network, so that a copy of the network is run by
            its own.
        parts: Names of the submodules and parameters that it uses.
        over_time: (state, chunk of the values) -> (chunk of the result, state), for a link that sees of a row
            only what came before, such as a recurrent layer. All values and results are (batch, time, ...),
            and are cut along time. The state is a tuple of tensors, or None: at the start of a row, and of a
            link that looks at each position alone. All chunks one after the other give what `run` gives. Like
            `run` a method of what holds the weights; nothing in it changes its arguments in place. None for a
            link that needs whole rows.
    """

    name: str
    run: Callable[..., Any]
    parts: tuple[str, ...]
    over_time: Callable[..., tuple[Any, State]] | None = None


def links_of(network: nn.Module) -> list[Link]:
    """Returns the network's links in order.

    Raises:
        ValueError: The network is no chain, or its links leave a parameter or buffer out.
    """
    own = getattr(network, "links", None)
    if callable(own):
        links = list(own())
    elif type(network).forward is nn.Sequential.forward:
        links = _items(network, "")
    else:
        raise ValueError(
            f"a pipeline needs a network that is a chain, and {type(network).__name__} is not known to be "
            "one; give it a method links() that returns its pieces in order, as ringspark.models.chain "
            "describes, or give an nn.Sequential"
        )
    _check(network, links)
    return links


def run_links(links: Sequence[Link], values: tuple[Any, ...]) -> Any:
    """Returns what the last link returns."""
    result: Any = values
    for index, link in enumerate(links):
        result = link.run(*(values if index == 0 else as_values(result, link)))
    return result


def run_over_time(
    links: Sequence[Link], states: Sequence[State], values: tuple[Any, ...]
) -> tuple[Any, list[State]]:
    """Returns what the last link gives for one chunk of time, and the state of each link after it.

    Args:
        links: Links that go along time.
        states: State of each link after the chunk before; None at the start of the rows.
        values: One chunk of what is given to the first link.
    """
    result: Any = values
    after: list[State] = []
    for index, (link, state) in enumerate(zip(links, states, strict=True)):
        assert link.over_time is not None
        result, new = link.over_time(state, *(values if index == 0 else as_values(result, link)))
        after.append(new)
    return result, after


def as_values(result: object, link: Link) -> tuple[torch.Tensor | None, ...]:
    """Returns what is given to a link as a tuple.

    Raises:
        ValueError: It gives something else than tensors.
    """
    values = result if isinstance(result, tuple) else (result,)
    for value in values:
        if value is not None and not isinstance(value, torch.Tensor):
            raise ValueError(
                f"the links up to {link.name!r} must give it a tensor or a tuple of tensors and Nones, got a "
                f"{type(value).__name__}; let links() return pieces that give each other no other values"
            )
    return values


def belongs_to(name: str, part: str) -> bool:
    """Whether the submodule, parameter or buffer of this name is the part or lies in it."""
    return name == part or name.startswith(f"{part}.")


def _items(network: nn.Module, prefix: str) -> list[Link]:
    """Returns the items of a Sequential, and those of the Sequentials in it."""
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
        raise ValueError(f"links() of {kind} returns no link; return its pieces in order")
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
                    f"link {link.name!r} of {kind} names a part {part!r}, which the network lacks"
                )
    parts = {part for link in links for part in link.parts}
    tensors = [*network.named_parameters(), *network.named_buffers()]
    left = [name for name, _ in tensors if not any(belongs_to(name, part) for part in parts)]
    if left:
        raise ValueError(
            f"the links of {kind} leave out {', '.join(left[:5])}; name every submodule and parameter in the "
            "parts of a link that uses it"
        )
