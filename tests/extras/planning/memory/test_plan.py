"""The memory plan matches a real step, and planning allocates nothing of that size."""

import resource
import sys
from pathlib import Path
from typing import Any

import measured_step
import numpy as np
import pytest
import torch
from measured_step import compare
from small_networks import Net
from small_training import bare_config
from torch import nn

from ringspark.estimators import MemoryPlan, plan_memory
from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.options.compression import Compression
from ringspark.estimators.options.sync import AllReduce
from ringspark.estimators.parallel import SyncSettings
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.extras.compressors.compressed_all_reduce import CompressedAllReduce
from ringspark.extras.planning.memory.sharing import communication_bytes
from ringspark.models import ModelSpec

ROWS = 64
DEEP = ModelSpec("mlp", {"in_features": 8, "hidden": [32] * 16, "out_features": 3})
BATCH = (((ROWS, 8), "float32"), ((ROWS,), "int64"))
DEEP_PARAMETERS = 4 * ((8 + 1) * 32 + 15 * (32 + 1) * 32 + (32 + 1) * 3)


def test_parameters_gradients_and_optimizer_state_are_exact() -> None:
    # SGD's update needs no temporaries, so the peak comes when the last gradient is computed.
    for optimizer, state in (("sgd", 0), ("momentum", 1), ("adamw", 2)):
        plan = plan_memory(DEEP, BATCH, optimizer=optimizer)
        num_tensors = 2 * 17
        steps = 4 * num_tensors if optimizer == "adamw" else 0
        assert plan.parameters == DEEP_PARAMETERS
        assert plan.gradients == DEEP_PARAMETERS
        assert plan.optimizer_state == state * DEEP_PARAMETERS + steps
        assert plan.batch == ROWS * (8 * 4 + 8)
        assert plan.communication == 0


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    net[0].requires_grad_(False)
    plan = plan_memory(net, BATCH)
    trained = 4 * (16 + 1) * 3
    assert plan.gradients == trained
    assert plan.optimizer_state == 2 * trained + 2 * 4
    assert plan.parameters == trained + 4 * (8 + 1) * 16


def test_buffers_and_tied_weights_count_once() -> None:
    layers = {"first": nn.Linear(8, 8), "norm": nn.BatchNorm1d(8), "second": nn.Linear(8, 8)}
    tied = Net(lambda self, x: self.second(self.norm(self.first(x))) * self.scale[0], **layers)
    tied.second.weight = tied.first.weight
    tied.register_buffer("scale", torch.ones(100), persistent=False)
    plan = plan_memory(tied, (((ROWS, 8), "float32"), ((ROWS, 8), "float32")))
    parameters = 4 * (64 + 8 + 8 + 16)
    assert plan.parameters == parameters + 4 * (8 + 8 + 100) + 8
    assert plan.gradients == parameters


def test_the_parts_at_the_peak_add_up_to_it() -> None:
    plan = plan_memory(DEEP, BATCH, precision="bf16", gradientCheckpointing="sqrt")
    assert sum(plan.at_peak.values()) == plan.peak
    for part, count in plan.at_peak.items():
        assert count <= getattr(plan, part)


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [
        ({"gradientCheckpointing": "sqrt"}, {}),
        ({"gradientCheckpointing": "all"}, {}),
        ({"gradientAccumulation": 2}, {}),
        ({"gradientAccumulation": 8}, {"gradientAccumulation": 2}),
    ],
)
def test_stronger_settings_take_fewer_activations(stronger: Any, weaker: Any) -> None:
    # GELU saves its input and the next layer saves its output. With ReLU both would be one tensor.
    spec = ModelSpec(DEEP.target, DEEP.kwargs | {"activation": "gelu"})
    plans = [plan_memory(spec, BATCH, rows=4096, **settings) for settings in (stronger, weaker)]
    assert plans[0].peak < plans[1].peak
    assert plans[0].activations < plans[1].activations


def test_each_way_of_sharding_leaves_a_rank_its_share() -> None:
    plans = {
        name: plan_memory(DEEP, BATCH, numWorkers=4, sharding=name, collective="torch")
        for name in ("none", "optimizer", "gradients", "parameters")
    }
    whole = plans["none"]
    parts = ("optimizer_state", "gradients", "parameters")
    for level, name in enumerate(("optimizer", "gradients", "parameters"), 1):
        for number, part in enumerate(parts):
            share = getattr(whole, part) // (4 if number < level else 1)
            assert getattr(plans[name], part) == share


def test_gradients_travel_in_buffers_only_where_there_are_several_workers() -> None:
    assert plan_memory(DEEP, BATCH, collective="horovod").communication == 0
    for collective in ("horovod", "torch"):
        assert plan_memory(DEEP, BATCH, collective=collective, numWorkers=2).communication >= DEEP_PARAMETERS


