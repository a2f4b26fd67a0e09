"""The sharding plan for networks of the transformers library; the plan matches layers by name.

The plan must match all layers of a block. If it misses some, an error is raised, because the block would
compute with wrong shapes or partial gradients.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

# Projections of attention, and gated and plain MLPs.
PLAN: dict[str, Any] = {
    "*.[qkv]_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
    **{f"*.attention.self.{key}": "column" for key in ("query", "key", "value")},
    "*.attention.output.dense": "row",
    "*.intermediate.dense": "column",
    "*.layer.*.output.dense": "row",
    # ViT.
    "*.mlp.fc1": "column",
    "*.mlp.fc2": "row",
    # GPT-2.
    "*.attn.c_attn": ["column", 3],
    "*.attn.c_proj": "row",
    "*.mlp.c_fc": "column",
    "*.mlp.c_proj": "row",
    # T5.
    **{f"*Attention.{key}": "column" for key in ("q", "k", "v", "relative_attention_bias")},
    "*Attention.o": "row",
    **{f"*.DenseReluDense.{key}": "column" for key in ("wi", "wi_0", "wi_1")},
    "*.DenseReluDense.wo": "row",
}


def check_heads(module: Any, num_ranks: int) -> None:
    """Raises ValueError if the number of ranks does not divide the number of attention heads."""
    config = getattr(module, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % num_ranks:
            raise ValueError(
                f"parallelism's 'tensor' ({num_ranks}) must divide the network's {name}, got {heads}"
            )


def set_own_heads(module: nn.Module) -> None:
    """Sets the sizes that attention layers store (heads of T5, width of GPT-2) to this rank's sizes."""
    for layer in module.modules():
        own: Any = layer
        if hasattr(getattr(own, "q", None), "cuts") and hasattr(own, "n_heads"):
            own.n_heads = own.q.weight.shape[0] // own.key_value_proj_dim
        if hasattr(getattr(own, "c_attn", None), "cuts") and hasattr(own, "split_size"):
            own.split_size = own.c_attn.weight.shape[1] // 3


def check_whole_blocks(module: nn.Module) -> None:
    """Raises ValueError unless the plan shards all matrices of a block, or none.

    The module around a column-sharded layer must have no other parameters, because each rank would train them
    with different outputs.
    """
    layers = dict(module.named_modules())
    cut = {name: style for name in layers if (style := _style(name)) is not None}
    for name in cut:
        owner = name.rpartition(".")[0]
        for left in _holders(layers[owner], owner):
            if cut[name] == "column" and left not in cut:
                _refuse(module, name, left)
    for block in _blocks(module):
        own = [name for name in cut if name.startswith(f"{block}.")]
        for left in _holders(layers[block], block):
            is_matrix = any(p.dim() > 1 for p in layers[left].parameters(recurse=False))
            if own and is_matrix and left not in cut:
                _refuse(module, own[0], left)


def _refuse(module: nn.Module, cut: str, left: str) -> None:
    raise ValueError(
        f"parallelism's plan for networks of transformers shards {cut!r} of {type(module).__name__} but does "
        f"not know {left!r} next to it; set 'plan' to your own plan of whole blocks, or leave 'tensor' out"
    )


def _style(name: str) -> Any:
    style = next((style for pattern, style in PLAN.items() if fnmatchcase(name, pattern)), None)
    return style[0] if isinstance(style, list) else style


def _blocks(module: nn.Module) -> list[str]:
    """Returns the names of the outermost items of lists of layers."""
    lists = [name for name, layer in module.named_modules() if isinstance(layer, nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return [f"{name}.{key}" for name in outer for key, _ in module.get_submodule(name).named_children()]


def _holders(module: nn.Module, prefix: str) -> list[str]:
    """Returns the names of the modules in a layer that hold parameters directly."""
    return [
        name
        for name, layer in module.named_modules(prefix=prefix)
        if any(True for _ in layer.parameters(recurse=False))
    ]
