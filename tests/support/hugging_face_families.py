"""Tiny networks of seven families of the transformers library, with generated rows for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

VOCABULARY, LENGTH, ROWS, LABELS = 37, 12, 96, 3
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 48}
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {**_SIZES, **_TOKENS, "num_key_value_heads": 2, "max_position_embeddings": 64}
_GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 64, "n_inner": 48}
_GPT2 |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
_T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2, "dropout_rate": 0.0}
_T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
_IMAGE = {"image_size": 12, "patch_size": 4, "num_labels": LABELS}

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Family:
    """One architecture: class and config of the network, and its columns.

    Attributes:
        inputs: Columns in the order of the arguments of `forward`.
    """

    network: str
    config: str
    sizes: dict[str, Any]
    inputs: tuple[str, ...]

    def build(self, **changes: Any) -> Any:
        """Returns the network with random weights of seed 0."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**{**self.sizes, **changes})
        return getattr(transformers, self.network)(config)

    def columns(self, rows: int = ROWS) -> Columns:
        """Returns the inputs and the label `y`; the label can be learned."""
        rng = np.random.default_rng(0)
        if "pixels" in self.inputs:
            labels = rng.integers(0, LABELS, rows)
            pixels = rng.normal(size=(rows, 3, 12, 12)).astype(np.float32)
            return {"pixels": pixels + labels[:, None, None, None], "y": labels}
        # Every token follows from the token before.
        tokens = (rng.integers(0, VOCABULARY, (rows, 1)) + 5 * np.arange(LENGTH + 1)) % (VOCABULARY - 3) + 3
        mask = (np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (rows, 1))).astype(np.int64)
        found = {"ids": tokens[:, :-1], "y": np.ascontiguousarray(tokens[:, 1:])}
        if "mask" in self.inputs:
            found |= {"ids": found["ids"] * mask, "mask": mask}
        if "decoder_ids" in self.inputs:
            return {**found, "decoder_ids": np.ascontiguousarray(tokens[:, ::-1][:, :-1])}
        if not self.is_language_model:
            found["y"] = tokens[:, 0] % LABELS
        return found

    @property
    def is_language_model(self) -> bool:
        return self.network.endswith(("CausalLM", "LMHeadModel", "ConditionalGeneration"))

    @property
    def losses(self) -> tuple[Callable[..., torch.Tensor], ...]:
        """Losses for `UserObjects`; none means cross entropy."""
        return (token_loss,) if self.is_language_model else ()


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy of each row's tokens, from logits of (batch, tokens, ids)."""
    return F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none").mean(1)


FAMILIES = {
    "BERT": Family(
        "BertForSequenceClassification",
        "BertConfig",
        {**_SIZES, **_TOKENS, **_NO_DROPOUT, "max_position_embeddings": 64, "num_labels": LABELS},
        ("ids", "mask"),
    ),
    "GPT-2": Family("GPT2LMHeadModel", "GPT2Config", {**_GPT2, **_TOKENS}, ("ids",)),
    "Llama": Family("LlamaForCausalLM", "LlamaConfig", _DECODER, ("ids", "mask")),
    "Qwen": Family("Qwen2ForCausalLM", "Qwen2Config", {**_DECODER, "tie_word_embeddings": True}, ("ids",)),
    "Mistral": Family(
        "MistralForCausalLM", "MistralConfig", {**_DECODER, "sliding_window": 32}, ("ids", "mask")
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {**_T5, **_TOKENS, "decoder_start_token_id": 0},
        ("ids", "mask", "decoder_ids"),
    ),
    "ViT": Family("ViTForImageClassification", "ViTConfig", {**_SIZES, **_NO_DROPOUT, **_IMAGE}, ("pixels",)),
}

MIXTRAL = Family(
    "MixtralForCausalLM",
    "MixtralConfig",
    {**_DECODER, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ("ids", "mask"),
)
