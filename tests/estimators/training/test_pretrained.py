"""Pretrained initial weights: files behind a URI, loaded names, and refused checkpoints."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import assert_equal_states
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from short_sync import sync_of
from small_training import Runs, state_of
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.options.finetuning import Pretrained
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.finetuning.pretrained import check_pretrained, load_pretrained
from ringspark.estimators.training.phase import Status
from ringspark.estimators.training.rank_network import RankNetwork
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.models.lora import add_lora
from ringspark.pipelines import ShardManifest

SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 1})
SETTINGS = {"model": SPEC}
INDEX = "model.safetensors.index.json"


def _setting(uri: Path | str, *ignore: str, strict: bool = True) -> Pretrained:
    return Pretrained(uri=str(uri), ignore=ignore, strict=strict)


def _other() -> nn.Module:
    """Returns a similar network with different weights and a different head."""
    torch.manual_seed(7)
    return ModelSpec("mlp", {"in_features": 4, "hidden": [8], "out_features": 3}).build()


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def _as_file(folder: Path) -> Path:
    save_file(_tensors(_other()), folder / "any name.safetensors")
    return folder / "any name.safetensors"


def _as_folder(folder: Path, name: str = "", link: str = "") -> Path:
    """Saves in a folder `name`; `link` is a folder with links, as in the cache of Hugging Face."""
    (folder / name).mkdir(exist_ok=True)
    save_file(_tensors(_other()), folder / name / "model.safetensors", metadata={"format": "pt"})
    if link:
        (folder / link).mkdir()
        (folder / link / "model.safetensors").symlink_to(f"../{name}/model.safetensors")
    return folder / link


def _as_pieces(folder: Path) -> Path:
    """Saves a sharded checkpoint, like Hugging Face does for large models."""
    names: dict[str, str] = {}
    for number, (name, tensor) in enumerate(_tensors(_other()).items()):
        names[name] = f"model-{number % 2}-of-2.safetensors"
        path = folder / names[name]
        save_file({**(load_file(path) if path.exists() else {}), name: tensor}, path)
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return folder


PLACES = [
    _as_file,
    _as_folder,
    _as_pieces,
    partial(_as_folder, name="weights"),
    partial(_as_folder, name="blobs", link="snapshot"),
]


@pytest.mark.parametrize("place", PLACES)
def test_a_body_is_loaded_from_whatever_a_uri_means(place: Callable[[Path], Path], tmp_path: Path) -> None:
    module = SPEC.build()
    before, ticks = _tensors(module), []
    setting = _setting(place(tmp_path), "head.*")
    check_pretrained(setting, module)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    load_pretrained(setting, module, lambda: ticks.append(1))
    theirs = _other().state_dict()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name] if name.startswith("head") else theirs[name]), name
    assert ticks


def test_numbers_of_16_bits_become_the_networks(tmp_path: Path) -> None:
    save_file(_tensors(SPEC.build().bfloat16()), tmp_path / "model.safetensors")
    module = SPEC.build()
    load_pretrained(_setting(tmp_path), module, lambda: None)
    found = load_file(tmp_path / "model.safetensors")
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, found[name].float())


def test_one_name_of_a_tied_weight_is_enough_and_adapters_are_not_asked_for(tmp_path: Path) -> None:
    spec = ModelSpec("mlp", {"in_features": 4, "hidden": [4, 4], "out_features": 1})
    module = spec.build()
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    linear[1].weight = linear[0].weight
    tensors = _tensors(module)
    tied = [name for name, p in module.state_dict(keep_vars=True).items() if p is linear[0].weight]
    assert len(tied) == 2
    del tensors[tied[1]]
    save_file(tensors, tmp_path / "model.safetensors")
    add_lora(module, 1, 1, ["head"])
    check_pretrained(_setting(tmp_path), module)
    # A user's parameter with an adapter's name must be in the checkpoint.
    module.lora_A = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="it lacks 'lora_A', and has nothing"):
        check_pretrained(_setting(tmp_path), module)


@pytest.mark.parametrize(
    ("ignore", "words"),
    [
        (
            [],
            r"'head.bias' of shape \[3\], but the model's has shape \[1\]; .* \['head.bias', 'head.weight'\]",
        ),
        (["head"], r"ignores 'head', which matches no .*; did you mean 'head.bias'"),
        (["*"], "is not of model MLP: it lacks nothing, and has nothing"),
    ],
)
def test_what_is_not_of_the_network_is_refused(ignore: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        check_pretrained(_setting(_as_folder(tmp_path), *ignore), SPEC.build())


def test_names_are_compared_unless_told_otherwise(tmp_path: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in _tensors(SPEC.build()).items()}
    tensors["head.bias"] = torch.full((1,), 5.0)
    save_file(tensors, tmp_path / "model.safetensors")
    module = SPEC.build()
    words = r"it lacks 'trunk.0.linear.weight', 'trunk.0.linear.bias', 'head.weight', and has 'model\."
    with pytest.raises(ValueError, match=words):
        check_pretrained(_setting(tmp_path), module)
    load_pretrained(_setting(tmp_path, strict=False), module, lambda: None)
    assert module.get_parameter("head.bias").item() == 5
    del tensors["head.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is not of model MLP"):
        check_pretrained(_setting(tmp_path, strict=False), module)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "holds no model.safetensors; give"),
        ({"model.safetensors": b"\x10\0\0\0\0\0\0\0{}"}, "is no readable safetensors file"),
        ({"model.safetensors": b"\xff" * 9}, "is no readable safetensors file"),
        (
            {INDEX: b'{"weight_map": {"a": "../b"}}'},
            "this index must name .safetensors files in its own folder",
        ),
        (
            {INDEX: b'{"weight_map": {"a": "b.safetensors"}}'},
            "b.safetensors is missing, but its index lists it; copy it again",
        ),
    ],
)
def test_what_is_no_checkpoint_is_refused(files: dict[str, bytes], words: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        check_pretrained(_setting(tmp_path), SPEC.build())


def test_a_training_starts_from_it_and_the_driver_reads_no_tensor(runs: Runs) -> None:
    file = _as_folder(runs.folder) / "model.safetensors"
    changes = {"pretrained": _setting(runs.folder, "head.*"), "freeze": ("trunk.*",), "epochs": 1}
    state, theirs = state_of(runs.here(64, **changes)), _other().state_dict()
    for name in state:
        if name.startswith("trunk"):
            assert torch.equal(state[name], theirs[name]), name
    header = int.from_bytes(file.read_bytes()[:8], "little")
    file.write_bytes(file.read_bytes()[: 8 + header])
    runs.check(64, **changes)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("collective", "sharding"), [("horovod", "none"), ("torch", "parameters")])
def test_all_ranks_start_from_what_rank_0_has_read(runs: Runs, collective: str, sharding: str) -> None:
    setting = _setting(_as_folder(runs.folder), "head.*")
    one, two = (
        train(64, pretrained=setting, optimizer="sgd", **changes)
        for train, changes in (
            (runs.here, {}),
            (runs.gang, {"collective": collective, "sync": sync_of(sharding=sharding)}),
        )
    )
    assert_equal_states(one, two, bound=1e-6)


def _running_means(config: TrainConfig, collective: Collective) -> list[float]:
    manifest, mesh = ShardManifest.load(config.shards_uri), RankMesh.of(collective, config.axes)
    network = RankNetwork(config, UserObjects(), manifest, mesh, torch.device("cpu"), Status())
    network.build()
    assert all(parameter.is_meta for parameter in network.module.parameters())
    return [float(b.sum()) for name, b in network.module.named_buffers() if name.endswith("running_mean")]


@pytest.mark.extras
@pytest.mark.distributed
def test_ranks_that_build_only_their_shard_get_the_checkpoints_buffers(runs: Runs) -> None:
    spec = ModelSpec("resnet", {"in_channels": 1, "out_features": 1, "depths": [1], "width": 4})
    saved = spec.build()
    saved(torch.randn(8, 1, 8, 8))
    save_file(_tensors(saved), runs.folder / "model.safetensors")
    config = runs.config(
        {"x": np.ones((8, 1, 8, 8), np.float32), "y": np.ones(8, np.float32)},
        model=spec,
        num_workers=2,
        collective="torch",
        pretrained=_setting(runs.folder),
        sync=Zero(stage=3),
    )
    expected = [float(b.sum()) for name, b in saved.named_buffers() if name.endswith("running_mean")]
    assert any(expected)
    assert run_ranks(2, "torch", partial(_running_means, config)) == [pytest.approx(expected)] * 2
