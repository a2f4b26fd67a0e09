"""Memory plans of sharded networks and mixtures: exact shards, live micro-batches, measured peaks."""

import json
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from measured_step import Rounds, make_networks
from simulation import count_live
from small_training import bare_config
from torch import nn

from ringspark.estimators.launch.local import run_spawned
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning.memory.columns import columns_of
from ringspark.extras.planning.memory.cut_network import CutNetwork, cut_network
from ringspark.extras.planning.memory.measured_ranks import orders_of, peak_of_steps, steps_of
from ringspark.extras.planning.memory.plan import plan_memory
from ringspark.extras.planning.memory.rank_step import RankBytes, measure_ranks
from ringspark.extras.planning.work import count_layers
from ringspark.models import ModelSpec
from ringspark.models.meta_device import build_on_meta

ROWS, SEQ, DIM, DEPTH, VOCAB = 8, 16, 32, 4, 64
SIZES = {"vocab_size": VOCAB, "max_seq_len": SEQ, "dim": DIM, "depth": DEPTH, "num_heads": 4}
SPEC = ModelSpec("transformer_lm", SIZES)
BATCH = (((ROWS, SEQ), "int64"), ((ROWS, SEQ), "int64"))


def _config(mesh: dict[str, Any], workers: int, micro: int = 1, **changes: Any) -> TrainConfig:
    columns = {"input_columns": ("ids",), "label_columns": ("next",)}
    settings = {"model": SPEC, "losses": ("cross_entropy",), "batch_size": ROWS, "collective": "torch"}
    config = bare_config(**columns, **settings)
    return replace(config, num_workers=workers, parallelism=mesh, gradient_accumulation=micro, **changes)


def _measured(config: TrainConfig, rows: int) -> tuple[CutNetwork, list[RankBytes]]:
    inputs, labels = columns_of(BATCH, rows)
    network = cut_network(build_on_meta(SPEC.build), config.axes, config.parallelism, inputs)
    return network, measure_ranks(config, UserObjects(), network, inputs, labels)


