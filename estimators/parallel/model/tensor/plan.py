"""Tensor parallelism: each rank has a part of every large matrix, and computes with all rows.

Shoeybi et al. 2019, "Megatron-LM": of two layers in a row, the first is cut by its outputs and the second by
its inputs, so that between them nothing is exchanged: one all-reduce in the forward pass after the second,
and one in the backward pass before the first. Attention is such a pair of whole heads. A table of embeddings
is cut by its ids.

Between such pairs, values are whole on every rank, or each has its part of the tokens (`between.py`).

A plan says which layer is cut in which way: a pattern over names of modules -> a style, and for "column" how
many blocks its outputs are. Networks of `models` have plans; a user gives her own for hers.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.names import nearest
from ringspark.estimators.parallel.cut import Cut
from ringspark.estimators.parallel.model.tensor.between import PartRows, PartsBetween, WholeBetween
from ringspark.estimators.parallel.model.tensor.draws import OwnDraws
from ringspark.estimators.parallel.model.tensor.grid import GridLinear, Grids, grids_without_peers
from ringspark.estimators.parallel.model.tensor.hugging_face import PLAN as HUGGING_FACE
from ringspark.estimators.parallel.model.tensor.hugging_face import check_heads, check_whole_blocks
from ringspark.estimators.parallel.model.tensor.layers import (
    ColumnLinear,
    Region,
    RowLinear,
    VocabularyEmbedding,
)
from ringspark.estimators.parallel.model.tensor.loss import Scores
from ringspark.models.module_hooks import find_hook, has_gradient_hook
from ringspark.models.reports import CountingLayer
from ringspark.models.transformer import TransformerLM, scores
from ringspark.models.whole_rows import WholeRows

# What the layers between cut ones work on.
BETWEEN = ("whole", "parts")

# Layers that an error names at most.
_NAMED = 12


def _column(layer: nn.Module, region: Region, blocks: int) -> nn.Module:
    outputs = _linear(layer).out_features
    if blocks < 1 or outputs % blocks:
        raise ValueError(f"its {outputs} outputs are not {blocks} equal blocks")
    return ColumnLinear(_linear(layer), region, blocks)


def _column_joined(layer: nn.Module, region: Region, blocks: int) -> nn.Module:
    # Parts of several blocks, one rank's after the other's, would be outputs in another order.
    _without_blocks("column_joined", blocks)
    _without_parts("column_joined", region)
    return ColumnLinear(_linear(layer), region, joins=True)


def _row(layer: nn.Module, region: Region, blocks: int) -> nn.Module:
    _without_blocks("row", blocks)
    return RowLinear(_linear(layer), region)


def _grid(layer: nn.Module, region: Region, grid: tuple[int, int] | int) -> nn.Module:
    if isinstance(grid, int):
        raise ValueError("style 'grid' takes workers along outputs and inputs, as ['grid', [2, 2]]")
    _without_parts("grid", region)
    return GridLinear(_linear(layer), region.collective, region.grids, grid)


def _without_parts(style: str, region: Region) -> None:
    if isinstance(region.between, PartsBetween):
        raise ValueError(
            f"style {style!r} leaves all tokens on every worker, and 'between' \"parts\" gives each its own; "
            "take 'column' and 'row' in pairs, or set 'between' to \"whole\""
        )


def _without_blocks(style: str, blocks: int) -> None:
    if blocks != 1:
        raise ValueError(f"style {style!r} takes no blocks, got {blocks}")


def _vocabulary(layer: nn.Module, region: Region, blocks: int) -> nn.Module:
    _without_blocks("vocabulary", blocks)
    # A subclass may scale its outputs. `parametrize` makes a subclass too, which `_check_plain` refuses.
    if not isinstance(layer, nn.Embedding) or type(layer).forward is not nn.Embedding.forward:
        raise ValueError(f"style 'vocabulary' is for nn.Embedding, got {type(layer).__name__}")
    return VocabularyEmbedding(layer, region)


def _linear(layer: nn.Module) -> nn.Linear:
    if type(layer) is not nn.Linear:
        raise ValueError(f"styles of columns and rows are for nn.Linear, got {type(layer).__name__}")
    return layer


def _check_plain(layer: nn.Module) -> None:
    """Refuses a layer that computes or holds more than its class does, because its shard would not.

    Raises:
        ValueError: The layer has a hook, a computed weight, or further tensors.
    """
    hook = "a gradient hook" if has_gradient_hook(layer) else find_hook(layer)
    if hook is not None:
        raise ValueError(
            f"it has {hook}, which its shards do not run; put it on the module around the layer, or leave "
            "the layer out of the plan"
        )
    own = {*layer._parameters, *layer._buffers, *layer._modules}
    if "weight" not in layer._parameters or own - {"weight", "bias"}:
        raise ValueError(
            f"it holds {', '.join(sorted(own))}, but its shards have only a weight and a bias; leave the "
            "layer out of the plan"
        )


def _avoid_fast_paths(module: nn.Module) -> None:
    """Disables the fast path of torch's transformer layers with sharded layers.

    In evaluation mode the fast path reads the weights directly and does not call the sharded layers.
    """
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and any(
            hasattr(c, "cuts") for c in layer.children()
        ):
            layer.activation_relu_or_gelu = 0
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoder) and any(
            getattr(own, "activation_relu_or_gelu", None) == 0 for own in layer.layers
        ):
            layer.use_nested_tensor = False


# Name -> what takes the layer's place.
STYLES: dict[str, Any] = {
    "column": _column,
    "column_joined": _column_joined,
    "row": _row,
    "grid": _grid,
    "vocabulary": _vocabulary,
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
        check_heads(module, num_ranks)
        check_whole_blocks(module)
        return HUGGING_FACE
    raise ValueError(
        f"parallelism over 'tensor' needs a plan of which layers are cut, and {type(module).__name__} has "
        "none; give it a method tensor_plan(ranks), or set parallelism's 'plan', such as {'blocks.*.up': "
        "'column', 'blocks.*.down': 'row'}"
    )


def region_of(collective: Collective, between: str = "whole", grids: Grids | None = None) -> Region:
    """Returns what the cut layers of one network share.

    Args:
        between: One of `BETWEEN`.
        grids: Makes grids of the ranks; None for a rank whose peers are not there.
    """
    grids = grids or grids_without_peers(collective)
    if between == "parts":
        # Every rank has other tokens between the regions, and other units inside.
        return Region(collective, PartsBetween(collective), None, grids)
    return Region(collective, WholeBetween(collective), OwnDraws(collective), grids)


def check_parts(module: nn.Module, sizes: Mapping[str, int]) -> None:
    """Refuses, of a whole network, parts of the tokens between cut layers; needs no rank.

    Args:
        sizes: Number of ranks along each axis.

    Raises:
        ValueError: The network or another axis does not go with it.
    """
    name = type(module).__name__
    if not isinstance(getattr(module, "rows", None), WholeRows):
        raise ValueError(
            f"model {name} cannot have parts of the tokens between its cut layers: it needs an attribute "
            "`rows`, a WholeRows of ringspark.models.whole_rows that it asks for its tokens; take "
            "transformer_classifier or transformer_lm, or set parallelism's 'between' to \"whole\""
        )
    counting = [key for key, layer in module.named_modules() if isinstance(layer, CountingLayer)]
    if counting:
        raise ValueError(
            f"parallelism's 'between' \"parts\" leaves each worker a part of what layer {counting[0]!r} adds "
            'to the loss of whole rows; set it to "whole", or take a network without experts'
        )
    if sizes["pipeline"] > 1:
        raise ValueError(
            "parallelism has 'between' \"parts\" and a 'pipeline', and a stage does not know how long the "
            "rows are of which it gets a part; set 'between' to \"whole\", or 'pipeline' to 1"
        )


def _check_between(module: nn.Module, region: Region) -> None:
    """Refuses, of a network that is cut, whole layers that look at all tokens where they would get a part.

    Raises:
        ValueError: There is such a layer.
    """
    if not isinstance(region.between, PartsBetween):
        return
    for name, layer in module.named_modules():
        gathers = any(isinstance(part, ColumnLinear) for part in layer.modules())
        if callable(getattr(layer, "attend", None)) and not gathers:
            raise ValueError(
                f"parallelism's 'between' \"parts\" leaves layer {name!r} a part of the tokens, and it "
                "looks at all of them; have 'plan' cut it too, or set 'between' to \"whole\""
            )


def spread_between(module: nn.Module, region: Region) -> None:
    """Has the layers between the cut ones work on parts of the tokens, if the region's values are such.

    Runs after `spread_tensor`, and after the rows are spread otherwise.
    """
    if isinstance(region.between, PartsBetween):
        is_cut = isinstance(getattr(module, "tokens", None), VocabularyEmbedding)
        module.rows = PartRows(module.rows, region.between, is_table_cut=is_cut)  # type: ignore[arg-type, assignment]
        OwnDraws(region.collective).watch(module, always=True)


def spread_tensor(module: nn.Module, region: Region, plan: Mapping[str, Any]) -> dict[str, Cut]:
    """Replaces the layers of a plan by this rank's parts, in place; returns the cut parameters by name.

    Args:
        plan: Pattern over names of modules -> style, [style, blocks], or ["grid", [rows, columns]].

    Raises:
        ValueError: A style is unknown, a pattern fits no layer, or a layer cannot be cut, or left whole, so.
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
                part = STYLES[style](layer, region, blocks)
                _check_plain(layer)
            except ValueError as error:
                raise ValueError(f"parallelism's plan cannot cut {name!r}: {error}") from None
            if any(getattr(part, key).numel() < 1 for key in part.cuts):
                raise ValueError(
                    f"parallelism gives 'tensor' {region.collective.size} workers, more than {name!r} can be "
                    "cut into; give fewer, or leave it out of the plan"
                )
            part.train(layer.training)
            if isinstance(part, VocabularyEmbedding):
                is_tokens = layer is getattr(module, "tokens", None)
                if is_tokens:
                    _compare_with_parts(module, name, part)
                if not is_tokens and isinstance(region.between, PartsBetween):
                    raise ValueError(
                        f"parallelism's plan cuts {name!r} by ids, which with 'between' \"parts\" only "
                        "`tokens` can be; leave it out"
                    )
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, part)
            cuts |= {f"{name}.{key}": cut for key, cut in part.cuts.items()}
            done.add(name)
    if unused and plan is not HUGGING_FACE:
        known = [own[0] for own in names.values() if isinstance(layers[own[0]], nn.Linear | nn.Embedding)]
        more = ", ..." if len(known) > _NAMED else ""
        raise ValueError(
            f"parallelism's plan names {unused[0]!r}, which fits no layer; leave it out, or name some of "
            f"{', '.join(known[:_NAMED])}{more}"
        )
    if not cuts:
        raise ValueError(f"parallelism's plan fits no layer of {type(module).__name__}; set its 'plan'")
    _check_between(module, region)
    _avoid_fast_paths(module)
    if region.draws is not None:
        region.draws.watch(module)
    return cuts


