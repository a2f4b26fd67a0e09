"""Contract of networks of transformers: two ranks along any axis train like one, or the driver refuses."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face_families import FAMILIES, MESHES, MIXTRAL, PRECISIONS, Family, compare, make_config
from torch import nn

from ringspark.estimators.training.check.driver import check_training
from ringspark.extras.model_parallel.expert import expert_names
from ringspark.models.chain import links_of, run_links
from ringspark.models.outputs import as_outputs
from ringspark.pipelines import ShardManifest

pytest.importorskip("transformers")
# One number per parameter: fp32 differs by the order of additions, bf16 by the order of roundings.
TOLERANCES = {"fp32": 1e-5, "bf16, checkpointing": 1e-3}
REFUSED = {("T5", "sequence 2"): "needs a network with one chain of blocks, and T5For.* has 2"}


def _rows(family: Family) -> list[torch.Tensor]:
    return [torch.tensor(family.columns(6)[key]) for key in family.inputs]


def _gradients(network: nn.Module, run: Any, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    network.zero_grad()
    (outputs,) = as_outputs(run(*rows))
    outputs.square().mean().backward()
    return [outputs.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_links_compute_the_network_bitwise(name: str) -> None:
    family = FAMILIES[name]
    network, rows = family.build(), _rows(family)
    links = links_of(network)
    whole = _gradients(network, network, rows)
    parts = _gradients(network, lambda *rows: run_links(links, rows), rows)
    assert len(links) == 6 + (name == "T5")
    assert len(whole) == len(list(network.parameters())) + 1
    assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_links_read_a_mask_of_floats(name: str) -> None:
    family = FAMILIES[name]
    network = family.build().eval()
    ids, mask = _rows(family)
    mask = mask.float()
    mask[:, :2] = 0.0
    (whole,), (parts,) = as_outputs(network(ids, mask)), as_outputs(run_links(links_of(network), [ids, mask]))
    assert torch.equal(parts, whole)
    assert not torch.equal(parts, as_outputs(network(ids, torch.ones_like(mask)))[0])


def test_experts_keep_the_gate_of_their_class() -> None:
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    from ringspark.extras.hugging_face.experts import Mixture

    sizes = {"hidden_size": 16, "moe_intermediate_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    experts = DeepseekV4Experts(DeepseekV4Config(**sizes))
    for parameter in experts.parameters():  # so large that the class clamps the gate
        nn.init.normal_(parameter, std=2.0)
    rows, index = torch.randn(6, 16), torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [1, 2]])
    expected = DeepseekV4Experts.forward(experts, rows, index, torch.full((6, 2), 0.5))
    mixture = Mixture(experts)
    mixture.dispatch = lambda run, rows, sizes: run(rows, sizes)
    assert torch.allclose(mixture(rows, index, torch.full((6, 2), 0.5)), expected, rtol=1e-5, atol=1e-3)


def test_links_of_a_mixture_take_batches_without_rows() -> None:
    from ringspark.extras.hugging_face import prepare_experts

    network = MIXTRAL.build()
    for mixture in prepare_experts(network).values():
        mixture.dispatch = lambda run, rows, sizes: run(rows, sizes)
    rows = [values[:0] for values in _rows(MIXTRAL)]
    (whole,), (parts,) = as_outputs(network(*rows)), as_outputs(run_links(links_of(network), rows))
    assert parts.shape == whole.shape == (0, *parts.shape[1:])
    parts.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in network.parameters())


def test_only_sharded_experts_count_as_experts() -> None:
    network = MIXTRAL.build()
    # A mixture by another name, which is not sharded.
    block = network.model.layers[0].mlp
    block.others = block._modules.pop("experts")
    experts = {"gate_up_proj", "down_proj"}
    assert expert_names(network) == {f"model.layers.1.mlp.experts.{name}" for name in experts}


def test_a_stage_holds_only_the_weights_of_its_links() -> None:
    links = links_of(FAMILIES["Llama"].build())
    blocks = [link for link in links if link.name.startswith("model.layers.")]
    assert [link.parts for link in blocks] == [(link.name, "model.rotary_emb") for link in blocks]
    assert links[0].parts == ("model.embed_tokens", "model.rotary_emb")
    assert links[-1].parts == ("model.norm", "lm_head", "model.rotary_emb")


def test_a_network_without_one_chain_of_blocks_is_refused_in_a_pipeline() -> None:
    import transformers

    inner = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    vision = {**inner, "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=inner, vision_config=vision)
    with pytest.raises(ValueError, match=r"needs one chain of blocks.* leave 'pipeline' out of parallelism"):
        links_of(transformers.CLIPModel(config))


@pytest.mark.parametrize("mesh", ["tensor 2", "pipeline 2", "sequence 2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_driver_finds_the_whole_gradients_or_refuses(name: str, mesh: str, tmp_path: Path) -> None:
    """The driver runs both ranks in threads, and compares outputs and gradients."""
    family = FAMILIES[name]
    config = make_config(family, tmp_path, num_workers=2, **MESHES[mesh])
    manifest = ShardManifest.load(config.shards_uri)
    if refusal := REFUSED.get((name, mesh)):
        with pytest.raises(ValueError, match=refusal):
            check_training(config, family.objects(), manifest)
    else:
        assert check_training(config, family.objects(), manifest).config.num_workers == 2


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Mistral", {"sliding_window": 4}, "mask of 4 tokens, and rows have 12.*sliding_window to None"),
        ("BERT", {"classifier_dropout": 0.1}, "layer 'dropout' of .* drops values with p=0.1"),
        ("GPT-2", {"attn_pdrop": 0.1}, "does not support dropout of attention weights"),
    ],
)
def test_rows_whose_shards_differ_stay_whole(name: str, changes: Any, message: str, tmp_path: Path) -> None:
    family = replace(FAMILIES[name], sizes={**FAMILIES[name].sizes, **changes})
    config = make_config(family, tmp_path, num_workers=2, **MESHES["sequence 2"])
    with pytest.raises(ValueError, match=message):
        check_training(config, family.objects(), ShardManifest.load(config.shards_uri))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_along_any_axis_train_like_one(name: str, precision: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    found = compare(family, make_config(family, tmp_path, **PRECISIONS[precision]), MESHES)
    for mesh, value in found.items():
        refusal = REFUSED.get((name, mesh))
        if refusal is None:
            assert isinstance(value, float), value
            assert value < TOLERANCES[precision], mesh
        else:
            assert re.search(refusal, str(value))


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_that_share_experts_train_like_one(tmp_path: Path) -> None:
    mesh = {"expert 2": {"parallelism": {"expert": 2}}}
    assert compare(MIXTRAL, make_config(MIXTRAL, tmp_path), mesh)["expert 2"] < 1e-5
