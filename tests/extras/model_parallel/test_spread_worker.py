"""`train_worker` over model-parallel meshes trains like one worker, and any other mesh can resume."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import Pair, equal_to_undisturbed
from parity import equal_to_one_worker as equal_to_a_worker
from small_training import columns_of, config_of, over

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.options.finetuning import LoRA
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.checkpoint.weights import read_adapter
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models import ModelSpec

pytestmark = pytest.mark.distributed
equal_to_one_worker = partial(equal_to_a_worker, alone=train_here)
MakeConfig = Callable[..., TrainConfig]
MLP = ModelSpec("mlp", {"in_features": 8, "hidden": [21, 16, 10], "out_features": 1, "activation": "tanh"})
ROWS, BATCH = 330, 20  # the last batch has 10 rows


@pytest.fixture
def numbers(make_shards: Any, tmp_path: Path) -> MakeConfig:
    weight = np.random.default_rng(1).random(ROWS).astype(np.float32)
    manifest = make_shards(columns_of(ROWS, 8) | {"w": weight})
    settings: dict[str, Any] = {"model": MLP, "batch_size": BATCH, "epochs": 3, "optimizer": "adamw"}
    settings |= {"weight_column": "w", "max_grad_norm": 0.5, "collective": "torch"}
    return partial(config_of, manifest, tmp_path / "run", **settings)


# Every layer, because all ranks compute and count a layer outside the plan.
GRIDS: dict[str, Any] = {
    "trunk.0.linear": ["grid", [2, 2]],
    "trunk.1.linear": ["grid", [2, 2]],
    "trunk.2.linear": ["grid", [4, 1]],
    "head": ["grid", [1, 4]],
}


def _quick(mesh: dict[str, Any], marks: Any = (), **changes: Any) -> Any:
    return pytest.param(mesh, changes, id=_id(mesh | changes), marks=marks)


_slow = partial(_quick, marks=pytest.mark.slow)


def _id(settings: dict[str, Any]) -> str:
    return "-".join(f"{key}{value}" for key, value in settings.items())


MESHES = [
    _quick({"tensor": 2}),
    _quick({"pipeline": 2}, gradient_accumulation=4),
    _slow({"pipeline": 4}, gradient_accumulation=4),
    _slow({"data": 2, "pipeline": 2}, gradient_accumulation=2),
    _slow({"pipeline": 2, "tensor": 2}),
    _slow({"data": 2, "pipeline": 2}, sync=Zero(stage=1), gradient_accumulation=2),
    _slow({"tensor": 4}),
    _slow({"data": 2, "tensor": 2}),
    _slow({"tensor": 4, "plan": GRIDS}),
    _slow({"data": 2, "tensor": 2, "plan": {"*linear": ["grid", [2, 1]], "head": ["grid", [1, 2]]}}),
    _slow({"data": 2, "tensor": 2}, sync=Zero(stage=2)),
    *(
        _slow({"shard": 2} | mesh, sync=Zero(stage=stage), gradient_accumulation=2)
        for mesh in ({"data": 2}, {"tensor": 2}, {"pipeline": 2})
        for stage in ((1,) if "pipeline" in mesh else (1, 2, 3))
    ),
]


@pytest.mark.parametrize(("mesh", "changes"), MESHES)
def test_a_mesh_trains_what_one_worker_does(numbers: Any, mesh: Any, changes: Any) -> None:
    """51 AdamW steps with row weights and clipping; each of 3 epochs has a short last batch."""
    one, many = equal_to_one_worker(numbers(), parallelism=mesh, **changes)
    assert one.steps == 51
    for first, second in zip(one.history, many.history, strict=True):
        # The ranks of a replica each count a share of the operations; pipeline stages count none.
        assert first.cost is not None
        assert second.cost is not None
        assert second.cost.flops == (None if "pipeline" in mesh else first.cost.flops)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"tensor": 2}, {"tensor": 2}),
        ({"tensor": 2}, {"data": 2}),
        ({"data": 2}, {"tensor": 2}),
        ({"tensor": 2}, {}),
        ({"tensor": 2, "plan": {"trunk.1.linear": ["grid", [1, 2]]}}, {"tensor": 2}),
    ],
)
def test_a_training_goes_on_over_another_mesh(numbers: Any, first: Any, then: Any) -> None:
    straight, resumed = _goes_on(numbers(checkpoint_every_steps=5, ema_decay=0.9), first, then)
    assert resumed.history[1].train_loss == pytest.approx(straight.history[1].train_loss, rel=1e-6)


def _goes_on(config: TrainConfig, first: dict[str, Any], then: dict[str, Any], **changes: Any) -> Pair:
    """Fails at step 25 over the mesh `first` and resumes over `then`; equal bits over the same mesh."""
    begin, end = ({**over(mesh), **changes} for mesh in (first, then))
    return equal_to_undisturbed(config, step=25, first=begin, then=end, bound=0.0 if then == first else 1e-5)


WIDE = ModelSpec("mlp", {"in_features": 8, "hidden": [64, 96, 64], "out_features": 1, "activation": "tanh"})


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw8bit", "adafactor", "lamb", "sm3"])
def test_stages_train_by_optimizers_that_look_at_whole_parameters(numbers: Any, optimizer: str) -> None:
    """Stages train like one worker, resume bit for bit, and let one worker resume from their state."""
    config = numbers(model=WIDE, optimizer=optimizer, checkpoint_every_steps=5)
    staged = {"num_workers": 2, "parallelism": {"pipeline": 2}, "gradient_accumulation": 2}
    # Rounding can change an 8-bit code by one: a step of up to the rate, 0.01.
    bound = 1e-2 if optimizer == "adamw8bit" else 1e-5
    equal_to_one_worker(config, bound=bound, **staged)
    equal_to_undisturbed(config, step=25, first=staged)
    alone = replace(config, run_uri=f"{config.run_uri}-alone", gradient_accumulation=2)
    equal_to_undisturbed(alone, step=25, first=staged, then={}, bound=bound)


TEXT = {"vocab_size": 23, "max_seq_len": 12, "dim": 16, "depth": 2, "num_heads": 4}
TRANSFORMERS = {
    "classifier": ModelSpec("transformer_classifier", {**TEXT, "out_features": 3, "padding_id": 0}),
    "language model": ModelSpec("transformer_lm", TEXT),
}


# More than the 25 steps after which a training fails.
THREE_EPOCHS = {"epochs": 3, "checkpoint_every_steps": 5}


@pytest.fixture
def texts(make_shards: Any, tmp_path: Path) -> MakeConfig:
    return partial(_texts, make_shards, tmp_path / "run")


def _texts(make_shards: Any, run: Path, spec: ModelSpec, held_out: int = 0, **changes: Any) -> TrainConfig:
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 23, (ROWS, 11))
    for row, length in zip(ids, rng.integers(0, 12, ROWS), strict=True):
        row[length:] = 0
    is_lm = spec.target == "transformer_lm"
    label = np.roll(ids, -1, 1) if is_lm else ids.sum(1) % 3
    columns = {"x": ids, "y": label, "w": rng.random(ROWS).astype(np.float32)}
    validation = np.arange(ROWS) >= ROWS - held_out if held_out else None
    manifest = make_shards(columns, validation=validation, row_group_rows=ROWS)
    settings = {"model": spec, "task": "any", "losses": ("cross_entropy",), "batch_size": BATCH, "epochs": 1}
    # Key biases have only rounding errors as gradients, which Adam would turn into full steps.
    settings |= {"optimizer": "momentum", "learning_rate": 0.05, "max_grad_norm": 1.0, "collective": "torch"}
    return config_of(manifest, run, **settings | changes)


# One axis of 2 and of 4 ranks, and every pair of axes that shards a network.
OVER_TEXT = [
    _quick({"tensor": 2}),
    _slow({"tensor": 2, "sequence_parallel": True}, gradient_accumulation=2),
    _slow({"tensor": 4, "sequence_parallel": True}, gradient_checkpointing="all"),
    _slow({"data": 2, "tensor": 2, "sequence_parallel": True}, gradient_accumulation=2, sync=Zero(stage=1)),
    _slow({"sequence": 2, "tensor": 2, "sequence_parallel": True}),
    _slow({"pipeline": 2}, gradient_accumulation=2),
    _quick({"sequence": 2}),
    _slow({"sequence": 4}),
    _slow({"sequence": 2, "context": "gather"}),
    _slow({"sequence": 2, "context": "ulysses"}),
    _slow({"pipeline": {"stages": 2, "schedule": "zero_bubble"}, "sequence": 2}, gradient_accumulation=2),
    _slow({"pipeline": 2, "sequence": 2, "tensor": 2}, gradient_accumulation=2),
    _slow({"data": 2, "sequence": 2}, sync=Zero(stage=1)),
    _slow({"data": 2, "sequence": 2}, sync=Zero(stage=3)),
    _slow({"shard": 2, "sequence": 2}, sync=Zero(stage=3), gradient_accumulation=2),
    _slow({"data": 2, "tensor": 2}, sync=Zero(stage=3), gradient_checkpointing="all"),
    _slow({"pipeline": {"stages": 2, "schedule": "interleaved", "virtual": 2}}, gradient_accumulation=2),
    _slow({"pipeline": {"stages": 2, "schedule": "zero_bubble"}}, gradient_accumulation=3),
    _slow({"pipeline": 2}, gradient_accumulation=2, gradient_checkpointing="all"),
]


@pytest.mark.parametrize("name", ["classifier", pytest.param("language model", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("mesh", "changes"), OVER_TEXT)
def test_a_mesh_trains_a_transformer_like_one_worker(texts: Any, name: str, mesh: Any, changes: Any) -> None:
    equal_to_one_worker(texts(TRANSFORMERS[name]), parallelism=mesh, **changes)


# Key biases get only rounding errors as gradients, which these optimizers would turn into full steps.
GENTLE = {"freeze": ("*qkv.bias",), "learning_rate": 1e-3}
WHOLE_PARAMETERS = [
    _quick({"sequence": 2}, optimizer="lamb"),
    *(_slow({"sequence": 2}, optimizer=name) for name in ("adafactor", "lars", "sm3", "adamw8bit")),
    _slow({"data": 2, "sequence": 2}, optimizer="adafactor", sync=Zero(stage=1)),
    _slow({"shard": 2, "sequence": 2}, optimizer="lamb", sync=Zero(stage=2)),
    _slow({"data": 2, "pipeline": 2}, optimizer="adafactor", sync=Zero(stage=1)),
    _slow({"pipeline": 2, "sequence": 2}, optimizer="lamb", gradient_accumulation=2),
]


@pytest.mark.parametrize(("mesh", "changes"), WHOLE_PARAMETERS)
def test_an_optimizer_of_whole_parameters_trains_like_one_worker(texts: Any, mesh: Any, changes: Any) -> None:
    config = texts(TRANSFORMERS["language model"], **GENTLE)
    # Rounding can change an 8-bit code by one, which changes a step by up to the rate.
    bound = 1e-3 if changes["optimizer"] == "adamw8bit" else 1e-5
    equal_to_one_worker(config, bound=bound, parallelism=mesh, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2, "sequence": 2}, {"data": 2, "pipeline": 2}], ids=_id)
def test_a_sharded_state_of_whole_parameters_goes_on_over_another_mesh(texts: Any, mesh: Any) -> None:
    settings = GENTLE | {"optimizer": "adafactor", **THREE_EPOCHS}
    config = texts(TRANSFORMERS["language model"], **settings)
    begin = {"num_workers": 4, "parallelism": mesh, "sync": Zero(stage=1)}
    end = {"num_workers": 2, "parallelism": {"sequence": 2}}
    equal_to_undisturbed(config, step=25, first=begin, then=end, bound=1e-5)


def _in_time(chunks: int, stages: int = 2, **changes: Any) -> dict[str, Any]:
    return {"stages": stages, "sequence_chunks": chunks, **changes}


LSTM = {"vocab_size": 23, "hidden": 12, "depth": 4, "out_features": 3, "padding_id": 0, "kind": "lstm"}
IN_TIME = [
    _slow({"pipeline": _in_time(3)}),
    _slow({"pipeline": _in_time(2, schedule="gpipe")}, gradient_accumulation=3),
    _slow({"pipeline": _in_time(3, 4, cuts=["layers.1", "layers.2", "layers.3"])}, gradient_accumulation=2),
    _slow({"data": 2, "pipeline": _in_time(3)}, gradient_accumulation=2, sync=Zero(stage=1)),
    _slow({"pipeline": _in_time(3)}, gradient_accumulation=2, gradient_checkpointing="all"),
]


@pytest.mark.parametrize(("mesh", "changes"), IN_TIME)
def test_a_pipeline_in_time_trains_a_recurrent_network(texts: Any, mesh: Any, changes: Any) -> None:
    """Rows have 0 to 11 tokens; the head uses the state after the last one."""
    equal_to_one_worker(texts(ModelSpec("recurrent", LSTM), held_out=9), parallelism=mesh, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"sequence": 2}, {"sequence": 2}),
        ({"sequence": 2}, {"data": 2}),
        ({"sequence": 2}, {}),
        ({"tensor": 2}, {"tensor": 2}),
        ({"tensor": 2, "sequence_parallel": True}, {"tensor": 2, "sequence_parallel": True}),
        ({"tensor": 2, "sequence_parallel": True}, {}),
    ],
)
def test_a_training_of_spread_rows_goes_on_over_another_mesh(texts: Any, first: Any, then: Any) -> None:
    """Bit-identical over the same mesh, even with dropout on each rank's own tokens or heads."""
    dropout = 0.2 if then == first else 0.0
    attention = {"attention_dropout": dropout} if "tensor" in first else {}
    spec = ModelSpec("transformer_lm", {**TEXT, "dropout": dropout, **attention})
    _goes_on(texts(spec, **THREE_EPOCHS), first, then)


