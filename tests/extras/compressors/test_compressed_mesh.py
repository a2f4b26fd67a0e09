"""Gradient compression between the replicas of a network that a mesh shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing_callback import Fails
from ranks import run_ranks
from registries import EXTRAS, list_available, names_of
from small_training import config_of, train_gang, weights_of, workers_of
from torch import nn

from ringspark.estimators import WorkerError
from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.options.compression import Compression
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.parallel import SyncSettings, synchronize_gradients
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.compressors import COMPRESSORS
from ringspark.extras.compressors.compressed_all_reduce import CompressedAllReduce
from ringspark.extras.model_parallel.shard_network import shard_network
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

pytestmark = pytest.mark.distributed
MakeShards = Callable[..., ShardManifest]
OPTIONS: dict[str, dict[str, Any]] = {
    "topk": {"ratio": 0.2},
    "randomk": {"ratio": 0.2},
    "sufficientfactors": {"rows": 4},
    "gradiveq": {"slice": 32, "components": 4, "samples": 2, "refresh": 3},
}
# CpSGD bounds the norm of the whole gradient, so it refuses shards.
OF_SHARDS = [name for name in COMPRESSORS if name not in ("none", "cpsgd")]
COMPRESSED = names_of(COMPRESSORS, OF_SHARDS)
CORE = {name for name, path in COMPRESSORS.paths.items() if not path.startswith(EXTRAS)}
STEPS = 5


def _compression(name: str) -> Compression:
    return Compression.of({"name": name, "least": 1, **OPTIONS.get(name, {})})


class Net(nn.Module):
    """A pair of layers that 'tensor' shards, after one that every rank holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 32), nn.Linear(32, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.first(x))))  # type: ignore[no-any-return]


class Alone(nn.Module):
    """The shards of one rank, as a network of their own."""

    def __init__(self, shards: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, shard in shards.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(shard.detach().clone()))


def _prepare(module: nn.Module, mesh: RankMesh, compression: Compression) -> CompressedAllReduce:
    settings = SyncSettings(sync=AllReduce(compression=compression), seed=3)
    sync = synchronize_gradients(module, lambda m: torch.optim.SGD(m.parameters(), 0.1), mesh, settings)
    assert isinstance(sync, CompressedAllReduce)
    return sync


def _compress(name: str, collective: Collective) -> dict[str, bool]:
    mesh = RankMesh.of(collective, {"data": 2, "tensor": 2})
    network = Net()
    plan = {"up": "column", "down": "row"}
    shard_network(network, mesh, Mesh(data=2, tensor=2, plan=plan))
    layout = layout_of(network)
    assert layout is not None
    sync = _prepare(network, mesh, _compression(name))
    cut = {n: p for n, p in network.named_parameters() if n in layout.cuts and p.dim() > 1}
    plain = _prepare(Alone(cut), RankMesh.of(mesh.gradients), _compression(name))
    found = {"as alone": True, "first is equal": True}
    for step in range(STEPS):
        rows = torch.randn(9, 12, generator=torch.Generator().manual_seed(10 * step + mesh.data_rank))
        sync.optimizer.zero_grad()
        network(rows).square().mean().backward()
        for own, parameter in zip(plain.network.parameters(), cut.values(), strict=True):
            assert parameter.grad is not None
            own.grad = parameter.grad.clone()
        before = [parameter.grad.clone() for parameter in cut.values() if parameter.grad is not None]
        sync.reduce()
        plain.reduce()
        pairs = zip(plain.network.parameters(), cut.values(), strict=True)
        found["as alone"] &= all(torch.equal(own.grad, p.grad) for own, p in pairs)  # type: ignore[arg-type]
        weight = network.first.weight.grad
        assert weight is not None
        texts = gather_bytes(collective, weight.numpy().tobytes())
        found["first is equal"] &= len(set(texts)) == 1
        total = [mesh.gradients.all_reduce(gradient) for gradient in before]
        found["loses"] = not all(torch.equal(t, p.grad) for t, p in zip(total, cut.values(), strict=True))  # type: ignore[arg-type]
    return found


