"""A `ModelSpec` of a transformers network: no process holds the whole network before its first step."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from building_bytes import driver_bytes, rank_bytes
from hugging_face_families import FAMILIES, LARGE, MESHES, MIXTRAL, Family, make_config
from small_training import train_in_turn, weights_of

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.options.finetuning import LoRA, Pretrained
from ringspark.estimators.options.mesh import Mesh, Pipeline
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.finetuning.pretrained import open_pretrained
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.hugging_face import shorten
from ringspark.models import ModelSpec
from ringspark.models.deferred_init import defer_initialization
from ringspark.models.meta_device import build_on_meta
from ringspark.pipelines import ShardManifest

pytest.importorskip("transformers")
AXES = ("tensor 2", "pipeline 2", "shard 2")
# Small tensors are broadcast together: up to 4 MiB, on the sender and as this rank's shards.
BUNDLES = 12 << 20


@pytest.mark.parametrize("name", FAMILIES)
def test_a_spec_has_the_initial_weights_of_its_class(name: str) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    ours, theirs = family.spec().build(), family.build()
    assert type(ours) is type(theirs)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("target", "kwargs", "message"),
    [
        ("LlamaForCausalLM", {"config": {"auto_map": {"AutoModel": "x.Y"}}}, "names 'auto_map'"),
        ("LlamaForCausalLM", {"config": {}, "dtype": "fp32"}, "dtype must be the name .* got 'fp32'"),
        ("LlamaForCausalLM", {"hidden_size": 4}, "it takes config, attention, dtype"),
        ("LlamaConfig", {"config": {}}, "must be a subclass of torch.nn.Module"),
    ],
)
def test_a_spec_that_names_other_code_is_refused(target: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec(f"transformers:{target}", kwargs).build()


@pytest.mark.parametrize("name", [name for name in [*FAMILIES, "Mixtral"] if name != "ViT"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deferred_initialization_gives_the_same_weights(name: str, dtype: str) -> None:
    """ViT draws weights again if they are too large, which cannot be replayed."""
    config = (MIXTRAL if name == "Mixtral" else FAMILIES[name]).spec()
    spec = ModelSpec(config.target, {**config.kwargs, "dtype": dtype})
    torch.manual_seed(3)
    whole = spec.build()
    torch.manual_seed(3)
    module, first = defer_initialization(spec.build)
    assert all(parameter.is_meta for parameter in module.parameters())
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        assert torch.equal(first.initialize(name), parameter), name
    buffers = dict(whole.named_buffers()), dict(module.named_buffers())
    torch.testing.assert_close(*buffers, rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_short_network_has_the_first_blocks_of_the_whole(name: str) -> None:
    spec = FAMILIES[name].spec()
    short = shorten(spec, 1)
    whole, fewer = (dict(build_on_meta(s.build).named_parameters()) for s in (spec, short))
    assert set() < fewer.keys() < whole.keys()
    assert all(whole[key].shape == parameter.shape for key, parameter in fewer.items())
    assert shorten(short, 1) is None


def _config(name: str, folder: Path, **changes: Any) -> tuple[Family, TrainConfig, UserObjects]:
    family = FAMILIES[name]
    config = make_config(family, folder, **{"model": family.spec(), **changes})
    return family, config, UserObjects(losses=family.losses)


@pytest.mark.parametrize("mesh", AXES)
def test_the_driver_never_holds_the_whole_network(mesh: str, tmp_path: Path) -> None:
    spec = FAMILIES["Llama"].spec(**LARGE["Llama"])
    _, config, objects = _config("Llama", tmp_path, model=spec, num_workers=2, **MESHES[mesh])
    whole = sum(parameter.nbytes for parameter in build_on_meta(spec.build).parameters())
    # Four times the weights of 2 of 12 blocks, with their gradients and the activations.
    assert driver_bytes(config, objects) < whole / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze": ("model.layers.3.*", "model.layers.7.*")}, r"layers\.7.*matches no parameter"),
        ({"lora": LoRA(rank=2, targets=["model.layers.7.*"])}, "matches no linear layer"),
        ({"parallelism": {"tensor": 3}, "num_workers": 3}, "must divide the network's num_attention_heads"),
        ({"parallelism": {"pipeline": 2}, "gradient_checkpointing": ("model.layers.9",)}, "layers.9"),
        ({"parallelism": Mesh(pipeline=Pipeline(2, cuts=("model.layers.9",)))}, "layers.9"),
        ({"input_columns": ("ids", "mask", "mask2")}, "mask2"),
        # Names of blocks that the driver does not run are accepted.
        ({"freeze": ("model.layers.3.*",)}, None),
        ({"lora": LoRA(rank=2, targets=["model.layers.3.*"])}, None),
        ({"parallelism": Mesh(pipeline=Pipeline(2, cuts=("model.layers.3",)))}, None),
    ],
)
def test_the_driver_checks_names_of_the_whole_network(changes: Any, message: Any, tmp_path: Path) -> None:
    _, config, objects = _config("Llama", tmp_path, num_workers=2)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        checked = check_training(replace(config, **changes), objects, ShardManifest.load(config.shards_uri))
        assert checked.shapes == ((12, 37),)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("mesh", AXES)
@pytest.mark.parametrize("name", LARGE)
def test_a_rank_builds_only_its_shard(name: str, mesh: str, tmp_path: Path) -> None:
    spec = FAMILIES[name].spec(**LARGE[name])
    _, config, objects = _config(name, tmp_path, model=spec, num_workers=2, **MESHES[mesh])
    whole = sum(parameter.nbytes for parameter in build_on_meta(spec.build).parameters())
    assert max(rank_bytes(config, objects)) < whole / 2 + BUNDLES


def _starts(name: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "own", {}
    saved = FAMILIES[name].build()
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.mul_(1.25).add_(0.01)
    saved.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 4
    yield "pretrained", {"pretrained": Pretrained(uri=str(folder))}
    if name == "Llama":
        lora = LoRA(rank=4, targets=["*.q_proj", "*.v_proj"])
        yield "lora", {"pretrained": Pretrained(uri=str(folder)), "lora": lora}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "BERT", "GPT-2", "Qwen"])
def test_ranks_that_build_shards_train_like_ranks_that_build_all(name: str, tmp_path: Path) -> None:
    family, config, objects = _config(name, tmp_path)
    module = family.build()
    configs, modules, expected = {}, {}, {}
    for start, options in _starts(name, tmp_path / "saved"):
        alone = replace(config, run_uri=str(tmp_path / start), **options)
        trained = weights_of(train_here(alone, objects), module) if start != "pretrained" else None
        for mesh in AXES:
            key, run_uri = f"{start}, {mesh}", str(tmp_path / f"{start} {mesh}")
            configs[key] = replace(alone, run_uri=run_uri, num_workers=2, **MESHES[mesh])
            if trained is None:  # a module on the driver is sent whole to each worker
                modules[key] = replace(configs[key], run_uri=f"{run_uri} whole", model=None)
            else:
                expected[key] = trained
    for key, result in train_in_turn(modules, family.objects()).items():
        expected[key] = weights_of(result, module)
    assert float((expected["own, tensor 2"] - expected["pretrained, tensor 2"]).abs().max()) > 1e-3
    for key, result in train_in_turn(configs, objects).items():
        assert float((weights_of(result, module) - expected[key]).abs().max()) < 1e-6, key


def test_pretrained_tensors_replace_deferred_ones_under_each_name_of_a_tied_weight(tmp_path: Path) -> None:
    saved = FAMILIES["Qwen"].build()
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.mul_(1.25)
    saved.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    module, first = defer_initialization(FAMILIES["Qwen"].spec().build)
    ticks: list[int] = []
    setting = Pretrained(uri=str(tmp_path), ignore=("model.norm.weight",))
    loaded = open_pretrained(setting, module, first, lambda: ticks.append(1))
    expected = dict(saved.named_parameters(remove_duplicate=False))
    assert {"lm_head.weight", "model.embed_tokens.weight"} < loaded.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        wanted = torch.ones(32) if name == "model.norm.weight" else tensor.float()
        assert torch.equal(loaded.initialize(name), wanted), name


def test_other_classes_of_the_library_keep_their_own_arguments() -> None:
    layer = ModelSpec("transformers.models.t5.modeling_t5:T5LayerNorm", {"hidden_size": 8}).build()
    assert [tuple(parameter.shape) for parameter in layer.parameters()] == [(8,)]