# Every block is a mixture, so every stage adds a large loss and drops tokens.
EXPERTS = {"num_experts": 4, "router": "gshard", "every": 1, "min_capacity": 1}
EXPERTS |= {"balance_weight": 0.2, "z_weight": 0.05}
CLASSIFIER = {**TEXT, "out_features": 3, "padding_id": 0}
MIXTURES = {
    "classifier": ModelSpec("transformer_classifier", {**CLASSIFIER, "experts": EXPERTS}),
    "language model": ModelSpec("transformer_lm", {**TEXT, "experts": {**EXPERTS, "router": "switch"}}),
    "expert choice": ModelSpec(
        "transformer_classifier", {**CLASSIFIER, "experts": {**EXPERTS, "router": "expert_choice"}}
    ),
}
# With these seeds, every expert choice has a margin of at least 3e-6, so rounding changes none.
SEEDS = {"classifier": 1, "language model": 6, "expert choice": 4}
# With 3 micro-batches, the single row of the last step leaves some ranks without rows.
OVER_EXPERTS = [
    _quick({"expert": 2}),
    _quick({"pipeline": 2}, gradient_accumulation=3),
    _slow({"sequence": 2}),
    _slow({"expert": 3}, gradient_accumulation=3),  # 4 experts do not divide by 3 ranks
    _slow({"expert": 4}, gradient_accumulation=3),
    _slow({"sequence": 4}),
    _slow({"data": 2, "expert": 2}, gradient_accumulation=3),
    _slow({"data": 2, "pipeline": 2}, gradient_accumulation=3, sync=Zero(stage=1)),
    _slow({"data": 2, "sequence": 2}, sync=Zero(stage=1)),
    _slow({"data": 2, "tensor": 2}, gradient_accumulation=3),
    _slow({"expert": 2, "tensor": 2}),
    _slow({"pipeline": 2, "tensor": 2}, gradient_accumulation=3),
    _slow({"pipeline": 2, "sequence": 2}, gradient_accumulation=3),
    _slow({"sequence": 2, "tensor": 2}),
    _slow({"expert": 2, "pipeline": {"stages": 2, "schedule": "zero_bubble"}}, gradient_accumulation=3),
    _slow({"expert": 2, "pipeline": 2}, gradient_accumulation=3, gradient_checkpointing="all"),
    _slow({"expert": 2, "sequence": 2}, gradient_checkpointing="all"),
    _slow({"pipeline": {"stages": 2, "schedule": "interleaved", "virtual": 2}}, gradient_accumulation=2),
    _quick({"expert": 2}, sync=Zero(stage=2), gradient_accumulation=2),
    _slow({"shard": 2, "expert": 2}, sync=Zero(stage=1), gradient_accumulation=2),
    _slow({"expert": 2, "tensor": 2}, sync=Zero(stage=2)),
]