def test_compressed_gradients_have_their_vector_and_what_is_left_of_the_last_one() -> None:
    """The plan counts as many bytes as the compressor keeps; a small tensor travels in a bucket."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    config = bare_config(num_workers=2, sync=AllReduce(compression=Compression.of("topk")))
    optimizer, mesh = torch.optim.SGD(module.parameters(), 0.1), RankMesh.of(LocalCollective())
    sync = CompressedAllReduce(module, optimizer, mesh, SyncSettings(sync=config.sync))
    kept = [t for group in sync._groups for t in (group._vector, group.residual)]
    kept += [bucket.buffer for bucket in sync._small]
    assert communication_bytes(config, module) == num_bytes(kept)
    assert sum(t.numel() for t in kept) == 2 * 64 * 64 + (64 + 2 * 64 + 2) + 3


def test_a_plan_does_not_depend_on_how_the_batch_is_given() -> None:
    plan = plan_memory(DEEP, BATCH)
    forms: list[Any] = [
        (torch.zeros(ROWS, 8), torch.zeros(ROWS, dtype=torch.int32)),
        (torch.zeros(ROWS, 8, device="meta"), torch.zeros(ROWS, dtype=torch.int64, device="meta")),
        (np.zeros((ROWS, 8)), np.zeros(ROWS, dtype=np.int8)),
        ([((ROWS, 8), torch.float64)], [((ROWS,), np.int16)]),
    ]
    for batch in forms:
        assert plan_memory(DEEP, batch) == plan
    two_rows = (np.zeros((2, 8)), np.zeros(2, dtype=np.int64))
    assert plan_memory(DEEP, two_rows, rows=ROWS) == plan


def test_a_plan_leaves_the_module_and_the_random_numbers_alone() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    plan_memory(net, BATCH, gradientCheckpointing=["0"])
    assert torch.equal(torch.get_rng_state(), state)
    assert "forward" not in vars(net[0])
    assert all(p.grad is None for p in net.parameters())
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


def test_lazy_layers_learn_their_sizes() -> None:
    lazy = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(3))
    known = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    assert plan_memory(lazy, BATCH) == plan_memory(known, BATCH)
    assert isinstance(lazy[0], nn.LazyLinear)


def test_a_network_of_a_hundred_gigabytes_is_planned_without_its_memory() -> None:
    spec = ModelSpec("mlp", {"in_features": 8, "hidden": [40_000] * 17, "out_features": 3})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = plan_memory(spec, BATCH, optimizer="sgd")
    assert plan.parameters > 100e9
    assert plan.peak > 2 * plan.parameters
    # ru_maxrss counts KiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


def test_a_network_that_looks_at_its_data_is_refused_with_the_reason() -> None:
    branches = Net(lambda self, x: self.layer(x if x.sum() > 0 else -x), layer=nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"model Net cannot be planned without data: .*DataDependent"):
        plan_memory(branches, BATCH)


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ((np.float32(1.0), np.zeros(3)), "must be a tensor, a NumPy array or"),
        ((torch.zeros(()), np.zeros(3)), "rows as first dimension"),
    ],
)
def test_a_batch_of_another_form_is_refused(batch: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan_memory(DEEP, batch)


def test_settings_that_training_refuses_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sync=Zero\(stage=3\)"):
        plan_memory(DEEP, BATCH, sharding="parameters", collective="horovod", numWorkers=2)
    with pytest.raises(ValueError, match="adamw"):
        plan_memory(DEEP, BATCH, optimizer="adamv")


CASES: list[tuple[str, dict[str, Any]]] = [
    ("MLP", {}),
    ("MLP", {"optimizer": "adafactor"}),
    ("MLP", {"activationCompression": "bits"}),
    ("TRANSFORMER", {}),
    ("TRANSFORMER", {"precision": "fp16", "optimizer": "sgd"}),
    ("TRANSFORMER", {"gradientCheckpointing": "sqrt"}),
    ("TRANSFORMER", {"gradientCheckpointing": "all", "precision": "bf16"}),
    ("TRANSFORMER", {"gradientAccumulation": 4}),
    ("TRANSFORMER", {"optimizer": "adamw8bit"}),
    ("TRANSFORMER", {"activationCompression": "int8"}),
    ("TRANSFORMER", {"activationOffload": "disk"}),
    ("RESNET", {}),
    ("RESNET", {"gradientAccumulation": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("network", "settings"), CASES, ids=str)
def test_the_plan_is_within_a_tenth_of_the_trainers_measured_peak(network: str, settings: Any) -> None:
    plan, measured = compare(getattr(measured_step, network), 8, **settings)
    assert isinstance(plan, MemoryPlan)
    assert 0.9 < plan.peak / measured < 1.1


def test_the_chart_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    plan_memory(DEEP, BATCH, rows=4096, budget="5m").save_chart(str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_chart_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'ringspark\[examples\]'"):
        plan_memory(DEEP, BATCH).save_chart(str(tmp_path / "plan.png"))


def test_rows_that_do_not_divide_into_micro_batches_count_once() -> None:
    network = ModelSpec("mlp", {"in_features": 64, "hidden": [256, 256], "out_features": 1})

    def plan(rows: int) -> MemoryPlan:
        batch = (((rows, 64), "float32"), ((rows,), "float32"))
        return plan_memory(network, batch, gradientAccumulation=4)

    fewer, uneven, more = plan(8), plan(9), plan(12)
    assert uneven.batch == 9 * 65 * 4
    # Only the first micro-batch has three rows, and it finds no gradients.
    assert uneven.peak - fewer.peak < (more.peak - fewer.peak) / 4
