"""Tensor parallelism: each rank has a part of every large matrix, and computes with all rows.

Shoeybi et al. 2019, "Megatron-LM": of two layers in a row, the first is cut by its outputs and the second by
its inputs, so that between them nothing is exchanged: one all-reduce in the forward pass after the second,
and one in the backward pass before the first. Attention is such a pair of whole heads. A table of embeddings
is cut by its ids.

A plan says which layer is cut in which way: a pattern over names of modules -> a style, and for "column" how
many blocks its outputs are. Networks of `models` have plans; a user gives her own for hers.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ringspark.estimators.collectives import Collective
from ringspark.estimators.names import nearest
from ringspark.estimators.parallel.model.communication import copied, joined, summed
from ringspark.estimators.parallel.model.cut import Cut, part_of

AXIS = "tensor"


class ColumnLinear(nn.Module):
    """A linear layer of which this rank computes some outputs: (..., in) -> (..., part of out)."""

    def __init__(
        self, layer: nn.Linear, collective: Collective, blocks: int = 1, joins: bool = False
    ) -> None:
        super().__init__()
        self._collective, self._joins = collective, joins
        self._outputs = layer.out_features if blocks == 1 else None
        cut = Cut(AXIS, 0, blocks)
        self.weight = _parameter(layer.weight, cut, collective)
        self.bias = None if layer.bias is None else _parameter(layer.bias, cut, collective)
        self.cuts = {"weight": cut} if layer.bias is None else {"weight": cut, "bias": cut}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(copied(x, self._collective), self.weight, self.bias)
        return joined(out, -1, self._collective, self._outputs) if self._joins else out


class RowLinear(nn.Module):
    """A linear layer of which this rank has some inputs: (..., part of in) -> (..., out), whole."""

    def __init__(self, layer: nn.Linear, collective: Collective) -> None:
        super().__init__()
        self._collective = collective
        cut = Cut(AXIS, 1)
        self.weight = _parameter(layer.weight, cut, collective)
        self.bias = layer.bias
        self.cuts = {"weight": cut}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = summed(F.linear(x, self.weight), self._collective)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class VocabularyEmbedding(nn.Module):
    """A table of embeddings of which this rank has some ids: (...) -> (..., dim), whole."""

    def __init__(self, layer: nn.Embedding, collective: Collective) -> None:
        super().__init__()
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise ValueError(
                "a table of embeddings is cut by its ids, and max_norm or scale_grad_by_freq look at all of "
                "them; make the layer without, or leave it out of the plan"
            )
        self.collective = collective
        cut = Cut(AXIS, 0)
        lengths = [len(part_of(layer.weight, cut, r, collective.size)) for r in range(collective.size)]
        self._first = sum(lengths[: collective.rank])
        self.num_ids = sum(lengths)
        self._padding = layer.padding_idx
        self.weight = _parameter(layer.weight, cut, collective)
        self.cuts = {"weight": cut}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self._first
        is_here = (local >= 0) & (local < len(self.weight))
        # An id that no rank has must fail on all of them, as in a whole table, and not count as zeros.
        is_known = (ids >= 0) & (ids < self.num_ids)
        found = F.embedding(torch.where(is_here, local, torch.where(is_known, 0, -1)), self.weight)
        keeps = is_here if self._padding is None else is_here & (ids != self._padding)
        if self._padding is not None:
            # A padding row is looked up but never trained.
            found = torch.where(keeps.unsqueeze(-1), found, found.detach())
        return summed(found.masked_fill(~is_here.unsqueeze(-1), 0), self.collective)


def scores(x: torch.Tensor, tokens: nn.Module) -> torch.Tensor:
    """Compares (..., dim) with the embeddings of all ids, of which each rank has some: (..., ids), whole."""
    assert isinstance(tokens, VocabularyEmbedding)
    own = F.linear(copied(x, tokens.collective), tokens.weight)
    return joined(own, -1, tokens.collective, tokens.num_ids)


def _parameter(whole: torch.Tensor, cut: Cut, collective: Collective) -> nn.Parameter:
    part = part_of(whole.detach(), cut, collective.rank, collective.size)
    return nn.Parameter(part, requires_grad=whole.requires_grad)


def _column(layer: nn.Module, collective: Collective, blocks: int) -> nn.Module:
    outputs = _linear(layer).out_features
    if blocks < 1 or outputs % blocks:
        raise ValueError(f"its {outputs} outputs are not {blocks} equal blocks")
    return ColumnLinear(_linear(layer), collective, blocks)


def _column_joined(layer: nn.Module, collective: Collective, blocks: int) -> nn.Module:
    # Parts of several blocks, one rank's after the other's, would be outputs in another order.
    _without_blocks("column_joined", blocks)
    return ColumnLinear(_linear(layer), collective, joins=True)


def _row(layer: nn.Module, collective: Collective, blocks: int) -> nn.Module:
    _without_blocks("row", blocks)
    return RowLinear(_linear(layer), collective)


def _without_blocks(style: str, blocks: int) -> None:
    if blocks != 1:
        raise ValueError(f"style {style!r} takes no blocks, got {blocks}")


def _vocabulary(layer: nn.Module, collective: Collective, blocks: int) -> nn.Module:
    _without_blocks("vocabulary", blocks)
    if not isinstance(layer, nn.Embedding):
        raise ValueError(f"style 'vocabulary' is for nn.Embedding, got {type(layer).__name__}")
    return VocabularyEmbedding(layer, collective)


def _linear(layer: nn.Module) -> nn.Linear:
    if type(layer) is not nn.Linear:
        raise ValueError(f"styles of columns and rows are for nn.Linear, got {type(layer).__name__}")
    return layer


# Name -> what takes the layer's place.
STYLES: dict[str, Any] = {
    "column": _column,
    "column_joined": _column_joined,
    "row": _row,
    "vocabulary": _vocabulary,
}

# Patterns for networks of transformers: attention's projections, gated and plain perceptrons.
HUGGING_FACE: dict[str, Any] = {
    "*.q_proj": "column",
    "*.k_proj": "column",
    "*.v_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
    "*.attention.self.query": "column",
    "*.attention.self.key": "column",
    "*.attention.self.value": "column",
    "*.attention.output.dense": "row",
    "*.intermediate.dense": "column",
    "*.layer.*.output.dense": "row",
}


def plan_of(module: nn.Module, num_ranks: int) -> dict[str, Any]:
    """Returns the plan of a network: its own `tensor_plan(num_ranks)`, or that of a network of transformers.

    Raises:
        ValueError: There is none, or none for so many ranks.
    """
    own = getattr(module, "tensor_plan", None)
    if callable(own):
        return dict(own(num_ranks))
    if type(module).__module__.startswith("transformers."):
        _check_heads(module, num_ranks)
        return HUGGING_FACE
    raise ValueError(
        f"parallelism over 'tensor' needs a plan of which layers are cut, and {type(module).__name__} has "
        "none; give it a method tensor_plan(ranks), or set parallelism's 'plan', such as {'blocks.*.up': "
        "'column', 'blocks.*.down': 'row'}"
    )


def _check_heads(module: Any, num_ranks: int) -> None:
    config = getattr(module, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % num_ranks:
            raise ValueError(
                f"parallelism's 'tensor' ({num_ranks}) must divide the network's {name}, got {heads}"
            )


def spread_tensor(module: nn.Module, collective: Collective, plan: Mapping[str, Any]) -> dict[str, Cut]:
    """Replaces the layers of a plan by this rank's parts, in place; returns the cut parameters by name.

    Args:
        plan: Pattern over names of modules -> style, or [style, blocks].

    Raises:
        ValueError: A style is unknown, a pattern fits no layer, or a layer cannot be cut that way.
    """
    layers = dict(module.named_modules())
    names: dict[int, list[str]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        names.setdefault(id(layer), []).append(name)
    uses: dict[int, int] = {}
    for owner in layers.values():
        for parameter in owner.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    cuts: dict[str, Cut] = {}
    done: set[str] = set()
    unused = []
    for pattern, given in plan.items():
        style, blocks = _style(pattern, given)
        if style not in STYLES:
            raise ValueError(
                f"a plan's style must be one of {', '.join(STYLES)}, got {style!r}"
                f"{nearest(str(style), STYLES)}"
            )
        found = [
            own[0]
            for own in names.values()
            if any(fnmatchcase(name, pattern) for name in own) and own[0] not in done
        ]
        if not found:
            unused.append(pattern)
        for name in found:
            layer = layers[name]
            if len(names[id(layer)]) > 1:
                # The other name would keep the whole layer, with weights of its own from now on.
                first, other, *_ = sorted(names[id(layer)], key=lambda own: not fnmatchcase(own, pattern))
                raise ValueError(
                    f"parallelism's plan cuts {first!r}, which the network has as {other!r} too; leave it out"
                )
            if any(uses[id(p)] > 1 for p in layer.parameters(recurse=False)):
                raise ValueError(
                    f"parallelism's plan cuts {name!r}, whose weights another layer uses too; leave it out"
                )
            try:
                part = STYLES[style](layer, collective, blocks)
            except ValueError as error:
                raise ValueError(f"parallelism's plan cannot cut {name!r}: {error}") from None
            smallest = min(p.shape[cut.dim] for p, cut in _cut_parameters(part))
            if smallest < 1:
                raise ValueError(
                    f"parallelism gives 'tensor' {collective.size} workers, more than {name!r} has parts"
                )
            part.train(layer.training)
            if isinstance(part, VocabularyEmbedding) and hasattr(module, "scores"):
                vars(module)["scores"] = scores
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, part)
            cuts |= {f"{name}.{key}": cut for key, cut in part.cuts.items()}
            done.add(name)
    if unused and plan is not HUGGING_FACE:
        raise ValueError(f"parallelism's plan names {unused[0]!r}, which fits no layer; leave it out")
    if not cuts:
        raise ValueError(f"parallelism's plan fits no layer of {type(module).__name__}; set its 'plan'")
    return cuts


def _style(pattern: str, given: Any) -> tuple[Any, int]:
    """Returns the style and the number of blocks that a plan gives for a pattern."""
    if not isinstance(given, list | tuple):
        return given, 1
    if len(given) != 2 or not isinstance(given[1], int):
        raise ValueError(
            f"parallelism's plan for {pattern!r} must be a style or [style, blocks], got {list(given)!r}"
        )
    return given[0], given[1]


def _cut_parameters(part: Any) -> list[tuple[torch.Tensor, Cut]]:
    return [(getattr(part, name), cut) for name, cut in part.cuts.items()]
