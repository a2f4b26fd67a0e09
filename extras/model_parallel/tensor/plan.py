"""Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM"): each rank has a shard of every large matrix.

Of two consecutive layers, the first is sharded by outputs (column) and the second by inputs (row). Such a
region needs one all-reduce at its end, and one in the backward pass. A plan maps patterns over module names
to styles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.names import nearest
from ringspark.estimators.parallel.shard_spec import ShardSpec
from ringspark.extras.model_parallel.tensor.grid import GridLinear, Grids, make_fake_grids
from ringspark.extras.model_parallel.tensor.hugging_face import PLAN as HUGGING_FACE
from ringspark.extras.model_parallel.tensor.hugging_face import (
    check_heads,
    check_whole_blocks,
    set_own_heads,
)
from ringspark.extras.model_parallel.tensor.layers import (
    ColumnEmbedding,
    ColumnLinear,
    Region,
    RowLinear,
    VocabularyEmbedding,
    is_transposed,
)
from ringspark.extras.model_parallel.tensor.loss import ShardedScores
from ringspark.extras.model_parallel.tensor.random_state import RankRandomState
from ringspark.extras.model_parallel.tensor.sequence_parallel import (
    RegionBoundary,
    SequenceBoundary,
    SequenceShardedRows,
)
from ringspark.models.lora import take_adapter
from ringspark.models.module_hooks import find_hook, has_gradient_hook
from ringspark.models.reports import CountingLayer
from ringspark.models.transformer import TransformerLM, scores
from ringspark.models.whole_rows import WholeRows

# Largest number of layers that an error names.
_NAMED = 12


STYLES = ("column", "column_joined", "row", "grid", "vocabulary")


def _make_shard(style: str, layer: Any, region: Region, blocks: Any) -> Any:
    """Returns this rank's shard of a layer; `blocks` is the style's argument from `_style`."""
    if style == "grid" and isinstance(blocks, int):
        raise ValueError("style 'grid' needs the rows and columns of the grid, such as ['grid', [2, 2]]")
    # Gathered shards of several blocks would give outputs in another order.
    if style in ("column_joined", "row", "vocabulary") and blocks != 1:
        raise ValueError(f"style {style!r} takes no number of blocks, got {blocks}; leave the number out")
    if style in ("column_joined", "grid") and isinstance(region.boundary, SequenceBoundary):
        raise ValueError(
            f"style {style!r} leaves all tokens on every worker, but sequence_parallel=True shards them; "
            "take 'column' and 'row' in pairs, or set sequence_parallel=False"
        )
    if style == "vocabulary":
        # A subclass may scale its outputs. `parametrize` makes a subclass too, which `_check_plain` refuses.
        if not isinstance(layer, nn.Embedding) or type(layer).forward is not nn.Embedding.forward:
            raise ValueError(
                f"style 'vocabulary' is for nn.Embedding, got {type(layer).__name__}; leave the layer out"
            )
        return VocabularyEmbedding(layer, region)
    if style == "column" and blocks == 1 and type(layer) is nn.Embedding:
        return ColumnEmbedding(layer, region)
    if type(layer) is not nn.Linear and (style == "grid" or not is_transposed(layer)):
        raise ValueError(f"the style is for nn.Linear, got {type(layer).__name__}; leave the layer out")
    if style == "grid":
        return GridLinear(layer, region.collective, region.grids, blocks)
    if style == "row":
        return RowLinear(layer, region)
    outputs = layer.weight.shape[int(is_transposed(layer))]
    if blocks < 1 or outputs % blocks:
        raise ValueError(
            f"{outputs} outputs do not divide into {blocks} equal blocks; change the block count"
        )
    return ColumnLinear(layer, region, blocks, gathers=style == "column_joined")


def _check_plain(layer: nn.Module) -> None:
    """Raises ValueError if the layer has hooks or extra state, which its shard would lack."""
    hook = "a gradient hook" if has_gradient_hook(layer) else find_hook(layer)
    if hook is not None:
        raise ValueError(
            f"it has {hook}, which its shards do not run; put it on the module around the layer, or leave "
            "the layer out of the plan"
        )
    own = {*layer._parameters, *layer._buffers, *layer._modules}
    if "weight" not in layer._parameters or own - {"weight", "bias"}:
        raise ValueError(
            f"the layer holds {', '.join(sorted(own))}, but only a weight and a bias can be sharded; leave "
            "the layer out of the plan"
        )


def _avoid_fast_paths(module: nn.Module) -> None:
    for layer in module.modules():
        if any(hasattr(part, "cuts") for part in layer.modules()):
            if isinstance(layer, nn.TransformerEncoderLayer):
                layer.activation_relu_or_gelu = 0
            elif isinstance(layer, nn.TransformerEncoder):
                layer.use_nested_tensor = False


def plan_of(module: nn.Module, num_ranks: int) -> dict[str, Any]:
    """Returns the plan of a network: its `tensor_plan(num_ranks)`, or the plan for transformers."""
    own = getattr(module, "tensor_plan", None)
    if callable(own):
        return dict(own(num_ranks))
    if type(module).__module__.startswith("transformers."):
        check_heads(module, num_ranks)
        check_whole_blocks(module)
        return HUGGING_FACE
    raise ValueError(
        f"parallelism over 'tensor' needs a plan of the layers to shard, and {type(module).__name__} has "
        "none; give it a method tensor_plan(ranks), or set parallelism's 'plan', such as {'blocks.*.up': "
        "'column', 'blocks.*.down': 'row'}"
    )


def make_region(
    collective: Collective, sequence_parallel: bool = False, grids: Grids | None = None
) -> Region:
    grids = grids or make_fake_grids(collective)
    if sequence_parallel:
        # Every rank has other tokens between regions, and other units inside.
        return Region(collective, SequenceBoundary(collective), None, grids)
    return Region(collective, RegionBoundary(collective), RankRandomState(collective), grids)


def check_sequence_parallel(module: nn.Module, sizes: Mapping[str, int]) -> None:
    """Raises ValueError if sequence parallelism does not support the network or the mesh; needs no ranks."""
    name = type(module).__name__
    if not isinstance(getattr(module, "rows", None), WholeRows):
        raise ValueError(
            f"model {name} does not support sequence_parallel=True: the model needs an attribute "
            "`rows`, a ringspark.models.whole_rows.WholeRows from which it takes its tokens; take "
            "transformer_classifier or transformer_lm, or set sequence_parallel=False"
        )
    counting = [key for key, layer in module.named_modules() if isinstance(layer, CountingLayer)]
    if counting:
        raise ValueError(
            f"sequence_parallel=True shards the rows, but layer {counting[0]!r} needs whole rows for "
            "its own part of the loss; set sequence_parallel=False, or take a network without experts"
        )
    if sizes["pipeline"] > 1:
        raise ValueError(
            "sequence_parallel=True does not work with 'pipeline', because a stage does not know the length "
            "of the rows of which it gets shards; set sequence_parallel=False, or 'pipeline' to 1"
        )


def _check_unsharded_layers(module: nn.Module, region: Region) -> None:
    """With sequence parallelism, refuses unsharded attention layers: they would get only some tokens."""
    if not isinstance(region.boundary, SequenceBoundary):
        return
    for name, layer in module.named_modules():
        gathers = any(isinstance(part, ColumnLinear) for part in layer.modules())
        if callable(getattr(layer, "attend", None)) and not gathers:
            raise ValueError(
                f"sequence_parallel=True gives layer {name!r} some of the tokens, but it needs all of them; "
                "let 'plan' shard it too, or set sequence_parallel=False"
            )


def shard_activations(module: nn.Module, region: Region) -> None:
    """Shards the tokens of the unsharded layers if the region has a `SequenceBoundary`.

    Call it after `shard_layers` and `shard_sequence`.
    """
    if isinstance(region.boundary, SequenceBoundary):
        rows: Any = module.rows
        is_sharded = isinstance(getattr(module, "tokens", None), VocabularyEmbedding)
        module.rows = SequenceShardedRows(rows, region.boundary, is_table_sharded=is_sharded)  # type: ignore[assignment]
        RankRandomState(region.collective).watch(module, always=True)


def shard_layers(module: nn.Module, region: Region, plan: Mapping[str, Any]) -> dict[str, ShardSpec]:
    """Replaces the layers of a plan by this rank's shards, in place; returns the sharded parameters by name.

    A plan maps patterns over module names to a style; to [style, blocks] for a layer of several fused parts,
    such as query, key and value, each sharded alone; or to ["grid", [rows, columns]] for a weight that is
    sharded in both dimensions.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        names.setdefault(layer, []).append(name)
    uses = Counter(p for layer in names for p in layer.parameters(recurse=False))
    cuts: dict[str, ShardSpec] = {}
    unused, done = [], set[nn.Module]()
    for pattern, given in plan.items():
        style, argument = _style(pattern, given)
        found = {
            layer: own
            for layer, own in names.items()
            if layer not in done and any(fnmatchcase(name, pattern) for name in own)
        }
        unused += [] if found else [pattern]
        done.update(found)
        for layer, (name, *others) in found.items():
            if others:
                # The other name would keep the whole layer.
                first, other, *_ = sorted([name, *others], key=lambda own: not fnmatchcase(own, pattern))
                raise ValueError(
                    f"parallelism's plan shards {first!r}, which the network also has as {other!r}; leave it "
                    "out of the plan"
                )
            if any(uses[p] > 1 for p in layer.parameters(recurse=False)):
                raise ValueError(
                    f"parallelism's plan shards {name!r}, but another layer has its weights; leave it out "
                    "of the plan"
                )
            part = _shard_layer(module, name, region, style, argument)
            cuts |= {f"{name}.{key}": cut for key, cut in part.cuts.items()}
    if unused and plan is not HUGGING_FACE:
        known = [own[0] for layer, own in names.items() if isinstance(layer, nn.Linear | nn.Embedding)]
        more = ", ..." if len(known) > _NAMED else ""
        raise ValueError(
            f"parallelism's plan names {unused[0]!r}, which fits no layer; leave it out, or name some of "
            f"{', '.join(known[:_NAMED])}{more}"
        )
    if not cuts:
        raise ValueError(
            f"no layer of {type(module).__name__} can be sharded by its tensor plan; name its layers by "
            "parallelism={'tensor': ..., 'plan': {pattern: style}}"
        )
    _check_unsharded_layers(module, region)
    set_own_heads(module)
    _avoid_fast_paths(module)
    if region.random_state is not None:
        region.random_state.watch(module)
    return cuts


