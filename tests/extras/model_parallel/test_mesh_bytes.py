"""Memory over a mesh matches theory and plans; a mesh trains networks that one rank cannot hold."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rank_bytes
from safetensors.torch import load_file
from short_sync import sync_of
from small_training import workers_of

from ringspark.estimators import WorkerError
from ringspark.estimators.options.sync import AllReduce, Zero
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning.memory.columns import shard_columns
from ringspark.extras.planning.memory.plan import MemoryPlan, Planner, check_budget
from ringspark.pipelines import ShardManifest

pytestmark = pytest.mark.distributed
# Enough rows that uneven shares of a step hardly matter.
LAYERS, WIDTH, ROWS = 7, 128, 512
PIPELINE = {"gradient_accumulation": 8}


@pytest.fixture
def config(make_shards: Any, tmp_path: Path) -> Callable[..., TrainConfig]:
    manifest = make_shards(rank_bytes.columns(3 * ROWS, WIDTH))

    def make(**settings: Any) -> TrainConfig:
        if "parallelism" in settings:
            settings["num_workers"] = workers_of(settings["parallelism"])
        return rank_bytes.config_of(manifest, tmp_path / "run", LAYERS, WIDTH, ROWS, **settings)

    return make


def _plan(config: TrainConfig) -> MemoryPlan:
    manifest = ShardManifest.load(config.shards_uri)
    return Planner(config, UserObjects(), *shard_columns(config, manifest, config.most_rows)).plan()


def _case(mesh: dict[str, int], sharding: str = "none", *, is_slow: bool = True, **changes: Any) -> Any:
    name = "-".join(f"{axis}{size}" for axis, size in mesh.items()) + f"-{sharding}"
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(mesh, {"sync": sync_of(sharding=sharding)} | changes, id=name, marks=marks)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        _case({"shard": 2}, "parameters", is_slow=False),
        _case({"data": 2}, "optimizer"),
        _case({"data": 2}, "gradients"),
        _case({"tensor": 2}),
        _case({"pipeline": 2}, **PIPELINE),
        *(_case({"data": 2, "shard": 2}, level) for level in ("optimizer", "gradients", "parameters")),
        _case({"pipeline": 2, "tensor": 2}, **PIPELINE),
        _case({"shard": 2, "tensor": 2}, "parameters"),
        _case({"shard": 2, "pipeline": 2}, "optimizer", **PIPELINE),
    ],
)
def test_the_fullest_rank_holds_what_theory_gives_it(config: Any, mesh: Any, changes: Any) -> None:
    made = config(parallelism=mesh, **changes)
    expected, ranks = rank_bytes.expected_bytes(made, LAYERS, WIDTH), rank_bytes.counted_bytes(made)
    most = {kind: max(rank[kind] for rank in ranks) for kind in rank_bytes.KINDS}
    assert most == {kind: pytest.approx(count, rel=0.1) for kind, count in expected.items()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_copy_for_a_checkpoint_is_the_planned_share_of_each_rank(config: Any, stage: int) -> None:
    """Four ranks share four pairs of layers, so the shares are equal up to biases and step counts."""
    settings = {"num_workers": 4, "sync": Zero(stage=stage), "checkpoint_every_steps": 2, "ema_decay": 0.5}
    made = config(**settings)
    planned = _plan(made).checkpoint
    one = WIDTH * WIDTH * 4
    whole = 4 * (LAYERS + 1) * one  # weights, their average and two moments
    assert planned == pytest.approx(whole / 4, rel=0.02)
    for rank in rank_bytes.copied_bytes(made):
        assert rank["kept"] == pytest.approx(planned, rel=0.05)
        # A gathered tensor, its pieces, and this rank's own piece.
        assert rank["peak"] < rank["kept"] + 3 * one


STAGED = {"parallelism": {"pipeline": 2, "data": 2}, "sync": Zero(stage=1), "gradient_accumulation": 2}
SLICED = {"parallelism": {"tensor": 2, "shard": 2}, "sync": Zero(stage=3)}
COPIED = {"pipeline": STAGED, "tensor": SLICED}


@pytest.mark.parametrize("mesh", ["pipeline", pytest.param("tensor", marks=pytest.mark.slow)])
def test_a_budget_without_room_for_the_copy_of_a_stage_or_slice_is_refused(config: Any, mesh: str) -> None:
    made = config(checkpoint_every_steps=2, **COPIED[mesh])
    plan, manifest = _plan(made), ShardManifest.load(made.shards_uri)
    half = 3 * (LAYERS + 1) * WIDTH * WIDTH * 4 / 2
    # The first rank of a shard group copies the state of the whole group.
    assert plan.checkpoint == plan.at_peak["checkpoint"] == pytest.approx(half, rel=0.05)
    budget = plan.peak - plan.checkpoint // 2
    with pytest.raises(ValueError, match="memoryBudget is"):
        check_budget(made, UserObjects(), manifest, budget)
    without = replace(made, checkpoint_every_steps=None, checkpoint_every_seconds=0.0)
    check_budget(without, UserObjects(), manifest, budget)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", COPIED)
def test_the_first_rank_of_each_shard_group_copies_what_is_planned(config: Any, mesh: str) -> None:
    made = config(checkpoint_every_steps=2, **COPIED[mesh])
    planned = _plan(made).checkpoint
    kept = sorted(rank["kept"] for rank in rank_bytes.copied_bytes(made))
    assert kept[2:] == [pytest.approx(planned, rel=0.05)] * 2
    assert max(kept[:2]) < planned / 10


# 24 layers of 16 MiB: weights, gradients and AdamW's moments need 1,536 MiB.
DEEP, WIDE, STATE = 24, 2048, 16 * 24 * 2048 * 2049
MICRO = {"gradient_accumulation": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes", "times"),
    [
        pytest.param("pipeline", {"optimizer": "adamw8bit"} | MICRO, 4.0, id="pipeline4-adamw8bit"),
        pytest.param("pipeline", MICRO, 2.9, id="pipeline4"),
        pytest.param("tensor", {}, 2.9, id="tensor4"),
        pytest.param("shard", {"sync": Zero(stage=3)}, 2.25, id="shard4"),
    ],
)
def test_four_ranks_train_what_one_and_two_cannot_hold(
    make_shards: Any, tmp_path: Path, mesh: str, changes: dict[str, Any], times: float
) -> None:
    """Limits a rank to 1/`times` of the AdamW state, including threads and buffers."""
    manifest, most = make_shards(rank_bytes.columns(16, WIDE)), int(STATE / times)

    def trained_by(workers: int) -> dict[str, Any]:
        over = {mesh: workers} if workers > 1 else {"data": 1}
        sharding = {"sync": AllReduce()} if workers == 1 else {}
        settings = {"num_workers": workers, "parallelism": over} | changes | sharding
        config = rank_bytes.config_of(manifest, tmp_path / f"{workers}", DEEP - 1, WIDE, 8, **settings)
        return dict(rank_bytes.trained_within(config, most))

    found = trained_by(4)
    assert found["steps"] == 2
    weights = load_file(Path(found["weights"]) / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) * 16 == STATE
    for workers in (2, 1):
        with pytest.raises(WorkerError) as refused:
            trained_by(workers)
        assert rank_bytes.is_of_the_limit(refused.value)