@pytest.mark.parametrize(("mesh", "changes"), OVER_EXPERTS)
def test_a_mesh_trains_a_mixture_of_experts_as_one_worker_does(texts: Any, mesh: Any, changes: Any) -> None:
    """Covers added losses and expert counts, with row weights, in training and validation."""
    _check_mixture(texts, "classifier", mesh, changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["language model", "expert choice"])
@pytest.mark.parametrize("mesh", [{"expert": 2, "sequence": 2}, {"pipeline": 2, "sequence": 2}], ids=_id)
def test_a_mesh_trains_other_mixtures_as_one_worker_does(texts: Any, name: str, mesh: Any) -> None:
    _check_mixture(texts, name, mesh, {"gradient_accumulation": 2})


def _check_mixture(texts: MakeConfig, name: str, mesh: dict[str, Any], changes: dict[str, Any]) -> None:
    settings = {"held_out": 9, "weight_column": "w", "seed": SEEDS[name]}
    equal_to_one_worker(texts(MIXTURES[name], **settings), parallelism=mesh, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"pipeline": 2}, {"pipeline": 2}),
        ({"pipeline": 2}, {}),
        ({"pipeline": 2}, {"sequence": 2}),
        ({}, {"pipeline": 2}),
    ],
)
def test_counts_of_an_epoch_go_on_over_another_mesh(texts: Any, first: Any, then: Any) -> None:
    """Training fails in the middle of an epoch, when each stage has counts of its own layers."""
    config = texts(MIXTURES["classifier"], **THREE_EPOCHS, seed=SEEDS["classifier"])
    straight, resumed = _goes_on(config, first, then)
    for one, other in zip(straight.history, resumed.history, strict=True):
        assert other.metrics == pytest.approx(one.metrics, rel=1e-5)
        assert one.metrics["train_dropped_share"] > 0