def _compress_all(collective: Collective) -> dict[str, Any]:
    return {name: _compress(name, collective) for name in list_available(COMPRESSORS) if name in OF_SHARDS}


@cache
def _found() -> list[dict[str, Any]]:
    return run_ranks(4, "torch", _compress_all)


@pytest.mark.parametrize("name", COMPRESSED)
def test_shards_are_compressed_as_by_plain_replicas_of_these_shards(name: str) -> None:
    """Five steps with residuals, to the bit. A parameter on all ranks gets one gradient on all of them."""
    expected = {"as alone": True, "first is equal": True, "loses": True}
    assert [found[name] for found in _found()] == [expected] * 4


MLP = ModelSpec("mlp", {"in_features": 16, "hidden": [64, 48], "out_features": 1, "activation": "tanh"})
TEXT = ModelSpec(
    "transformer_lm", {"vocab_size": 23, "max_seq_len": 12, "dim": 16, "depth": 2, "num_heads": 4}
)


def _config(make_shards: MakeShards, folder: Path, **changes: Any) -> TrainConfig:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(330, 16)).astype(np.float32)
    manifest = make_shards({"x": x, "y": x.sum(1).astype(np.float32)})
    settings: dict[str, Any] = {
        "model": MLP.to_json(),
        "optimizer": "momentum",
        "learning_rate": 0.001,
        "collective": "torch",
        "max_grad_norm": 1.0,
        "epochs": 3,
    }
    return config_of(manifest, folder, **settings | changes)


def _over(config: TrainConfig, mesh: dict[str, Any], uri: Path) -> TrainConfig:
    workers = workers_of(mesh)
    return replace(config, run_uri=str(uri), num_workers=workers, parallelism=mesh)


# Options with which compression loses nothing. In 16 bits, only gradients of equal rows round equally.
WHOLE = {name: {"ratio": 1.0} for name in ("topk", "randomk", "sparsify")} | {"bf16": {}, "fp16": {}}
COMPARED = [
    (name, axis)
    for name in WHOLE
    for axis in ("tensor", "pipeline", "sequence")
    if axis != "sequence" or "ratio" in WHOLE[name]
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        pytest.param(name, axis, marks=[pytest.mark.extras] if name not in CORE else [])
        for name, axis in COMPARED
    ],
)
def test_a_mesh_trains_as_plain_replicas_if_compression_loses_nothing(
    make_shards: MakeShards, tmp_path: Path, name: str, axis: str
) -> None:
    sync = AllReduce(compression=Compression.of({"name": name, "least": 1, **WHOLE[name]}))
    spec, make = (TEXT, _texts) if axis == "sequence" else (MLP, _config)
    config = make(make_shards, tmp_path, sync=sync, gradient_accumulation=2)
    plain = train_gang(_over(config, {"data": 2}, tmp_path / "plain"))
    mesh = train_gang(_over(config, {"data": 2, axis: 2}, tmp_path / "mesh"))
    one, other = (weights_of(result, spec.build()) for result in (plain, mesh))
    assert (one - other).abs().max() < 1e-5
    assert mesh.history[-1].train_loss < mesh.history[0].train_loss


def _texts(make_shards: MakeShards, folder: Path, **changes: Any) -> TrainConfig:
    ids = np.random.default_rng(0).integers(1, 23, (120, 11))
    manifest = make_shards({"x": ids, "y": np.roll(ids, -1, 1)})
    settings: dict[str, Any] = {
        "model": TEXT.to_json(),
        "task": "any",
        "losses": ("cross_entropy",),
        "optimizer": "momentum",
        "learning_rate": 0.005,
        "collective": "torch",
    }
    return config_of(manifest, folder, **settings | changes)


