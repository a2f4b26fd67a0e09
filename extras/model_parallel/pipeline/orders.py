"""The orders in which the ranks of a pipeline run the passes of one step.

An order has one list of actions per position along the pipeline. With p ranks, m micro-batches, v stages per
rank, and a backward pass that takes as long as two forward passes, the ranks wait for this share of a step:

| schedule | share | micro-batches with activations, by rank |
| --- | --- | --- |
| naive | (p-1)/p | 1 |
| gpipe | (p-1)/(m+p-1) | m |
| 1f1b | (p-1)/(m+p-1) | p, p-1, .., 1 |
| interleaved | (p-1)/(vm+p-1) | (v-1)p + 2p-1, .. 2 fewer per rank |
| zero_bubble, zbv | (p-1)/(3vm+p-1) | vp |

The last two rows hold if m is a multiple of p and at least 2p. Other m of at least 2p come close.

Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training
on GPU Clusters Using Megatron-LM" (interleaved); Qi et al. 2023, "Zero Bubble Pipeline Parallelism".
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ringspark.extras.model_parallel.pipeline.actions import Action, PassType

Orders = list[list[Action]]

_F, _B = PassType.FORWARD, PassType.BACKWARD


def naive(num_ranks: int, virtual: int, num_micro: int) -> Orders:
    """Runs each micro-batch through all stages and back: one rank works at a time."""
    return [
        [Action(kind, stage, micro) for micro in range(num_micro) for kind in (_F, _B)]
        for stage in range(num_ranks)
    ]


def gpipe(num_ranks: int, virtual: int, num_micro: int) -> Orders:
    """Runs all forward passes, then all backward passes."""
    return [
        [Action(kind, stage, micro) for kind in (_F, _B) for micro in range(num_micro)]
        for stage in range(num_ranks)
    ]


def one_forward_one_backward(num_ranks: int, virtual: int, num_micro: int) -> Orders:
    """Runs each backward pass as soon as possible, so that few activations live (PipeDream-Flush)."""
    orders: Orders = []
    for stage in range(num_ranks):
        ahead = min(num_ranks - 1 - stage, num_micro)
        order = [Action(_F, stage, micro) for micro in range(ahead)]
        for micro in range(num_micro):
            if ahead + micro < num_micro:
                order.append(Action(_F, stage, ahead + micro))
            order.append(Action(_B, stage, micro))
        orders.append(order)
    return orders


def order_of_torch(name: str, num_ranks: int, virtual: int, num_micro: int) -> Orders:
    """Returns the order of torch's schedule called `name`."""
    # A late import: it imports torch's compiler, which takes seconds.
    from torch.distributed.pipelining import schedules

    kind = getattr(schedules, name, None)
    if kind is None:
        import torch

        raise ValueError(
            f"this pipeline schedule needs torch's {name}, which torch {torch.__version__} lacks; install "
            "torch 2.7 or newer, or set schedule='1f1b'"
        )
    # torch needs rounds of equally many micro-batches; superfluous ones are removed below.
    whole = num_micro
    while whole % max(1, whole // num_ranks):
        whole += 1
    # The constructor only reads the stages' numbers.
    stage: Any = SimpleNamespace(
        group_rank=0, group_size=num_ranks, num_stages=num_ranks * virtual, submod=None, has_backward=True
    )
    order = kind([stage] * virtual, whole).pipeline_order
    return [
        [
            Action(PassType(action.computation_type.value), action.stage_index, action.microbatch_index)
            for action in order[rank]
            if action is not None
            and action.computation_type.value in "FBIW"
            and action.microbatch_index < num_micro
        ]
        for rank in range(num_ranks)
    ]
