"""Training resumes over another mesh after ranks are lost.

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
from small_training import config_of, over, train_gang, workers_of

from ringspark.estimators import WorkerError
from ringspark.estimators.run.identity import identity_of, list_differences, split_changes
from ringspark.estimators.training.callbacks import Callback
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.models import ModelSpec
from ringspark.pipelines import ShardManifest

pytestmark = pytest.mark.distributed
MakeConfig = Callable[..., TrainConfig]
ROWS, BATCH, EPOCHS, EVERY = 150, 20, 4, 5
EPOCH_STEPS = -(-ROWS // BATCH)  # the last step has ten rows
TEXT = {"vocab_size": 1 + BASE, "max_seq_len": NUM_TOKENS, "dim": 16, "depth": 2, "num_heads": 4}
TEXT |= {"out_features": 1}
EXPERTS = {"experts": {"num_experts": 4, "router": "gshard"}}


@pytest.fixture
def config(make_shards: Any, tmp_path: Path) -> MakeConfig:
    """Returns a function that returns settings of a transformer with some other sizes."""
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


def _straight(config: TrainConfig, folder: Path, mesh: dict[str, int]) -> TrainResult:
    """Trains undisturbed, in another folder."""
    return train_gang(
        replace(config, run_uri=str(folder / "straight")), _objects(folder / "undisturbed", mesh)
    )


def _check_rows(folder: Path, epochs: int = EPOCHS) -> None:
    trained = rows.check(rows.Diaries(folder).read(), ROWS)
    assert (trained.problems, trained.steps) == ([], epochs * EPOCH_STEPS)


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
def test_the_bits_are_those_of_a_training_that_lost_no_rank(
    config: MakeConfig, tmp_path: Path, mesh: dict[str, int], lost: int
) -> None:
    """Each rank draws its own dropout for its shard, so a resume must restore every random state."""
    made = config({"dropout": 0.2, **(EXPERTS if "expert" in mesh else {})}, epochs=2, **over(mesh))
    straight = _straight(made, tmp_path, mesh)
    diary = tmp_path / "disturbed"
    objects = _objects(diary, mesh, Dies(tmp_path / "lost", 2 * EVERY + 2, rank=lost))
    with pytest.raises(WorkerError, match=f"rank {lost} .*exit code -9"):
        train_gang(made, objects)
    resumed = train_gang(made, objects)
    # The kill may have interrupted the last checkpoint.
    assert resumed.resumed_steps in ((EVERY,), (2 * EVERY,))
    assert difference(resumed, straight, made) == 0
    _check_rows(diary, epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "meshes"),
    [
        pytest.param({}, [{"pipeline": 2, "tensor": 2}, {"data": 2}, {}, {"sequence": 4}], id="transformer"),
        pytest.param(
            EXPERTS, [{"expert": 2, "tensor": 2}, {"data": 2}, {}, {"data": 2, "expert": 2}], id="experts"
        ),
    ],
)
def test_four_ranks_two_one_and_four_train_what_one_does(
    config: MakeConfig, tmp_path: Path, more: dict[str, Any], meshes: list[dict[str, int]]
) -> None:
    """Each mesh trains one epoch and some steps until a rank is lost; then the next mesh resumes.

    A user's run accepts all changes between the meshes.
    """
    made = config(more, ema_decay=0.9)
    straight = _straight(made, tmp_path, {})
    diary = tmp_path / "diary"
    manifest = ShardManifest.load(made.shards_uri)
    begun = identity_of(made, UserObjects(), manifest)
    resumed: list[int] = []
    for number, mesh in enumerate(meshes):
        last = (number + 1) * EPOCH_STEPS + 3  # the last run never reaches its step
        lost = Dies(tmp_path / f"lost {number}", last, rank=workers_of(mesh) - 1)
        leg = replace(made, **over(mesh), gradient_accumulation=2 if "pipeline" in mesh else 1)
        identity = identity_of(leg, UserObjects(), manifest)
        assert list_differences(split_changes(begun, identity)[1], identity) == []
        if number == len(meshes) - 1:
            result = train_gang(leg, _objects(diary, mesh, lost))
            break
        with pytest.raises(WorkerError, match="exit code -9"):
            train_gang(leg, _objects(diary, mesh, lost))
        resumed.append(last - last % EVERY)
    # Or the checkpoint before, if the kill interrupted the last one.
    found = result.resumed_steps
    assert len(found) == 3
    assert all(step in (last, last - EVERY) for step, last in zip(found, resumed, strict=True))
    _check_rows(diary)
    assert [record.rows for record in result.history] == [ROWS] * EPOCHS
    for record, other in zip(result.history, straight.history, strict=True):
        assert record.train_loss == pytest.approx(other.train_loss, rel=1e-6)
    assert difference(result, straight, made) < 1e-6
