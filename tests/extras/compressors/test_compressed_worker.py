"""`train_worker` with gradient compression: failed and resumed runs, and replicas of sharded networks."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from acting_callback import Acts
from parity import difference, equal_to_undisturbed
from ranks import run_ranks
from small_training import columns_of, config_of, over, train_gang, weights_of
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.base import gather_bytes
from ringspark.estimators.options.compression import Compression
from ringspark.estimators.options.mesh import Mesh
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.parallel import SyncSettings, synchronize_gradients
from ringspark.estimators.parallel.layout import layout_of
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.training.callbacks import TrainingState
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.compressors import COMPRESSORS
from ringspark.extras.model_parallel.shard_network import shard_network
from ringspark.models import ModelSpec

pytestmark = pytest.mark.distributed
SPEC = ModelSpec("mlp", {"in_features": 16, "hidden": [64, 64], "out_features": 1, "dropout": 0.1})
MLP = ModelSpec("mlp", {"in_features": 16, "hidden": [64, 48], "out_features": 1, "activation": "tanh"})
TEXT = {"vocab_size": 23, "max_seq_len": 12, "dim": 16, "depth": 2, "num_heads": 4}
MakeConfig = Callable[..., TrainConfig]


def _sync(name: Any) -> AllReduce:
    return AllReduce(compression=Compression.of(name))


@pytest.fixture
def config(make_shards: Any, tmp_path: Path) -> MakeConfig:
    settings = {"model": SPEC, "optimizer": "momentum", "learning_rate": 0.001, "collective": "torch"}
    settings |= {"num_workers": 2, "checkpoint_every_steps": 2, "keep_checkpoints": 9}
    make = partial(config_of, make_shards(columns_of(330, 16)), tmp_path / "run")
    return lambda compression, **changes: make(**settings | {"sync": _sync(compression)} | changes)


def test_a_failed_training_goes_on_as_if_nothing_had_happened(config: MakeConfig) -> None:
    options = {"slice": 32, "components": 4, "samples": 3, "refresh": 5}
    made = config({"name": "gradiveq", "after": 1, **options})
    assert equal_to_undisturbed(made)[1].resumed_steps == (6,)


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_resumed_training_may_have_other_workers(config: Any, workers: int) -> None:
    """The resumed run loses about as much as an uninterrupted one: dropout draws by rank."""
    made = config({"name": "topk", "ratio": 0.3})
    straight, resumed = equal_to_undisturbed(made, then={"num_workers": workers}, bound=math.inf)
    assert resumed.resumed_steps == (6,)
    first, last = straight.history[0].train_loss, straight.history[-1].train_loss
    assert abs(resumed.history[-1].train_loss - last) < 0.3 * (first - last)


@pytest.mark.telling
def test_fp16_trains_with_residuals_that_its_loss_scale_does_not_touch(config: MakeConfig) -> None:
    """First steps overflow and are skipped, which halves the scale; residuals kept in another scale
    would be sent twice or half as large, and the loss would not fall as in full precision."""
    made = config({"name": "topk", "ratio": 0.1}, epochs=6)
    whole = train_gang(made).history
    result = train_gang(replace(made, precision="fp16", run_uri=f"{made.run_uri}-fp16"))
    assert torch.isfinite(weights_of(result, SPEC.build())).all()
    assert result.history[0].skipped_steps > 0
    drops = [run[0].train_loss - run[-1].train_loss for run in (whole, result.history)]
    assert drops[1] > 0.8 * drops[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "topk": {"ratio": 0.2},
    "randomk": {"ratio": 0.2},
    "sufficientfactors": {"rows": 4},
    "gradiveq": {"slice": 32, "components": 4, "samples": 2, "refresh": 3},
}
# CpSGD bounds the norm of the whole gradient, so it refuses shards.
OF_SHARDS = [name for name in COMPRESSORS if name not in ("none", "cpsgd")]
STEPS = 5


def _small(name: str) -> AllReduce:
    return _sync({"name": name, "least": 1, **OPTIONS.get(name, {})})


def _net() -> Any:
    """Returns a pair of layers that 'tensor' shards, after one that every rank holds."""
    torch.manual_seed(0)
    first, up, down = nn.Linear(12, 24), nn.Linear(24, 32), nn.Linear(32, 24)
    return nn.Sequential(OrderedDict(first=first, up=up, tanh=nn.Tanh(), down=down))


def _prepare(module: nn.Module, mesh: RankMesh, name: str) -> Any:
    settings = SyncSettings(sync=_small(name), seed=3)
    return synchronize_gradients(module, lambda m: torch.optim.SGD(m.parameters(), 0.1), mesh, settings)


def _compress(name: str, collective: Collective) -> dict[str, bool]:
    mesh = RankMesh.of(collective, {"data": 2, "tensor": 2})
    network = _net()
    shard_network(network, mesh, Mesh(data=2, tensor=2, plan={"up": "column", "down": "row"}))
    layout = layout_of(network)
    sync = _prepare(network, mesh, name)
    cut = {n: p for n, p in network.named_parameters() if n in layout.cuts and p.dim() > 1}
    # The shards of this rank, as a network of their own.
    alone = {n.replace(".", "_"): nn.Parameter(shard.detach().clone()) for n, shard in cut.items()}
    plain = _prepare(nn.ParameterDict(OrderedDict(alone)), RankMesh.of(mesh.gradients), name)
    found = {"as alone": True, "first is equal": True}
    for step in range(STEPS):
        rows = torch.randn(9, 12, generator=torch.Generator().manual_seed(10 * step + mesh.data.rank))
        sync.optimizer.zero_grad()
        network(rows).square().mean().backward()
        for own, parameter in zip(plain.network.parameters(), cut.values(), strict=True):
            own.grad = parameter.grad.clone()
        before = [parameter.grad.clone() for parameter in cut.values() if parameter.grad is not None]
        sync.reduce()
        plain.reduce()
        pairs = zip(plain.network.parameters(), cut.values(), strict=True)
        found["as alone"] &= all(torch.equal(own.grad, p.grad) for own, p in pairs)  # type: ignore[arg-type]
        texts = gather_bytes(collective, network.first.weight.grad.numpy().tobytes())
        found["first is equal"] &= len(set(texts)) == 1
        total = [mesh.gradients.all_reduce(gradient) for gradient in before]
        found["loses"] = not all(torch.equal(t, p.grad) for t, p in zip(total, cut.values(), strict=True))  # type: ignore[arg-type]
    return found


def _compress_all(collective: Collective) -> dict[str, Any]:
    return {name: _compress(name, collective) for name in OF_SHARDS}


_found = cache(partial(run_ranks, 4, "torch", _compress_all))


@pytest.mark.parametrize("name", OF_SHARDS)
def test_shards_are_compressed_as_by_plain_replicas_of_these_shards(name: str) -> None:
    """Five steps with residuals, to the bit. A parameter on all ranks gets one gradient on all of them."""
    expected = {"as alone": True, "first is equal": True, "loses": True}
    assert [found[name] for found in _found()] == [expected] * 4


@pytest.fixture
def cut(config: MakeConfig) -> MakeConfig:
    given = {"model": MLP, "max_grad_norm": 1.0, "epochs": 3, "gradient_accumulation": 2}
    given |= {"learning_rate": 0.01}
    return lambda sync, **changes: config("none", **given | {"sync": sync} | changes)


@pytest.fixture
def texts(make_shards: Any, tmp_path: Path) -> MakeConfig:
    ids = np.random.default_rng(0).integers(1, 23, (120, 11))
    manifest = make_shards({"x": ids, "y": np.roll(ids, -1, 1)}, name="texts")
    settings = {"task": "any", "losses": ("cross_entropy",), "model": ModelSpec("transformer_lm", TEXT)}
    settings |= {"optimizer": "momentum", "learning_rate": 0.005, "gradient_accumulation": 2}
    settings |= {"collective": "torch"}
    return partial(config_of, manifest, tmp_path / "run", **settings)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "pipeline", "sequence"])
def test_a_mesh_trains_as_replicas_if_compression_loses_nothing(cut: Any, texts: Any, axis: str) -> None:
    sync = _sync({"name": "topk", "least": 1, "ratio": 1.0})
    made = texts(sync=sync) if axis == "sequence" else cut(sync, learning_rate=0.001)
    plain = train_gang(replace(made, run_uri=f"{made.run_uri}-plain", **over({"data": 2})))
    mesh = train_gang(replace(made, **over({"data": 2, axis: 2})))
    assert difference(plain, mesh, made) < 1e-5
    assert mesh.history[-1].train_loss < mesh.history[0].train_loss


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_failed_training_over_a_mesh_resumes_to_the_bit(cut: MakeConfig, axis: str) -> None:
    made = cut(_small("gradiveq"), **over({"data": 2, axis: 2}))
    _, resumed = equal_to_undisturbed(made)
    assert resumed.resumed_steps == (6,)
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
def test_a_training_of_compressed_shards_goes_on_with_other_replicas(cut: Any, first: Any, then: Any) -> None:
    """The residuals of lost replicas are sent; over another way of sharding they are lost."""
    made = cut(_small("topk"))
    _, resumed = equal_to_undisturbed(made, first=over(first), then=over(then), bound=math.inf)
    assert resumed.resumed_steps == (6,)
    assert resumed.history[-1].train_loss < 0.9 * resumed.history[0].train_loss


def _write_table(folder: Path, state: TrainingState) -> None:
    """Writes the token table of each rank after step 5, before pipeline stages share it again."""
    if state.step == 5:
        (table,) = (p for name, p in state.module.named_parameters() if name.endswith("tokens.weight"))
        (folder / str(state.rank)).write_bytes(table.detach().numpy().tobytes())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["topk", "powersgd"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_table_of_two_stages_stays_equal(texts: Any, tmp_path: Path, name: str, tensor: int) -> None:
    """Each stage compresses the table together with other layers, or apart from them."""
    mesh = {"data": 2, "pipeline": 2, "tensor": tensor}
    made = texts(sync=_small(name), **over(mesh))
    train_gang(made, UserObjects(callbacks=(Acts(step_end=partial(_write_table, tmp_path)),)))
    # The two shards have 12 and 11 rows.
    assert len({(tmp_path / str(rank)).read_bytes() for rank in range(4 * tensor)}) == tensor


@pytest.mark.slow
def test_a_frozen_stage_agrees_with_the_stage_that_compresses(cut: MakeConfig) -> None:
    """The ranks of the frozen stage have no gradients, but take part in each decision about a step."""
    mesh = {"data": 2, "pipeline": {"stages": 2, "cuts": ["trunk.1"]}}
    made = cut(_small("topk"), freeze=("trunk.0.*",), **over(mesh))
    history = train_gang(made).history
    assert history[-1].train_loss < 0.9 * history[0].train_loss
