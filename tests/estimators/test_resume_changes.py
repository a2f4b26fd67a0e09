"""Settings that a resumed run may change: what they do to the training, and what the run records."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from acting_callback import Acts
from small_networks import mlp
from spark_tables import quiet

from ringspark.estimators import TorchRegressor, TrainingState, WorkerError
from ringspark.estimators.options.sync import AllReduce, Zero

pytestmark = pytest.mark.spark


def _fail(path: Path, state: TrainingState) -> None:
    if state.step == 9 and path.exists():
        raise ZeroDivisionError("on purpose")


@pytest.fixture(scope="module")
def table(spark):
    return spark.range(0, 96, 1, 2).selectExpr(
        "array(sin(id), cos(id)) as features", "array(sin(2 * id), cos(3 * id)) as label"
    )


def _estimator(root: Path, **changes: Any) -> Any:
    run = {"runUri": str(root / "run"), "resume": True, "keepTrainingState": True}
    params = {"model": mlp(2), "batchSize": 16, "numWorkers": 2, "collective": "torch"}
    return quiet(TorchRegressor, root, **(run | params | changes))


def _failing(root: Path) -> tuple[Path, dict[str, Any]]:
    """Returns a file, and settings of a run that ends in the middle of epoch 2 while the file exists."""
    fails = root / "fails"
    fails.touch()
    return fails, {
        "epochs": 3,
        "callbacks": [Acts(step_end=partial(_fail, fails))],
        "checkpointEverySteps": 4,
        "keepTrainingState": False,
        "maxRestarts": 0,
    }


def _weights(model: Any) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in model.module().state_dict().values()])


def test_more_epochs_equal_one_long_run(table, tmp_path, capfd):
    long = _estimator(tmp_path, epochs=4, runUri=str(tmp_path / "long")).fit(table)
    _estimator(tmp_path, epochs=1).fit(table)
    _estimator(tmp_path, epochs=2).fit(table)
    model = _estimator(tmp_path, epochs=4, showProgress=True).fit(table)
    assert torch.equal(_weights(model), _weights(long))
    assert [r.train_loss for r in model.summary.epochs] == [r.train_loss for r in long.summary.epochs]
    lines = ("from epoch 2, step 7 on: epochs 1 -> 2", "from epoch 3, step 13 on: epochs 2 -> 4")
    assert model.summary.setting_changes == lines
    assert f"training: {lines[1]}\n" in capfd.readouterr().err
    # The same call again trains nothing.
    assert _estimator(tmp_path, epochs=4).fit(table).summary == model.summary
    with pytest.raises(ValueError, match=r"has finished, and these changed: epochs: 4 -> 3; raise epochs"):
        _estimator(tmp_path, epochs=3).fit(table)


def test_a_schedule_is_planned_again(table, tmp_path):
    _estimator(tmp_path, epochs=2, lrSchedule="linear").fit(table)
    model = _estimator(tmp_path, epochs=4, lrSchedule="linear").fit(table)
    note = "from epoch 3, step 13 on: epochs 2 -> 4; lrSchedule 'linear' is planned again over all epochs"
    assert model.summary.setting_changes == (note,)
    # The rate of the last step of each epoch, of 12 and then of 24 steps.
    rates = [record.learning_rate / 1e-3 for record in model.summary.epochs]
    assert rates == pytest.approx([1 - 5 / 12, 1 - 11 / 12, 1 - 17 / 24, 1 - 23 / 24])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (AllReduce(), Zero(stage=2)),
        pytest.param(AllReduce(), Zero(stage=3), marks=pytest.mark.slow),
        pytest.param(Zero(stage=3), Zero(stage=1), marks=pytest.mark.slow),
        pytest.param(Zero(stage=1), AllReduce(), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_another_sharding_continues_the_same_training(table, tmp_path, before, after):
    whole = _estimator(tmp_path, epochs=4, sync=before, runUri=str(tmp_path / "long")).fit(table)
    _estimator(tmp_path, epochs=2, sync=before).fit(table)
    model = _estimator(tmp_path, epochs=4, sync=after).fit(table)
    assert torch.allclose(_weights(model), _weights(whole), atol=1e-7)
    assert model.summary.setting_changes[1] == f"from epoch 3, step 13 on: sync {before} -> {after}"


def test_an_unfinished_run_changes_in_the_middle_of_an_epoch(table, tmp_path):
    fails, run = _failing(tmp_path)
    with pytest.raises(WorkerError, match="on purpose"):
        _estimator(tmp_path, precision="fp16", **run).fit(table)
    fails.unlink()
    changes = {"precision": "bf16", "learningRate": 0.05, "gradientAccumulation": 2}
    model = _estimator(tmp_path, **run, **changes).fit(table)
    assert model.summary.steps == 18
    assert model.summary.resumed_steps == (8,)
    assert model.summary.setting_changes == (
        "from epoch 2, step 9 on: gradientAccumulation 1 -> 2",
        "from epoch 2, step 9 on: learningRate 0.001 -> 0.05",
        "from epoch 2, step 9 on: precision fp16 -> bf16; the loss scale ends",
    )
    recorded = json.loads((tmp_path / "run" / "changes.json").read_text())
    assert [(c["setting"], c["before"], c["now"], c["epoch"], c["step"]) for c in recorded][1] == (
        "learningRate", 0.001, 0.05, 2, 9,
    )  # fmt: skip
    assert [record.learning_rate for record in model.summary.epochs] == [0.001, 0.05, 0.05]


@pytest.mark.slow
def test_changes_with_which_nothing_was_trained_are_joined(table, tmp_path):
    fails, run = _failing(tmp_path)
    run["numWorkers"] = 1
    resumes = [{}, {"learningRate": 0.05}, {"learningRate": 0.02, "gradientAccumulation": 2}]
    for changes in resumes:
        with pytest.raises(WorkerError, match="on purpose"):
            _estimator(tmp_path, **run, **changes).fit(table)
    fails.unlink()
    # The learning rate is the first one again.
    model = _estimator(tmp_path, **run, gradientAccumulation=2).fit(table)
    assert model.summary.setting_changes == ("from epoch 2, step 9 on: gradientAccumulation 1 -> 2",)
    assert [record.learning_rate for record in model.summary.epochs] == [0.001] * 3


def test_a_new_loss_scale_starts_with_fp16(table, tmp_path):
    _estimator(tmp_path).fit(table)
    model = _estimator(tmp_path, epochs=2, precision="fp16").fit(table)
    assert model.summary.setting_changes[1].endswith("precision fp32 -> fp16; the loss scale starts new")
    assert model.summary.epochs[1].train_loss < model.summary.epochs[0].train_loss


@pytest.mark.extras
def test_a_compression_of_gradients_stays(table, tmp_path):
    _estimator(tmp_path).fit(table)
    with pytest.raises(ValueError, match="cannot be resumed, because these changed: sync: "):
        _estimator(tmp_path, epochs=2, sync={"name": "allreduce", "compression": "fp16"}).fit(table)


def _stop(state: TrainingState) -> None:
    if state.epoch == 2:
        state.stop("enough")


@pytest.mark.slow
def test_more_epochs_follow_an_early_stop(table, tmp_path):
    changes: dict[str, Any] = {"numWorkers": 1, "callbacks": [Acts(epoch_end=_stop)]}
    first = _estimator(tmp_path, epochs=4, **changes).fit(table)
    assert (len(first.summary.epochs), first.summary.stop_reason) == (2, "enough")
    # Without a result, the last checkpoint still says that the training is over.
    (tmp_path / "run" / "result.json").unlink()
    again = _estimator(tmp_path, epochs=4, **changes).fit(table)
    assert (len(again.summary.epochs), again.summary.stop_reason) == (2, "enough")
    assert torch.equal(_weights(again), _weights(first))
    more = _estimator(tmp_path, epochs=5, **changes).fit(table)
    assert (len(more.summary.epochs), more.summary.stop_reason) == (5, None)


@pytest.mark.slow
def test_a_started_epoch_is_not_left_out(table, tmp_path):
    fails, run = _failing(tmp_path)
    changes = run | {"numWorkers": 1, "checkpointEverySteps": 2, "keepTrainingState": True}
    with pytest.raises(WorkerError, match="on purpose"):
        _estimator(tmp_path, **changes).fit(table)
    fails.unlink()
    with pytest.raises(WorkerError, match="in the middle of epoch 2, but epochs is 1; set it to 2 or more"):
        _estimator(tmp_path, **changes | {"epochs": 1}).fit(table)
    assert len(_estimator(tmp_path, **changes | {"epochs": 2}).fit(table).summary.epochs) == 2


@pytest.mark.slow
def test_a_model_is_saved_without_the_state_of_a_later_training(table, tmp_path):
    first = _estimator(tmp_path, numWorkers=1).fit(table)
    _estimator(tmp_path, numWorkers=1, epochs=2).fit(table)
    # Its weights were held, but its training state has been replaced.
    first.save(str(tmp_path / "saved"))
    other = {"initialModel": str(tmp_path / "saved"), "runUri": str(tmp_path / "other"), "numWorkers": 1}
    with pytest.raises(ValueError, match="from the training state of initialModel, and there is none"):
        _estimator(tmp_path, initialState="optimizer", **other).fit(table)
    _estimator(tmp_path, **other).fit(table)
