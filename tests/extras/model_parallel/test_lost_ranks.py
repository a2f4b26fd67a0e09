"""Training over a mesh continues after a rank is lost; test_spread_worker.py resumes over other meshes.

Under Spark's supervisor, with every role of five meshes: `make faults ARGS="--only kill hang"`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rows
from driver import BASE, NUM_DIGITS, NUM_TOKENS, STRUCK, MeshDiary
from failing_callback import Dies
from parity import difference
from small_training import config_of, over, train_gang

from ringspark.estimators import WorkerError
from ringspark.estimators.run.identity import identity_of, list_differences, split_changes
from ringspark.estimators.training.callbacks import Callback
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

pytestmark = pytest.mark.distributed
MakeConfig = Callable[..., TrainConfig]
ROWS, BATCH, EPOCHS, EVERY = 150, 20, 2, 5
EPOCH_STEPS = -(-ROWS // BATCH)  # the last step has ten rows
TEXT = {"vocab_size": 1 + BASE, "max_seq_len": NUM_TOKENS, "dim": 16, "depth": 2, "num_heads": 4}
TEXT |= {"out_features": 1}
EXPERTS = {"experts": {"num_experts": 4, "router": "gshard"}}


@pytest.fixture
def config(make_shards: Any, tmp_path: Path) -> MakeConfig:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 1 + BASE, (ROWS, NUM_TOKENS))
    for digit in range(NUM_DIGITS):
        tokens[:, digit] = 1 + np.arange(ROWS) // BASE**digit % BASE
    label = (tokens.sum(1) % 5).astype(np.float32)
    manifest = make_shards({"x": tokens, "y": label}, row_group_rows=25)
    settings = {"batch_size": BATCH, "epochs": EPOCHS, "optimizer": "momentum", "max_grad_norm": 1.0}
    settings |= {"collective": "torch", "checkpoint_every_steps": EVERY}

    def make(sizes: dict[str, Any], **changes: Any) -> TrainConfig:
        model = ModelSpec("transformer_classifier", TEXT | sizes)
        return config_of(manifest, tmp_path / "run", model=model, **settings | changes)

    return make


def _objects(folder: Path, mesh: dict[str, int], *more: Callback) -> UserObjects:
    """Records in `folder` the rows that each rank reads."""
    folder.mkdir(exist_ok=True)
    (folder / STRUCK).touch()
    diary = MeshDiary(str(folder), 0.0, mesh)
    return UserObjects(callbacks=(diary, *more), transform_batch=diary.read)


@pytest.mark.telling
@pytest.mark.parametrize(
    ("mesh", "lost"),
    [
        pytest.param({"pipeline": 2}, 1, id="first stage"),
        pytest.param({"pipeline": 2}, 0, id="last stage, writer", marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, 1, id="tensor place", marks=pytest.mark.slow),
        pytest.param({"sequence": 2}, 1, id="second part of rows", marks=pytest.mark.slow),
        pytest.param({"expert": 2}, 1, id="other experts", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_changes_no_bit(config: Any, tmp_path: Path, mesh: Any, lost: int) -> None:
    """Each rank draws its own dropout for its shard, so a resume must restore every random state."""
    made = config({"dropout": 0.2, **(EXPERTS if "expert" in mesh else {})}, **over(mesh))
    undisturbed = replace(made, run_uri=str(tmp_path / "straight"))
    straight = train_gang(undisturbed, _objects(tmp_path / "undisturbed", mesh))
    diary = tmp_path / "disturbed"
    objects = _objects(diary, mesh, Dies(tmp_path / "lost", 2 * EVERY + 2, rank=lost))
    with pytest.raises(WorkerError, match=f"rank {lost} .*exit code -9"):
        train_gang(made, objects)
    resumed = train_gang(made, objects)
    # The kill may have interrupted the last checkpoint.
    assert resumed.resumed_steps in ((EVERY,), (2 * EVERY,))
    assert difference(resumed, straight, made) == 0
    trained = rows.check(rows.Diaries(diary).read(), ROWS)
    assert (trained.problems, trained.steps) == ([], EPOCHS * EPOCH_STEPS)


def test_a_run_accepts_another_mesh(config: MakeConfig) -> None:
    made = config(EXPERTS)
    manifest = ShardManifest.load(made.shards_uri)
    begun = identity_of(made, UserObjects(), manifest)
    for mesh in ({"pipeline": 2, "tensor": 2}, {"data": 2, "expert": 2}, {"sequence": 4}):
        identity = identity_of(replace(made, **over(mesh), gradient_accumulation=2), UserObjects(), manifest)
        assert list_differences(split_changes(begun, identity)[1], identity) == []
