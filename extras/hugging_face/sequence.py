"""Prepares a network of the transformers library for context parallelism.

Every rank embeds whole rows. Before the first block it takes its own tokens, and after the last block all
ranks gather all tokens, so final norms, poolers and heads compute the same on every rank. In between only
attention needs other tokens, and it runs by the library's `AttentionInterface`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ringspark.extras.hugging_face.stacks import Stack, find_stacks
from ringspark.models.outputs import as_outputs
from ringspark.models.whole_rows import WholeRows, attend

_NAME = "ringspark_sequence"
# Arguments of an attention function that change the scores.
_SCORES = ("position_bias", "softcap", "s_aux")


def prepare_sequence(network: nn.Module) -> None:
    """Gives the network `rows` and its attention layers `attend`, in place.

    Raises ValueError if the tokens of the network cannot be divided.
    """
    name, stacks = type(network).__name__, find_stacks(network)
    if len(stacks) != 1:
        raise ValueError(
            f"parallelism's 'sequence' needs a network with one chain of blocks, and {name} has "
            f"{len(stacks)}; set 'sequence' to 1, or take 'tensor' or 'pipeline'"
        )
    (stack,) = stacks
    blocks = [network.get_submodule(stack.block(number)) for number in range(stack.length)]
    attentions: list[Any] = [
        layer for block in blocks for layer in block.modules() if hasattr(layer, "is_causal")
    ]
    if not attentions or any(hasattr(layer, "relative_attention_bias") for layer in attentions):
        raise ValueError(
            f"parallelism's 'sequence' needs attention by the AttentionInterface of transformers without "
            f"biases of relative positions, which {name} does not have; set 'sequence' to 1"
        )
    _check_head(network, stack)
    own: Any = network
    own.rows = WholeRows()
    own.config.use_cache = False
    own.config._attn_implementation = _NAME
    tokens = _Tokens(network)
    for layer in attentions:
        layer.attend, layer.causal = attend, layer.is_causal and getattr(own.config, "is_causal", True)
        layer.__dict__["_tokens"] = tokens
    network.get_submodule(stack.trunk).register_forward_pre_hook(tokens.check_positions, with_kwargs=True)
    for block in blocks:
        block.forward = _OwnTokens(block, tokens, is_first=block is blocks[0], is_last=block is blocks[-1])
    network.register_forward_hook(tokens.mark_alike)
    _register()


def _check_head(network: nn.Module, stack: Stack) -> None:
    """Raises ValueError if a layer after the blocks draws random numbers; they differ between ranks."""
    names = [name for name, _ in network.named_modules()]
    for name, layer in network.named_modules():
        is_after = names.index(name) > names.index(stack.path) and not name.startswith(f"{stack.path}.")
        if is_after and isinstance(layer, nn.Dropout) and layer.p > 0:
            raise ValueError(
                f"parallelism's 'sequence' needs equal results of the head on all workers, but layer "
                f"{name!r} of {type(network).__name__} drops values with p={layer.p}; set the "
                "config's dropout of the head to 0, or 'sequence' to 1"
            )


class _Tokens:
    """Hooks of one network; a class, so that networks can be copied.

    Attributes:
        seq: Tokens per whole row in this pass.
    """

    def __init__(self, network: Any) -> None:
        self.network, self.seq = network, 0

    def check_positions(self, trunk: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        if named.get("position_ids") is not None:
            raise ValueError(
                f"parallelism's 'sequence' gives {type(self.network).__name__} the positions of plain rows, "
                "but the network got position_ids; leave the column out, or set 'sequence' to 1"
            )

    def mark_alike(self, network: Any, inputs: Any, output: Any) -> Any:
        found = tuple(network.rows.alike(value) for value in as_outputs(output))
        return found[0] if len(found) == 1 else found


class _OwnTokens:
    """Replaces the `forward` of a block; not a hook, which activation checkpointing would run twice."""

    def __init__(self, block: nn.Module, tokens: _Tokens, *, is_first: bool, is_last: bool) -> None:
        self._block, self._tokens, self._is_first, self._is_last = block, tokens, is_first, is_last

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        tokens, rows = self._tokens, self._tokens.network.rows
        if self._is_first:
            hidden = inputs[0] if inputs else named.pop("hidden_states")
            tokens.seq, inputs = hidden.shape[1], (rows.own(hidden, 1), *inputs[1:])
        if (tables := named.get("position_embeddings")) is not None:
            named["position_embeddings"] = tuple(rows.own(table, 1) for table in tables)
        output = type(self._block).forward(self._block, *inputs, **named)
        if not self._is_last:
            return output
        hidden, *others = output if isinstance(output, tuple) else (output,)
        whole = rows.whole(hidden, 1, tokens.seq)
        return (whole, *others) if isinstance(output, tuple) else whole


def _attend(
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    if given := [name for name in _SCORES if more.get(name) is not None]:
        raise ValueError(
            f"parallelism's 'sequence' computes plain attention, but {type(layer).__name__} has {given[0]}; "
            "set 'sequence' to 1"
        )
    width, groups = query.shape[-1], query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    if scaling is not None and scaling != width**-0.5:
        query = query * (scaling * width**0.5)
    tokens = layer.__dict__["_tokens"]
    mask = tokens.network.rows.mask(attention_mask, tokens.seq)
    mixed = layer.attend(query, key, value, mask, dropout, layer.causal)
    return mixed.transpose(1, 2).contiguous(), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **more: Any,
) -> torch.Tensor | None:
    """Returns the mask of padding alone, (batch, 1, 1, seq): `attend` knows which attention is causal."""
    from transformers import masking_utils

    plain = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    is_whole = local_size is not None and kv_length <= local_size
    if mask_function not in plain and not is_whole:
        window = "" if local_size is None else f" of {local_size} tokens, and rows have {kv_length}"
        raise ValueError(
            f"parallelism's 'sequence' supports attention to all tokens or to all earlier tokens, but a "
            f"layer has another mask{window}; set the config's sliding_window to None, or 'sequence' to 1"
        )
    return None if attention_mask is None else attention_mask.bool()[:, None, None, :]


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _mask)