def test_a_stage_and_a_cut_matrix_have_the_bytes_of_their_parameters() -> None:
    whole = {name: p.numel() for name, p in build_on_meta(SPEC.build).named_parameters()}
    network, ranks = _measured(_config({"pipeline": 2, "tensor": 2}, 4), ROWS)
    cut = ("tokens.weight", "qkv.weight", "qkv.bias", "out.weight", "up.weight", "up.bias", "down.weight")
    for part, rank in zip(network.parts, ranks, strict=True):
        names = [name for name, _ in part.named_parameters()]
        parts = [2 if name.endswith(cut) else 1 for name in names]
        held = 4 * sum(whole[name] // by for name, by in zip(names, parts, strict=True))
        assert rank.parts["parameters"] == rank.parts["gradients"] == held
        # AdamW: two moments per number, and a step count per tensor.
        assert rank.parts["optimizer_state"] == 2 * held + 4 * len(names)
    # Tied embeddings: the table is in the first stage and in the last.
    names = [{name for name, _ in part.named_parameters()} for part in network.parts]
    assert names[0] | names[1] == set(whole)
    assert names[0] & names[1] == {"tokens.weight"}


def test_a_block_exchanges_twice_forward_and_twice_backward() -> None:
    """The embedding table adds one all-reduce, and the loss of sharded logits three numbers per token."""
    _, (rank,) = _measured(_config({"tensor": 2}, 2), ROWS)
    hidden, tokens = 4 * ROWS * SEQ * DIM, 4 * ROWS * SEQ
    forward = [(m.kind, m.num_bytes) for m in rank.passes[0, True].messages["tensor"]]
    backward = [(m.kind, m.num_bytes) for m in rank.passes[0, False].messages["tensor"]]
    loss = [("all_reduce", tokens), ("all_reduce", 2 * tokens)]
    assert forward == [("all_reduce", hidden)] * (1 + 2 * DEPTH) + loss
    assert backward == [("all_reduce", hidden)] * (1 + 2 * DEPTH)


def test_spread_rows_pass_keys_and_values_on_and_keep_a_part_of_what_whole_ones_do() -> None:
    """In a ring of two, keys and values are sent once forward, and once backward with their gradients."""
    _, (whole,) = _measured(_config({}, 1), ROWS)
    _, (rank,) = _measured(_config({"sequence": 2}, 2), ROWS)
    own = 4 * ROWS * SEQ // 2 * DIM
    forward = [(m.kind, m.num_bytes) for m in rank.passes[0, True].messages["sequence"]]
    backward = [(m.kind, m.num_bytes) for m in rank.passes[0, False].messages["sequence"]]
    assert forward == [("shift", 2 * own)] * DEPTH + [("all_gather", 4 * ROWS * SEQ * VOCAB)]
    assert backward == [("shift", 4 * own), ("shift", 2 * own)] * DEPTH
    assert rank.parts == whole.parts
    # The outputs and their loss have whole rows.
    outputs = 2 * 4 * ROWS * SEQ * VOCAB
    kept, least = (r.passes[0, True].kept for r in (whole, rank))
    assert 0.4 * (kept - outputs) < least - outputs < 0.6 * (kept - outputs)


def test_each_live_micro_batch_keeps_its_activations() -> None:
    """1F1B: the first stage of p holds p micro-batches and the last one holds one, at most their number."""
    config = _config({"pipeline": {"stages": 4, "cuts": ["blocks.1", "blocks.2", "blocks.3"]}}, 4, 8)
    network, ranks = _measured(config, 1)
    assert network.owners == [3, 2, 1, 0]
    rank = ranks[2]
    kept = rank.passes[1, True].kept
    peaks = {m: peak_of_steps(rank, steps_of(config, network.owners, m)[2], config) for m in (1, 2, 3, 4, 8)}
    live = {m: count_live(orders_of(config, m))[2] for m in peaks}
    assert live == {1: 1, 2: 2, 3: 3, 4: 3, 8: 3}
    batch = {m: m * rank.batch for m in peaks}
    # Besides, at most a few values and gradients are in flight.
    places = 4 * rank.arriving[1]
    assert 0 <= peaks[3].total - batch[3] - (peaks[2].total - batch[2]) - kept <= places
    assert 0 <= peaks[8].total - batch[8] - (peaks[4].total - batch[4]) <= places < kept
    pipeline = replace(config.parallelism.pipeline, schedule="gpipe")
    gpipe = replace(config, parallelism=replace(config.parallelism, pipeline=pipeline))
    highest = [peak_of_steps(rank, steps_of(gpipe, network.owners, m)[2], gpipe).total for m in (4, 8)]
    assert 0 <= highest[1] - highest[0] - 4 * (kept + rank.batch) <= places


def _compared(network: Any, mesh: dict[str, int]) -> Any:
    """Returns the plan of a benchmark's network over a mesh, and the measured peak of its fullest rank."""
    workers = prod(mesh.values())
    rounds = Rounds(network, [network.config(mesh, 1, workers)], 0, 0)
    texts = run_spawned(workers, "torch", rounds, timeout_seconds=120)
    measured = max(json.loads(text)[1][0] for text in texts)
    return _plan_of(network, workers, parallelism=mesh), measured


def _plan_of(network: Any, workers: int, **settings: Any) -> Any:
    batch = tuple(((network.rows // workers, *shape), dtype) for (_, *shape), dtype in network.batch)
    given = {"numWorkers": workers, "collective": "torch", "loss": network.loss}
    return plan_memory(network.spec, batch, **given, **settings)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "hidden",
    [
        pytest.param([128] * 4, id="one exchange", marks=pytest.mark.slow),
        pytest.param([2048] * 5, id="buckets"),
    ],
)
def test_two_whole_copies_need_what_the_memory_plan_says(hidden: list[int]) -> None:
    """In the backward pass of a large network, a gradient's memory is free after its copy to a bucket."""
    few_rows = make_networks(32, tiny=True)[1]
    spec = ModelSpec("mlp", {"in_features": 256, "hidden": hidden, "out_features": 1})
    network = replace(few_rows, spec=spec)
    plan, measured = _compared(network, {"data": 2})
    assert plan.peak == pytest.approx(measured, rel=0.01)


def test_a_plan_of_a_mesh_is_that_of_its_fullest_rank() -> None:
    mesh = {"pipeline": 2}
    plan = plan_memory(
        SPEC, BATCH, parallelism=mesh, numWorkers=2, gradientAccumulation=4, collective="torch", budget="1g"
    )
    config = _config(mesh, 2, 4)
    network, ranks = _measured(config, ROWS // 4)
    steps = steps_of(config, network.owners, 4)
    peaks = [peak_of_steps(r, own, config).total for r, own in zip(ranks, steps, strict=True)]
    assert plan.peak == max(peaks) < plan_memory(SPEC, BATCH, gradientAccumulation=4).peak
    assert sum(plan.at_peak.values()) == plan.peak
    assert plan.fits
    # One shard of the state for each rank with other rows.
    shared = {"parallelism": {"data": 2, "tensor": 2}, "numWorkers": 4, "collective": "torch"}
    whole, split = (plan_memory(SPEC, BATCH, sharding=s, **shared) for s in ("none", "optimizer"))
    assert split.optimizer_state == whole.optimizer_state // 2


EIGHT = {"num_experts": 8}
CLASSIFIER = {**SIZES, "vocab_size": 30, "depth": 2, "num_heads": 2, "out_features": 2}
TEXTS = (((8, 16), torch.int64), ((8,), torch.int64))
ROWS_OF_4 = (((8, 4), "float32"), ((8, 1), "float32"))


def _mixture(experts: dict[str, Any] | None) -> ModelSpec:
    more = {} if experts is None else {"experts": experts}
    return ModelSpec("transformer_classifier", CLASSIFIER | more)


@pytest.mark.parametrize(
    ("given", "mesh", "message"),
    [
        ((SPEC, BATCH), {"pipeline": {"stages": 2, "schedule": "2bw"}}, "'2bw', whose steps overlap, can"),
        ((nn.Linear(4, 1), ROWS_OF_4), {"pipeline": 2}, "a pipeline needs a chain of links"),
        (
            (_mixture(EIGHT), TEXTS),
            {"expert": 2},
            "over 'expert' with sharding='optimizer' cannot be planned",
        ),
    ],
    ids=["without a flush", "no chain", "sharded experts"],
)
def test_a_mesh_that_cannot_be_planned_is_refused(given: Any, mesh: dict[str, Any], message: str) -> None:
    settings = {"sharding": "optimizer"} if "expert" in mesh else {"gradientAccumulation": 2}
    with pytest.raises(ValueError, match=message):
        plan_memory(*given, parallelism=mesh, numWorkers=2, collective="torch", **settings)


def test_a_plan_of_memory_knows_the_weights_of_all_experts() -> None:
    plans = [plan_memory(_mixture(e), TEXTS, loss="cross_entropy") for e in (None, EIGHT)]
    dense, mixed = (plan.parameters for plan in plans)
    # 7 more MLPs of width 4 * 32, and the router.
    assert mixed - dense == 4 * (7 * (2 * 128 * 32 + 128 + 32) + 8 * 32)


@pytest.mark.parametrize(
    "experts",
    [
        {"router": "switch"},
        {"router": "gshard", "mlp_dim": 64},
        {"router": "expert_choice", "capacity_factor": 1.0, "min_capacity": 1},
    ],
)
def test_experts_cost_the_operations_of_the_perceptron_they_replace(experts: dict[str, Any]) -> None:
    ids = torch.zeros(8, 16, dtype=torch.int64)
    counted = (count_layers(_mixture(each).build(), (ids,)).layers for each in (None, EIGHT | experts))
    work, mixed = ({layer.name: layer.work for layer in layers} for layers in counted)
    perceptron = work["blocks.1.up"] + work["blocks.1.down"]
    assert mixed["blocks.1.mixture.experts"] == pytest.approx(perceptron, rel=0.05)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [{"expert": 2}, {"data": 2, "expert": 2}], ids=str)
def test_the_plan_of_ranks_with_other_experts_is_within_a_tenth(mesh: dict[str, int]) -> None:
    """The plan assumes an even load of 8 experts without dropped tokens, but the router may be uneven."""
    workers = prod(mesh.values())
    network = make_networks(4 * workers, tiny=True)[-1]
    plan, measured = _compared(network, mesh)
    assert 0.9 < plan.peak / measured < 1.1
    # Each rank has half of the experts and all other layers.
    experts = sum(p.numel() for n, p in network.spec.build().named_parameters() if ".experts." in n)
    assert _plan_of(network, workers).parameters - plan.parameters == 4 * experts // 2