class WritesTable(Callback):
    """Writes the token table of each rank after step 5, before pipeline stages share it again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step_end(self, state: TrainingState) -> None:
        if state.step != 5:
            return
        (table,) = (p for name, p in state.module.named_parameters() if name.endswith("tokens.weight"))
        (self._folder / str(state.rank)).write_bytes(table.detach().numpy().tobytes())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_failed_training_over_a_mesh_resumes_to_the_bit(
    make_shards: MakeShards, tmp_path: Path, name: str, axis: str
) -> None:
    sync = AllReduce(compression=_compression(name))
    config = _config(make_shards, tmp_path, sync=sync, checkpoint_every_steps=2, gradient_accumulation=2)
    config = replace(config, learning_rate=0.01)
    mesh = {"data": 2, axis: 2}
    straight = train_gang(_over(config, mesh, tmp_path / "straight"))
    objects = UserObjects(callbacks=(Fails(tmp_path / "failed"),))
    with pytest.raises(WorkerError, match="step 7"):
        train_gang(_over(config, mesh, tmp_path / "run"), objects)
    resumed = train_gang(_over(config, mesh, tmp_path / "run"), objects)
    assert resumed.resumed_steps == (6,)
    assert weights_of(resumed, MLP.build()).equal(weights_of(straight, MLP.build()))
    assert resumed.history[-1].train_loss < 0.9 * resumed.history[0].train_loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"data": 2, "tensor": 2}, {"tensor": 2}),
        ({"data": 2, "pipeline": 2}, {"pipeline": 2}),
        ({"data": 2, "tensor": 2}, {"data": 2}),
    ],
)
def test_a_training_of_compressed_shards_goes_on_with_other_replicas(
    make_shards: MakeShards, tmp_path: Path, first: dict[str, int], then: dict[str, int]
) -> None:
    """The residuals of lost replicas are sent; over another way of sharding they are lost."""
    sync = AllReduce(compression=_compression("topk"))
    config = _config(make_shards, tmp_path, sync=sync, checkpoint_every_steps=2, gradient_accumulation=2)
    config = replace(config, learning_rate=0.01)
    objects = UserObjects(callbacks=(Fails(tmp_path / "failed"),))
    with pytest.raises(WorkerError, match="step 7"):
        train_gang(_over(config, first, tmp_path / "run"), objects)
    resumed = train_gang(_over(config, then, tmp_path / "run"), objects)
    assert resumed.resumed_steps == (6,)
    assert resumed.history[-1].train_loss < 0.9 * resumed.history[0].train_loss


@pytest.mark.slow
@pytest.mark.parametrize("name", ["topk", "powersgd"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_table_that_two_stages_share_stays_equal_on_all_ranks(
    make_shards: MakeShards, tmp_path: Path, name: str, tensor: int
) -> None:
    """Each stage compresses the table together with other layers, or apart from them."""
    config = _texts(
        make_shards, tmp_path, sync=AllReduce(compression=_compression(name)), gradient_accumulation=2
    )
    mesh = {"data": 2, "pipeline": 2, "tensor": tensor}
    train_gang(_over(config, mesh, tmp_path / "run"), UserObjects(callbacks=(WritesTable(tmp_path),)))
    # The two shards have 12 and 11 rows.
    assert len({(tmp_path / str(rank)).read_bytes() for rank in range(4 * tensor)}) == tensor


@pytest.mark.slow
def test_a_frozen_stage_agrees_with_the_stage_that_compresses(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    """The ranks of the frozen stage have no gradients, but take part in each decision about a step."""
    sync = AllReduce(compression=_compression("topk"))
    config = _config(make_shards, tmp_path, sync=sync, learning_rate=0.01, freeze=("trunk.0.*",))
    mesh = {"data": 2, "pipeline": {"stages": 2, "cuts": ["trunk.1"]}}
    result = train_gang(_over(replace(config, gradient_accumulation=2), mesh, tmp_path / "run"))
    assert result.history[-1].train_loss < 0.9 * result.history[0].train_loss
