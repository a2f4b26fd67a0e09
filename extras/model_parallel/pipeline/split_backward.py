"""Splits a stage's backward pass: gradients of its inputs first, gradients of its weights later.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism". A *join* is a node at which a weight enters the path from
the inputs to the results; the second half starts there. torch.distributed.pipelining loses the gradients of
weights that reach a result without passing a node that depends on an input (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# An edge of the graph, and the gradient that enters there.
Start = tuple[GradientEdge, torch.Tensor]


@dataclass
class WeightPass:
    """A pending backward pass for the gradients of some weights, the `leaves`.

    Attributes:
        leaves: The weights, as nodes of autograd's graph.
        joins: Nodes at which these weights enter the path from the inputs to the results.
        starts: Nodes at which the pass starts, with their gradients: results that depend on these weights but
            on no input, then the joins.
        held: Gradients of the outputs of each join.
    """

    leaves: dict[Node, None]
    joins: list[Node]
    starts: list[Start]
    held: dict[Node, tuple[torch.Tensor | None, ...]]

    def run(self) -> None:
        handles = []
        if len(self.joins) > 1:
            # A weight is used twice, and the path from one join may lead to the other. The gradient held at
            # the other join already includes this path, so it replaces the gradient that arrives there.
            handles = [node.register_prehook(lambda _, own=own: own) for node, own in self.held.items()]
        try:
            edges, gradients = zip(*self.starts, strict=True)
            leaves = [leaf.variable for leaf in self.leaves]  # type: ignore[attr-defined]
            torch.autograd.backward(edges, gradients, retain_graph=len(self.joins) > 1, inputs=leaves)
        finally:
            for handle in handles:
                handle.remove()


def run_weight_passes(passes: Sequence[WeightPass]) -> None:
    """Stores the gradients of the weights in `.grad`.

    Passes with several joins run first: they may use nodes of other passes, which free the saved tensors.
    Passes with one join share no node, so they share the rerun of a recomputed layer. Before torch 2.10, each
    pass reruns the layer.
    """
    share_rerun = getattr(torch.utils.checkpoint, "GraphExecGroup", nullcontext)
    for one in passes:
        if len(one.joins) > 1:
            one.run()
    with share_rerun():
        for one in passes:
            if len(one.joins) < 2:
                one.run()


def run_input_pass(
    results: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[WeightPass]:
    """Stores the gradients of the inputs in `.grad`; returns the passes for the gradients of the weights."""
    edges = [get_gradient_edge(result) for result in results]
    path = _path([get_gradient_edge(value).node for value in inputs], [edge.node for edge in edges])
    apart: dict[Node, list[Start]] = {}
    for edge, gradient in zip(edges, gradients, strict=True):
        if edge.node not in path:
            apart.setdefault(edge.node, []).append((edge, gradient))
    joins = [node for node in path if any(child not in path for child in _children(node))]
    passes = _passes(path, joins, apart)
    held: dict[Node, tuple[torch.Tensor | None, ...]] = {}
    handles = [node.register_prehook(lambda own, node=node: held.update({node: own})) for node in joins]
    try:
        found = torch.autograd.grad(results, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    for value, gradient in zip(inputs, found, strict=True):
        value.grad = gradient
    for one in passes:
        one.held = {node: held[node] for node in one.joins if node in held}
        one.starts += [
            (GradientEdge(node, index), gradient)
            for node, own in one.held.items()
            for index, gradient in enumerate(own)
            if gradient is not None
        ]
    return [one for one in passes if one.starts]


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _path(inputs: Sequence[Node], results: Sequence[Node]) -> dict[Node, None]:
    """Returns the nodes on all paths from an input to a result, in the same order on every rank."""
    users: dict[Node, list[Node]] = {node: [] for node in results}
    waiting = list(users)
    while waiting:
        node = waiting.pop()
        for child in _children(node):
            if child not in users:
                users[child] = []
                waiting.append(child)
            users[child].append(node)
    path = dict.fromkeys(inputs)
    waiting = list(path)
    while waiting:
        for user in users.get(waiting.pop(), ()):
            if user not in path:
                path[user] = None
                waiting.append(user)
    return path


def _passes(
    path: dict[Node, None], joins: Sequence[Node], apart: dict[Node, list[Start]]
) -> list[WeightPass]:
    """Returns the passes: weights that share a join or a result of `apart`, even indirectly, share a pass."""
    pass_of: dict[Node, WeightPass] = {}
    for start in (*joins, *apart):
        is_join = start in path
        new = WeightPass(_leaves(start, path), [start] if is_join else [], list(apart.get(start, ())), {})
        for old in {id(pass_of[leaf]): pass_of[leaf] for leaf in new.leaves if leaf in pass_of}.values():
            new.leaves |= old.leaves
            new.joins = old.joins + new.joins
            new.starts = old.starts + new.starts
        pass_of |= dict.fromkeys(new.leaves, new)
    return list({id(one): one for one in pass_of.values()}.values())


def _leaves(start: Node, path: dict[Node, None]) -> dict[Node, None]:
    """Returns the weights that `start` depends on without passing another node of `path`."""
    seen: dict[Node, Any] = {start: None}
    waiting = [start]
    while waiting:
        for child in _children(waiting.pop()):
            if child not in path and child not in seen:
                seen[child] = None
                waiting.append(child)
    return {node: None for node in seen if hasattr(node, "variable")}
