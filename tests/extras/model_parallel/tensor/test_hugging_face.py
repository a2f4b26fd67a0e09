"""Networks of the transformers library are sharded by layer names, or refused with the unknown layer."""

from typing import Any

import pytest
import torch

from ringspark.extras.model_parallel.fake_collective import FakeCollective
from ringspark.extras.model_parallel.tensor.plan import make_region, plan_of, shard_layers

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
SIZES |= {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**SIZES, "num_key_value_heads": 2}
PLAIN = {**SIZES, "max_position_embeddings": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
# Families that docs/tensor_parallel.md lists.
FAMILIES = {
    "Llama": GROUPED,
    "Mistral": GROUPED,
    "Qwen2": GROUPED,
    "Gemma": {**GROUPED, "head_dim": 4},
    **dict.fromkeys(("Bert", "Roberta", "Electra"), PLAIN | NO_DROPOUT),
}
BART = {f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in (("layers", 1), ("ffn_dim", 32))}
BART |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}


def _network(name: str, sizes: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))


def _cuts(network: Any) -> set[str]:
    seat: Any = FakeCollective(1, 2)
    return set(shard_layers(network, make_region(seat), plan_of(network, 2)))


@pytest.mark.parametrize("name", FAMILIES)
def test_all_matrices_of_every_block_are_cut(name: str) -> None:
    network = _network(name, FAMILIES[name])
    inside = {n for n, p in network.named_parameters() if "layer" in n and p.dim() > 1}
    inside = {n for n in inside if "embed" not in n}
    assert len(inside) in (2 * 6, 2 * 7)
    assert inside <= _cuts(network)


@pytest.mark.parametrize(
    ("name", "sizes", "left"),
    [
        # Column-sharded layers without the row-sharded layer that reduces them.
        ("OPT", {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16}, "decoder.layers.0.self_attn.out_proj"),
        ("Bart", {**BART, "d_model": 16, "vocab_size": 20}, "encoder.layers.0.self_attn.out_proj"),
        ("Phi", SIZES, "layers.0.self_attn.dense"),
        # A row-sharded layer without its column-sharded layers.
        ("Phi3", SIZES, "layers.0.self_attn.qkv_proj"),
        # Each rank would train these weights with its own heads only.
        ("Qwen3", {**GROUPED, "head_dim": 4}, "layers.0.self_attn.q_norm"),
    ],
)
def test_a_block_that_would_be_cut_by_half_is_refused(name: str, sizes: dict[str, Any], left: str) -> None:
    network = _network(name, sizes)
    with pytest.raises(ValueError, match=f"{name}Model but does not know '{left}' next to it; set 'plan'"):
        plan_of(network, 2)
