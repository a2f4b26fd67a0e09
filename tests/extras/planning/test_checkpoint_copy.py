"""The copy for a checkpoint over a mesh: the plan and the budget include the bytes that a rank copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rank_bytes import columns, config_of, copied_bytes

from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning.memory.budget import check_budget
from ringspark.extras.planning.memory.columns import shard_columns
from ringspark.extras.planning.memory.planner import Planner
from ringspark.pipelines import ShardManifest

MakeShards = Callable[..., ShardManifest]
LAYERS, WIDTH, ROWS = 7, 128, 512
MESHES = {
    "pipeline": {"parallelism": {"pipeline": 2}, "sync": Zero(stage=1), "gradient_accumulation": 2},
    "tensor": {"parallelism": {"tensor": 2, "shard": 2}, "sync": Zero(stage=3)},
}


def _config(manifest: ShardManifest, folder: Path, mesh: str) -> TrainConfig:
    changes: dict[str, Any] = {"num_workers": 4, "checkpoint_every_steps": 2, **MESHES[mesh]}
    return config_of(manifest, folder / "run", LAYERS, WIDTH, ROWS, **changes)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_budget_without_room_for_the_copy_of_a_stage_or_slice_is_refused(
    make_shards: MakeShards, tmp_path: Path, mesh: str
) -> None:
    manifest = make_shards(columns(3 * ROWS, WIDTH))
    config = _config(manifest, tmp_path, mesh)
    plan = Planner(config, UserObjects(), *shard_columns(config, manifest, config.most_rows)).plan()
    half = 3 * (LAYERS + 1) * WIDTH * WIDTH * 4 / 2
    # The first rank of a shard group copies the state of the whole group.
    assert plan.checkpoint == plan.at_peak["checkpoint"] == pytest.approx(half, rel=0.05)
    budget = plan.peak - plan.checkpoint // 2
    with pytest.raises(ValueError, match="memoryBudget is"):
        check_budget(config, UserObjects(), manifest, budget)
    without = replace(config, checkpoint_every_steps=None, checkpoint_every_seconds=0.0)
    check_budget(without, UserObjects(), manifest, budget)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_first_rank_of_each_shard_group_copies_what_is_planned(
    make_shards: MakeShards, tmp_path: Path, mesh: str
) -> None:
    manifest = make_shards(columns(3 * ROWS, WIDTH))
    config = _config(manifest, tmp_path, mesh)
    planned = Planner(config, UserObjects(), *shard_columns(config, manifest, config.most_rows)).plan()
    kept = sorted(rank["kept"] for rank in copied_bytes(config))
    assert kept[2:] == [pytest.approx(planned.checkpoint, rel=0.05)] * 2
    assert max(kept[:2]) < planned.checkpoint / 10