def _compare_with_parts(module: nn.Module, name: str, table: VocabularyEmbedding) -> None:
    """Has a language model compare with the ids of all ranks, where its table is cut."""
    if not isinstance(module, TransformerLM):
        return
    if module.scores is not scores:
        raise ValueError(
            f"parallelism's plan cuts {name!r} by ids, and {type(module).__name__} has its own `scores`, "
            "which would compare with one worker's ids alone; set 'plan' to one without it"
        )
    vars(module)["scores"] = Scores(table)


def _style(pattern: str, given: Any) -> tuple[Any, Any]:
    """Returns the style and the number of blocks, or the grid, that a plan gives for a pattern."""
    if not isinstance(given, list | tuple):
        return given, 1
    if len(given) == 2 and given[0] == "grid":
        sizes = given[1] if isinstance(given[1], list | tuple) else []
        if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
            raise ValueError(
                f"parallelism's plan for {pattern!r} must give workers along outputs and inputs, as "
                f"['grid', [2, 2]], got {list(given)!r}"
            )
        return "grid", tuple(sizes)
    if len(given) != 2 or not isinstance(given[1], int):
        raise ValueError(
            f"parallelism's plan for {pattern!r} must be a style or [style, blocks], got {list(given)!r}"
        )
    return given[0], given[1]