# Layers of every style that a plan shards, and layers that it leaves whole.
LAYERS = ("*.qkv", "*.out", "*.up", "*.down")
ADAPTED = {
    "classifier": LoRA(rank=3, targets=(*LAYERS, "head"), train=("*mlp_norm*",)),
    "language model": LoRA(rank=3, alpha=6.0, targets=LAYERS),
}
OVER_ADAPTERS = [
    _quick({"tensor": 2}),
    _slow({"tensor": 2, "sequence_parallel": True}, gradient_accumulation=2),
    _slow({"data": 2, "tensor": 2}, sync=Zero(stage=3), gradient_checkpointing="all"),
    _slow({"shard": 2, "tensor": 2}, sync=Zero(stage=2)),
    _quick({"pipeline": 2}, gradient_accumulation=2),
    _slow({"data": 2, "pipeline": 2}, gradient_accumulation=2, sync=Zero(stage=1)),
    _slow({"pipeline": 2, "tensor": 2}, gradient_accumulation=2),
    _slow({"pipeline": {"stages": 2, "schedule": "zero_bubble"}}, gradient_accumulation=3),
    _slow({"data": 2, "sequence": 2}, sync=Zero(stage=2)),
    _slow({"sequence": 2, "tensor": 2}),
    _slow({"data": 2, "shard": 2}, sync=Zero(stage=3)),
]


