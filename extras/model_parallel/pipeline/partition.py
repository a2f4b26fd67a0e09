"""Partitions a chain of layers into stages, by cost or by the names of the stages' first layers.

All ranks must agree, so costs are counted and not timed. The cost of a layer is the number of floating-point
operations of one micro-batch's forward pass, plus its number of parameters, which each step reads and writes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence

import torch
from torch import nn

from ringspark.estimators.names import nearest
from ringspark.models.chain import Link, as_values, belongs_to
from ringspark.models.recompute import keep_random_state


def partition_by_cost(
    links: Sequence[Link], num_stages: int, costs: Sequence[float] | None = None
) -> list[int]:
    """Partitions the layers into consecutive stages so that the most expensive stage is as cheap as possible.

    Uses dynamic programming, which is exact. Equal partitions are compared by the sum of squared costs.

    Returns:
        The index of the first layer of every stage, and the number of layers.
    """
    if num_stages > len(links):
        raise ValueError(
            f"a pipeline of {num_stages} stages needs at least {num_stages} layers, but the network has "
            f"{len(links)}: {', '.join(link.name for link in links)}; take fewer stages, or a deeper network"
        )
    values = [1.0] * len(links) if costs is None else list(costs)
    assert len(values) == len(links)
    sums = [0.0, *itertools.accumulate(values)]
    # Best partition of the first `end` layers: end -> (largest cost, sum of squares, first layers).
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(1, num_stages + 1):
        best = {
            end: min(
                (
                    max(largest, sums[end] - sums[begin]),
                    squares + (sums[end] - sums[begin]) ** 2,
                    [*cut, begin],
                )
                for begin, (largest, squares, cut) in best.items()
                if begin < end
            )
            for end in range(stage, len(links) - (num_stages - stage) + 1)
        }
    return [*best[len(links)][2], len(links)]


def partition_by_names(links: Sequence[Link], num_stages: int, names: Sequence[str]) -> list[int]:
    """Like `partition_by_cost`; the named layers begin the second and later stages."""
    known = {link.name: index for index, link in enumerate(links)}
    for name in names:
        if name not in known:
            raise ValueError(
                f"a stage must begin at one of {', '.join(known)}, got {name!r}{nearest(name, known)}"
            )
    firsts = [0, *(known[name] for name in names)]
    if len(firsts) != num_stages or firsts != sorted(set(firsts)):
        raise ValueError(
            f"{num_stages} stages need the names of {num_stages - 1} layers that begin the second and later "
            f"stages, in the network's order and none twice, got {list(names)}; the layers are "
            f"{', '.join(known)}"
        )
    return [*firsts, len(links)]


def measure_costs(network: nn.Module, links: Sequence[Link], inputs: Sequence[torch.Tensor]) -> list[float]:
    """Returns the floating-point operations and parameters of each layer; leaves the network unchanged."""
    from torch.utils.flop_counter import FlopCounterMode

    was_training = [module for module in network.modules() if module.training]
    costs = [float(count) for count in count_parameters(network, links)]
    values: tuple[torch.Tensor | None, ...] = tuple(inputs)
    network.eval()
    try:
        # Where one kernel computes a whole LSTM, its products are not counted.
        # None keeps a flag as it is; torch 2.6 has fewer of them.
        flags = torch.backends.mkldnn.flags
        unchanged = [None] * (len(inspect.signature(flags).parameters) - 1)
        as_products = (flags(False, *unchanged), torch.backends.cudnn.flags(enabled=False))
        with torch.no_grad(), keep_random_state(), as_products[0], as_products[1]:
            for index, link in enumerate(links):
                with FlopCounterMode(display=False) as counter:
                    result = link.run(*values)
                costs[index] += counter.get_total_flops()
                if index + 1 < len(links):
                    values = as_values(result, links[index + 1].name)
    finally:
        for module in was_training:
            module.training = True
    return costs


def count_parameters(network: nn.Module, links: Sequence[Link]) -> list[int]:
    sizes = {name: p.numel() for name, p in network.named_parameters()}
    return [
        sum(size for name, size in sizes.items() if any(belongs_to(name, part) for part in link.parts))
        for link in links
    ]