def _shard_layer(module: nn.Module, name: str, region: Region, style: str, argument: Any) -> Any:
    """Replaces a layer of the network by this rank's shard, and returns the shard."""
    layer = module.get_submodule(name)
    adapter = take_adapter(layer)
    try:
        part = _make_shard(style, layer, region, argument)
        _check_plain(layer)
    except ValueError as error:
        raise ValueError(f"parallelism's plan cannot shard {name!r}: {error}") from None
    if adapter is not None:
        part.adapt(adapter)
    if any(getattr(part, key).numel() < 1 for key in part.cuts):
        raise ValueError(
            f"parallelism's 'tensor' has {region.collective.size} workers, but {name!r} is too small "
            "for that many shards; set a smaller 'tensor', or leave the layer out of the plan"
        )
    if isinstance(part, VocabularyEmbedding):
        _shard_scores(module, name, part)
    module.set_submodule(name, part.train(layer.training))
    return part


def _shard_scores(module: nn.Module, name: str, table: VocabularyEmbedding) -> None:
    if getattr(module, "tokens", None) is not module.get_submodule(name):
        if isinstance(table.boundary, SequenceBoundary):
            raise ValueError(
                f"parallelism's plan shards {name!r} by ids of the vocabulary; with "
                f"sequence_parallel=True only an embedding named 'tokens' can be sharded so; "
                f"leave {name!r} out of the plan"
            )
    elif isinstance(module, TransformerLM):
        if module.scores is not scores:
            raise ValueError(
                f"parallelism's plan shards {name!r} by ids, but {type(module).__name__} has its own "
                f"`scores`, which would only see one worker's ids; set 'plan' to a plan without {name!r}"
            )
        vars(module)["scores"] = ShardedScores(table)


def _style(pattern: str, given: Any) -> tuple[str, Any]:
    """Splits an entry of a plan into its style and the style's argument.

    The argument is the number of fused blocks, such as 3 for queries, keys and values, or a grid's shape.
    """
    if not isinstance(given, list | tuple):
        given = [given, 1]
    elif len(given) == 2 and given[0] == "grid":
        sizes = given[1] if isinstance(given[1], list | tuple) else []
        if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
            raise ValueError(
                f"parallelism's plan for {pattern!r} must give the workers along outputs and along inputs, "
                f"as ['grid', [2, 2]], got {list(given)!r}"
            )
        given = ["grid", tuple(sizes)]
    elif len(given) != 2 or not isinstance(given[1], int):
        raise ValueError(
            f"parallelism's plan for {pattern!r} must be a style or [style, blocks], got {list(given)!r}"
        )
    style, argument = given
    if style not in STYLES:
        raise ValueError(
            f"a plan's style must be one of {', '.join(STYLES)}, got {style!r}{nearest(str(style), STYLES)}"
        )
    return style, argument
