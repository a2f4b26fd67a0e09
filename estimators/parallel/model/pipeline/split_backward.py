"""Splits a stage's backward pass: gradients of its inputs first, gradients of its weights later.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism". The stage before waits for the gradients of the inputs
only. On the way to them, this module keeps the gradient that reaches each node where a weight joins the
path from the inputs to the results. The second half starts at these nodes.

torch.distributed.pipelining splits too. It loses weights that reach a result without meeting an input, and
it fails on weights that are used twice (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# A gradient, and the place in the graph where it enters.
Start = tuple[GradientEdge, torch.Tensor]


@dataclass
class WeightPass:
    """The gradients of some weights that are still to be computed.

    Attributes:
        leaves: Nodes of the weights.
        joins: Nodes at which these weights join the path from the inputs.
        starts: Gradients of results that depend on these weights and on no input; later those of `joins` too.
        held: Gradients of the outputs of each join.
    """

    leaves: dict[Node, None]
    joins: list[Node]
    starts: list[Start]
    held: dict[Node, tuple[torch.Tensor | None, ...]]

    def run(self) -> None:
        """Adds the gradients of the weights to `.grad`."""
        handles = []
        if len(self.joins) > 1:
            # A weight that is used twice: the path from one join may lead to the other, and its gradient
            # holds what arrives there by this path already.
            handles = [node.register_prehook(lambda _, own=own: own) for node, own in self.held.items()]
        try:
            edges, gradients = zip(*self.starts, strict=True)
            leaves = [leaf.variable for leaf in self.leaves]  # type: ignore[attr-defined]
            torch.autograd.backward(edges, gradients, retain_graph=len(self.joins) > 1, inputs=leaves)
        finally:
            for handle in handles:
                handle.remove()


def input_pass(
    results: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[WeightPass]:
    """Adds the gradients of the inputs to `.grad`; returns the passes that compute those of the weights.

    Args:
        results: Tensors that require gradients.
        gradients: Gradients of the results.
        inputs: Leaves of the graph that require gradients.
    """
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
    # Passes with several joins may run through nodes of others, whose own pass frees what they saved.
    return sorted((one for one in passes if one.starts), key=lambda one: len(one.joins) < 2)


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _path(inputs: Sequence[Node], results: Sequence[Node]) -> dict[Node, None]:
    """Returns the nodes that lie on a path from an input to a result, in an order equal on all ranks."""
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
    """Returns one pass for all weights that share a join or a result, directly or through other weights."""
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
    """Returns the nodes of the weights that the node depends on by no way along the path."""
    seen: dict[Node, Any] = {start: None}
    waiting = [start]
    while waiting:
        for child in _children(waiting.pop()):
            if child not in path and child not in seen:
                seen[child] = None
                waiting.append(child)
    return {node: None for node in seen if hasattr(node, "variable")}
