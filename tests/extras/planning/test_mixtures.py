"""Memory and work plans of networks whose shapes depend on values that a plan does not have."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest
import torch
from measured_step import Rounds, make_networks

from ringspark.estimators import plan_memory
from ringspark.estimators.launch.local import run_spawned
from ringspark.extras.planning.layers import count_layers
from ringspark.models import ModelSpec

SIZES = {"vocab_size": 30, "max_seq_len": 16, "dim": 32, "depth": 2, "num_heads": 2, "out_features": 2}
BATCH = (((8, 16), torch.int64), ((8,), torch.int64))


def spec(experts: dict[str, Any] | None) -> ModelSpec:
    return ModelSpec("transformer_classifier", SIZES | ({} if experts is None else {"experts": experts}))


def test_a_plan_of_memory_knows_the_weights_of_all_experts() -> None:
    plans = [plan_memory(spec(e), BATCH, loss="cross_entropy") for e in (None, {"num_experts": 8})]
    dense, mixed = (plan.parameters for plan in plans)
    # 7 more MLPs of width 4 * 32, and the router.
    assert mixed - dense == 4 * (7 * (2 * 128 * 32 + 128 + 32) + 8 * 32)


@pytest.mark.parametrize(
    "experts",
    [
        {"num_experts": 8, "router": "switch"},
        {"num_experts": 8, "router": "gshard", "mlp_dim": 64},
        {"num_experts": 8, "router": "expert_choice", "capacity_factor": 1.0, "min_capacity": 1},
    ],
)
def test_experts_cost_the_operations_of_the_perceptron_they_replace(experts: dict[str, Any]) -> None:
    ids = torch.zeros(8, 16, dtype=torch.int64)
    work = {layer.name: layer.work for layer in count_layers(spec(None).build(), (ids,)).layers}
    mixed = {layer.name: layer.work for layer in count_layers(spec(experts).build(), (ids,)).layers}
    perceptron = work["blocks.1.up"] + work["blocks.1.down"]
    assert mixed["blocks.1.mixture.experts"] == pytest.approx(perceptron, rel=0.05)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [{"expert": 2}, {"data": 2, "expert": 2}], ids=str)
def test_the_plan_of_ranks_with_other_experts_is_within_a_tenth_of_the_fullest_ones_peak(
    mesh: dict[str, int],
) -> None:
    """The plan assumes an even load without dropped tokens, but the router may be uneven.

    There are 256 tokens per rank and 8 experts.
    """
    workers = prod(mesh.values())
    network = make_networks(4 * workers, tiny=True)[-1]
    rounds = Rounds(network, [network.config(mesh, 1, workers)], 0, 0)
    texts = run_spawned(workers, "torch", rounds, timeout_seconds=120)
    measured = max(json.loads(text)[1][0] for text in texts)
    inputs, labels = (((network.rows // workers, *shape), dtype) for (_, *shape), dtype in network.batch)
    settings = {"numWorkers": workers, "collective": "torch", "loss": network.loss}
    plan = plan_memory(network.spec, (inputs, labels), parallelism=mesh, **settings)
    assert 0.9 < plan.peak / measured < 1.1
    # Each rank has half of the experts and all other layers.
    whole = plan_memory(network.spec, (inputs, labels), **settings)
    experts = sum(p.numel() for n, p in network.spec.build().named_parameters() if ".experts." in n)
    assert whole.parameters - plan.parameters == 4 * experts // 2


def test_meshes_over_experts_with_a_sharding_are_not_planned() -> None:
    settings = {"parallelism": {"expert": 2}, "numWorkers": 2, "collective": "torch"}
    with pytest.raises(ValueError, match="over 'expert' with sharding='optimizer' cannot be planned"):
        plan_memory(spec({"num_experts": 8}), BATCH, loss="cross_entropy", sharding="optimizer", **settings)