@pytest.mark.parametrize("name", ["language model", pytest.param("classifier", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("mesh", "changes"), OVER_ADAPTERS)
def test_a_mesh_trains_adapters_as_one_worker_does(texts: Any, name: str, mesh: Any, changes: Any) -> None:
    _check_adapters(texts(TRANSFORMERS[name], lora=ADAPTED[name]), mesh, changes)


@pytest.mark.slow
def test_a_mesh_trains_adapters_beside_experts_as_one_worker_does(texts: Any) -> None:
    adapters = replace(ADAPTED["classifier"], targets=("*.qkv", "*.out", "head"))
    settings = {"weight_column": "w", "seed": SEEDS["classifier"], "lora": adapters}
    config = texts(MIXTURES["classifier"], **settings)
    _check_adapters(config, {"data": 2, "expert": 2}, {"gradient_accumulation": 2})


@pytest.mark.slow
def test_a_grid_trains_adapters_as_one_worker_does(numbers: Any) -> None:
    _check_adapters(numbers(lora=LoRA(rank=2, targets=("*",))), {"tensor": 4, "plan": GRIDS}, {})


def _check_adapters(config: TrainConfig, mesh: dict[str, Any], changes: dict[str, Any]) -> None:
    one, many = equal_to_one_worker(config, parallelism=mesh, **changes)
    first, second = read_adapter(one.checkpoint_uri), read_adapter(many.checkpoint_uri)
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.allclose(second[key], tensor, rtol=0, atol=1e-5), key
        # The second matrix begins with zeros.
        assert "lora_B" not in key or tensor.abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"tensor": 2}, {"tensor": 2}),
        ({"tensor": 2, "sequence_parallel": True}, {"tensor": 2, "sequence_parallel": True}),
        ({"pipeline": 2}, {"pipeline": 2}),
        ({"tensor": 2}, {"pipeline": 2}),
        ({"pipeline": 2}, {}),
    ],
)
def test_a_training_of_adapters_goes_on_over_another_mesh(texts: Any, first: Any, then: Any) -> None:
    """Bit-identical over the same mesh, even with dropout of each rank's own inputs."""
    adapters = replace(ADAPTED["classifier"], dropout=0.2 if then == first else 0.0)
    config = texts(TRANSFORMERS["classifier"], lora=adapters, **THREE_EPOCHS)
    _goes_on(config, first, then, gradient_accumulation=2)
