"""Expert parallelism: each rank has some of the experts, and computes them for the rows of all ranks.

Lepikhin et al. 2020, "GShard": ranks along the axis `expert` read different rows and route their own tokens;
an all-to-all takes each token to the rank of its expert, and another one brings it back. The router and all
else in the network is whole on every rank.

Which expert gets which token is decided inside a row (`models.experts.routing`), so it is the same for any
number of ranks, and so are the drops. Invariant: every rank runs the same mixtures in the same order, as
often as the others, forward, backward and when recomputed; a rank without rows runs them on none.
"""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ringspark.estimators.collectives import Collective
from ringspark.estimators.parallel.cut import Cut, length_of_part, part_of
from ringspark.estimators.parallel.model.communication import exchanged
from ringspark.models.experts.layer import Experts, MixtureOfExperts
from ringspark.models.module_hooks import find_hook, has_gradient_hook

AXIS = "expert"
_CUT = Cut(AXIS, 0)


class TokenExchange:
    """Has rows computed by experts that are spread over the ranks of a collective."""

    def __init__(self, num_experts: int, collective: Collective) -> None:
        self._collective = collective
        self._lengths = [
            length_of_part(num_experts, rank, collective.size) for rank in range(collective.size)
        ]

    def __call__(self, experts: Experts, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """Returns the experts' outputs for this rank's rows, (rows, dim). Runs on every rank.

        Args:
            experts: Those of this rank.
            rows: (rows, dim), those for the first expert of all ranks first.
            sizes: Number of rows for each expert of all ranks.
        """
        collective, own = self._collective, self._lengths[self._collective.rank]
        arriving = self._arriving(rows, sizes)  # (ranks, own experts)
        sent = [sum(part) for part in _parts(sizes, self._lengths)]
        counts = [sum(row) for row in arriving]
        # One dtype on all ranks: one without rows may run outside of the others' autocast.
        wide = torch.promote_types(rows.dtype, torch.float32)
        moved = exchanged(rows.to(wide), sent, counts, collective)
        # Rank by rank, and in each expert by expert: the experts need theirs together.
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
        return exchanged(back, counts, sent, collective)

    def _arriving(self, rows: torch.Tensor, sizes: list[int]) -> list[list[int]]:
        """Returns the number of rows from each rank for each expert of this rank."""
        collective = self._collective
        first = sum(self._lengths[: collective.rank])
        own = slice(first, first + self._lengths[collective.rank])
        told = collective.all_gather(torch.tensor(sizes), [len(sizes)] * collective.size)
        if rows.is_meta or isinstance(rows, FakeTensor):
            # A plan knows no numbers: every rank's tokens are dealt as this one's are, evenly.
            return [sizes[own]] * collective.size
        return [counts.tolist()[own] for counts in told]


def spread_experts(module: nn.Module, collective: Collective) -> dict[str, Cut]:
    """Leaves this rank its experts of each mixture, in place; returns the cut parameters by name.

    Args:
        module: The whole network, with equal weights on all ranks.
        collective: The ranks along the axis `expert`.

    Raises:
        ValueError: There is no mixture, or one has fewer experts than there are ranks.
    """
    mixtures = {n: layer for n, layer in module.named_modules() if isinstance(layer, MixtureOfExperts)}
    if not mixtures:
        raise ValueError(
            f"parallelism over 'expert' needs a mixture of experts, and {type(module).__name__} has none; "
            "give the model 'experts', or leave 'expert' out of parallelism"
        )
    cuts: dict[str, Cut] = {}
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
        mixture.dispatch = TokenExchange(mixture.num_experts, collective)
        for key, parameter in mixture.experts.named_parameters(f"{name}.experts" if name else "experts"):
            parameter.data = part_of(parameter.data, _CUT, collective.rank, collective.size)
            cuts[key] = _CUT
    return cuts


def expert_names(module: nn.Module) -> frozenset[str]:
    """Returns the names of the experts' parameters, whose gradients ranks with other experts do not share."""
    return frozenset(
        f"{name}.{key}" if name else key
        for name, layer in module.named_modules()
        if isinstance(layer, Experts)
        for key, _ in layer.named_parameters()
    )


def _parts(sizes: list[int], lengths: list[int]) -> list[list[int]]:
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    return [sizes[end - length : end] for end, length in zip(ends, lengths, strict=True)]
