"""Expert parallelism gives the outputs, gradients and weights of one process."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from small_training import bare_config, workers_of
from torch import nn

from ringspark.estimators.collectives import Collective
from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.options.mesh import AXES, Mesh
from ringspark.estimators.parallel.base import GradientSync
from ringspark.estimators.parallel.mesh import RankMesh
from ringspark.estimators.parallel.shard_spec import join_shards
from ringspark.estimators.parallel.sync_settings import SyncSettings
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.objective.criterion import Criterion
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.objective.sums import Sums
from ringspark.estimators.training.precision import LossScaler, autocast
from ringspark.estimators.training.step import Recipe, forward, forward_backward
from ringspark.extras.experts.layer import Experts
from ringspark.extras.model_parallel.expert import expert_names, shard_experts
from ringspark.extras.model_parallel.expert_sync import ExpertAllReduce
from ringspark.extras.model_parallel.fake_collective import FakeCollective
from ringspark.extras.model_parallel.shard_network import check_shardable
from ringspark.models import ModelSpec, apply_activation_checkpoint

CPU = torch.device("cpu")
PARTS, EXPERTS = 2, 5  # 5 experts do not divide by 2 ranks


def _network(case: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    experts = {"num_experts": EXPERTS, "router": case["router"], "min_capacity": 1, "balance_weight": 0.1}
    experts["capacity_factor"] = case.get("capacity", 1.0)
    sizes = {"vocab_size": 13, "max_seq_len": 6, "dim": 8, "depth": 4, "num_heads": 2, "out_features": 3}
    net = ModelSpec("transformer_classifier", {**sizes, "padding_id": 0, "experts": experts}).build()
    for name, parameter in net.named_parameters():
        if name.endswith("router.weight"):
            nn.init.normal_(parameter, std=0.5)  # routes tokens to all experts from the start
    return apply_activation_checkpoint(net, case.get("checkpoint", "none"))


def _batch(step: int, mesh: RankMesh) -> tuple[Batch, int]:
    """Returns this rank's rows of a global batch of 1 to 7 rows; some ranks have none in some steps."""
    rng = np.random.default_rng(step)
    count = int(rng.integers(1, 8))
    ids = rng.integers(1, 13, size=(count, 6))
    ids[np.arange(6) >= rng.integers(1, 7, size=(count, 1))] = 0
    labels = torch.from_numpy(ids.sum(1) % 3)
    own = [len(part) for part in np.array_split(np.arange(count), mesh.data_size)]
    start = sum(own[: mesh.data_rank])
    rows = slice(start, start + own[mesh.data_rank])
    return Batch(inputs=(torch.from_numpy(ids)[rows],), labels=(labels[rows],), weight=None), count


