"""Expert parallelism (Lepikhin et al. 2020, "GShard"): ranks compute their experts for the rows of all ranks.

An all-to-all sends each token to the rank of its expert, and another one returns it. Every rank runs the same
mixtures in the same order, forward, backward and in recomputation. A rank without rows sends empty tensors.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.shard_spec import ShardSpec, copy_shard, shard_length
from ringspark.extras.experts.layer import Experts, MixtureOfExperts
from ringspark.extras.model_parallel.communication import all_to_all
from ringspark.models.adapters import find_library
from ringspark.models.module_hooks import find_hook, has_gradient_hook

AXIS = "expert"
_CUT = ShardSpec(AXIS, 0)


class ExpertAllToAll:
    def __init__(self, num_experts: int, collective: Collective) -> None:
        self._collective = collective
        self._lengths = [shard_length(num_experts, rank, collective.size) for rank in range(collective.size)]

    def __call__(self, experts: Experts, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Returns the experts' outputs for this rank's rows, in the order of experts. Runs on every rank.

        `sizes` is this rank's number of rows for each expert, over the experts of all ranks.
        """
        collective, own = self._collective, self._lengths[self._collective.rank]
        arriving = self._arriving(rows, sizes)  # (ranks, own experts)
        rest = iter(sizes)
        sent = [sum(islice(rest, length)) for length in self._lengths]
        counts = [sum(row) for row in arriving]
        # The same dtype on all ranks: a rank without rows may run outside autocast.
        wide = torch.promote_types(rows.dtype, torch.float32)
        moved = all_to_all(rows.to(wide), sent, counts, collective)
        # Rows arrive by rank and expert; sort them by expert.
        flat = [count for row in arriving for count in row]
        numbers = (
            torch.arange(own)
            .repeat(collective.size)
            .repeat_interleave(torch.tensor(flat), output_size=sum(flat))
        )
        order = numbers.argsort(stable=True).to(rows.device)
        here: list[int] = [sum(column) for column in zip(*arriving, strict=True)]
        computed = experts(moved.index_select(0, order), here)
        back = computed.to(wide).index_select(0, order.argsort())
        return all_to_all(back, counts, sent, collective)

    def _arriving(self, rows: torch.Tensor, sizes: list[int]) -> list[list[int]]:
        """Returns the number of rows from each rank for each expert of this rank."""
        collective = self._collective
        first = sum(self._lengths[: collective.rank])
        own = slice(first, first + self._lengths[collective.rank])
        gathered = collective.all_gather(torch.tensor(sizes), [len(sizes)] * collective.size)
        if rows.is_meta or isinstance(rows, FakeTensor):
            # A plan has no values: assume that every rank has the same sizes.
            return [sizes[own]] * collective.size
        return [counts.tolist()[own] for counts in gathered]


def shard_experts(module: nn.Module, collective: Collective) -> dict[str, ShardSpec]:
    """Deletes other ranks' experts from each mixture, in place; returns the sharded parameters by name."""
    mixtures: dict[str, Any] = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, MixtureOfExperts)
    }
    if not mixtures and (support := find_library(module)) is not None:
        mixtures = support.prepare_experts(module)
    if not mixtures:
        raise ValueError(
            f"parallelism over 'expert' needs a mixture of experts, and {type(module).__name__} has none; "
            "give the model 'experts', or leave 'expert' out of parallelism"
        )
    cuts: dict[str, ShardSpec] = {}
    for name, mixture in mixtures.items():
        if mixture.num_experts < collective.size:
            raise ValueError(
                f"parallelism gives 'expert' {collective.size} workers, more than the {mixture.num_experts} "
                f"experts of {name!r}; give at most {mixture.num_experts}"
            )
        hook = "a gradient hook" if has_gradient_hook(mixture.experts) else find_hook(mixture.experts)
        if hook is not None:
            raise ValueError(
                f"the experts of {name!r} have {hook}, which would see rows of other workers, because "
                "parallelism has 'expert'; put it on the mixture of experts, or leave 'expert' out"
            )
        mixture.dispatch = ExpertAllToAll(mixture.num_experts, collective)
        for key, parameter in mixture.experts.named_parameters(f"{name}.experts" if name else "experts"):
            parameter.data = copy_shard(parameter.data, _CUT, collective.rank, collective.size)
            cuts[key] = _CUT
    return cuts


def expert_names(module: nn.Module) -> frozenset[str]:
    found = {name: layer for name, layer in module.named_modules() if isinstance(layer, Experts)}
    if not found and (support := find_library(module)) is not None:
        found = support.find_experts(module)
    return frozenset(
        f"{name}.{key}" if name else key
        for name, layer in found.items()
        for key, _ in layer.named_parameters()
    )
