"""Tiny networks of seven families of the transformers library, trained alone and on two ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_training import config_of, train_gang, weights_of
from torch.nn import functional as F
from written_shards import written

from ringspark.estimators.failures import WorkerError
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec

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
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**{**self.sizes, **changes})
        return getattr(transformers, self.network)(config)

    def spec(self, **changes: Any) -> ModelSpec:
        return ModelSpec(f"transformers:{self.network}", {"config": {**self.sizes, **changes}})

    def columns(self, rows: int = ROWS) -> Columns:
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
        return (token_loss,) if self.is_language_model else ()

    def objects(self) -> UserObjects:
        return UserObjects(module=self.build(), losses=self.losses)


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

# Changed sizes of networks that are much larger than their largest tensor.
LARGE = {
    "Llama": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12},
    "BERT": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12},
    "GPT-2": {"n_embd": 512, "n_inner": 1024, "n_layer": 12},
}

MESHES: dict[str, dict[str, Any]] = {
    "data 2": {},
    "tensor 2": {"parallelism": {"tensor": 2}},
    "pipeline 2": {"parallelism": {"pipeline": 2}, "gradient_accumulation": 2},
    "sequence 2": {"parallelism": {"sequence": 2}},
    "shard 2": {"sync": Zero(stage=3)},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, checkpointing": {"precision": "bf16", "gradient_checkpointing": "all"},
}


def make_config(family: Family, folder: Path, **changes: Any) -> TrainConfig:
    """Returns settings of 6 steps for one worker; writes the family's rows as shards."""
    settings = {
        "task": "any",
        "losses": ("own",) if family.losses else ("cross_entropy",),
        "input_columns": family.inputs,
        # Key biases have only rounding errors as gradients, which Adam would turn into full steps.
        "optimizer": "momentum",
        "learning_rate": 0.05,
        "max_grad_norm": 1.0,
        "collective": "torch",
    }
    return config_of(written(folder / "shards", family.columns()), folder / "run", **settings | changes)


def compare(
    family: Family, config: TrainConfig, meshes: Mapping[str, dict[str, Any]]
) -> dict[str, float | str]:
    """Returns the largest difference of two workers' weights from one worker's, or the refusal, per mesh."""
    start = _flat(family.build())
    one = replace(config, run_uri=f"{config.run_uri}-one")
    alone = weights_of(train_here(one, family.objects()), family.build())
    assert float((alone - start).abs().max()) > 1e-3
    found: dict[str, float | str] = {}
    for name, changes in meshes.items():
        two = replace(config, run_uri=f"{config.run_uri}-{name}", num_workers=2, **changes)
        try:
            trained = weights_of(train_gang(two, family.objects()), family.build())
        except (ValueError, WorkerError) as error:
            found[name] = str(error)
        else:
            found[name] = float((trained - alone).abs().max())
    return found


def _flat(network: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