def _trained(mesh: RankMesh, case: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Returns the full weights and the history values after some steps; runs on every rank."""
    torch.set_num_threads(1)
    net, precision = _network(case), case.get("precision", "fp32")
    cuts = {} if mesh.world.size == 1 else shard_experts(net, mesh.axes["expert"])
    if case["optimizer"] == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    else:
        # A key bias has only rounding errors as gradients, which AdamW's default epsilon would scale up.
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-4)
    sync: GradientSync = GradientSync(net, optimizer)
    if mesh.world.size > 1:
        settings = SyncSettings(micro_batches=PARTS, autocast=partial(autocast, precision, CPU))
        sync = ExpertAllReduce(net, optimizer, mesh, settings, bucket_bytes=case.get("bucket_bytes"))
    heads = [Head(label="y", loss="cross_entropy", width=3)]
    config = bare_config(precision=precision)
    recipe = Recipe(config=config, criterion=Criterion(heads), scaler=LossScaler(precision, CPU), device=CPU)
    sums = Sums("train", heads, CPU, net)
    for step in range(case.get("steps", 50)):
        batch, count = _batch(step, mesh)
        optimizer.zero_grad()
        parts = batch.split(PARTS) if batch.num_rows else []
        for number, part in enumerate(parts, 1):
            with sync.micro_batch(last=number == len(parts)):
                sums.add([forward_backward(recipe, sync, part, float(count), keeps_outputs=False)])
        if not parts:
            sync.backward_without_rows(batch.inputs)
        sync.reduce()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        for step in range(3):
            batch, _ = _batch(step, mesh)
            if batch.num_rows:
                sums.add([forward(recipe, net, net, batch, keeps_outputs=False)[1]])
            else:
                sync.forward_without_rows(batch.inputs)
    weights = {}
    for name, parameter in net.named_parameters():
        axis, whole = mesh.axes["expert"], parameter.detach()
        if name in cuts:
            others = axis.all_gather(whole.reshape(-1))
            whole = join_shards([piece.view(-1, *whole.shape[1:]) for piece in others], cuts[name])
        weights[name] = whole
    return weights, sums.take(mesh.data)


def _told(case: Mapping[str, Any], collective: Collective) -> Any:
    weights, numbers = _trained(RankMesh.of(collective, case["mesh"]), case)
    return [{name: tensor.flatten().tolist() for name, tensor in weights.items()}, numbers]


def _check(case: Mapping[str, Any], tolerance: float = 1e-5) -> None:
    alone, expected = _trained(RankMesh.of(LocalCollective()), case)
    assert expected["train_dropped_share"] > 0.05 or case.get("capacity", 1.0) is None
    for weights, numbers in run_ranks(workers_of(case["mesh"]), "torch", partial(_told, case)):
        differences = {n: (torch.tensor(weights[n]) - alone[n].flatten()).abs().max().item() for n in alone}
        assert max(differences.values()) < tolerance, differences
        assert numbers == pytest.approx(expected, rel=10 * tolerance)


TWO = {"expert": 2}
FOUR = {"expert": 4}
BOTH = {"data": 2, "expert": 2}


@pytest.mark.distributed
def test_two_ranks_with_other_experts_train_what_one_process_trains() -> None:
    """Sometimes a rank has no rows, or fewer micro-batches than the other rank."""
    _check({"mesh": TWO, "router": "switch", "optimizer": "sgd", "checkpoint": "sqrt"})


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        {"mesh": TWO, "router": "gshard", "optimizer": "adamw", "bucket_bytes": 2000},
        {
            "mesh": TWO,
            "router": "expert_choice",
            "optimizer": "sgd",
            "checkpoint": "all",
            "bucket_bytes": 2000,
        },
        {"mesh": TWO, "router": "gshard", "optimizer": "sgd", "capacity": None},
        {"mesh": FOUR, "router": "switch", "optimizer": "adamw"},
        {"mesh": FOUR, "router": "expert_choice", "optimizer": "sgd"},
        {"mesh": BOTH, "router": "gshard", "optimizer": "sgd", "checkpoint": "sqrt", "bucket_bytes": 2000},
    ],
    ids=str,
)
def test_any_number_of_expert_ranks_trains_what_one_process_trains(case: dict[str, Any]) -> None:
    _check(case)


@pytest.mark.slow
@pytest.mark.distributed
def test_in_sixteen_bits_ranks_differ_by_their_rounding_alone() -> None:
    """Few steps: after more, rounding would send borderline tokens to different experts."""
    case = {"mesh": TWO, "router": "switch", "optimizer": "sgd", "precision": "bf16", "steps": 5}
    _check(case, tolerance=3e-3)


def test_the_names_of_experts_are_those_of_their_stacked_weights() -> None:
    names = expert_names(_network({"router": "switch"}))
    stacked = ("up_weight", "up_bias", "down_weight", "down_bias")
    assert names == {f"blocks.{block}.mixture.experts.{key}" for block in (1, 3) for key in stacked}


def test_a_network_without_enough_experts_is_refused() -> None:
    seat: Any = FakeCollective(0, 6)
    with pytest.raises(
        ValueError, match=r"'expert' 6 workers, more than the 5 experts of 'blocks\.1\.mixture'"
    ):
        shard_experts(_network({"router": "switch"}), seat)
    with pytest.raises(ValueError, match="needs a mixture of experts, and Linear has none; give the model"):
        shard_experts(nn.Linear(2, 2), seat)


def test_a_hook_on_experts_that_get_other_rows_is_refused() -> None:
    network = _network({"router": "switch"})
    experts = next(layer for layer in network.modules() if isinstance(layer, Experts))
    experts.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="have a forward hook, which would see rows of other workers"):
        check_shardable(network, dict.fromkeys(AXES, 1) | {"expert": 2}, Mesh())
