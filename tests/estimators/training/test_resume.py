"""A resumed training equals an uninterrupted one, bit for bit."""

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from parity import assert_equal_states, records_of
from small_training import Runs, train_on_one_gang
from torch import nn

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.history import read_history
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.pipelines import ShardManifest

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = {
    "batch_size": 16,
    "learning_rate": 0.02,
    "optimizer": "adamw",
    "lr_schedule": "one_cycle",
    "metrics": ("mae", "r2"),
    "patience": 2,
    "keep": "best",
    "epochs": 3,
}


class Net(nn.Module):
    """Uses every random generator, and has different running statistics on each rank."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2)]
        self.first = nn.Linear(4, 8)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm1d(8) if dropout else nn.Identity()
        self.last = nn.Linear(8, 1)
        self.noise = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.noise:
            x = x + 0.1 * np.random.rand() + 0.1 * random.gauss(0, 1)
        return self.last(self.norm(self.blocks(self.first(x))))  # type: ignore[no-any-return]


def net(dropout: float = 0.3) -> Net:
    torch.manual_seed(0)
    return Net(dropout)


class Stops(Callback):
    """Records the steps, and raises after step `at`."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.seen: list[int] = []
        self.sizes: list[int] = []

    def on_train_start(self, state: TrainingState) -> None:
        self.sizes.append(state.size)

    def on_step_end(self, state: TrainingState) -> None:
        self.seen.append(state.step * 10 + state.rank)
        if state.step == 7:
            # Halves the planned rate from here to the end of the training.
            for group in state.optimizer.param_groups:
                group["lr"] *= 0.5
        if state.step == self.at:
            raise RuntimeError("stopped")

    def on_epoch_end(self, state: TrainingState) -> None:
        assert [seen // 10 for seen in self.seen] == list(range(1, state.step + 1))
        # Each rank gets its own state back, or rank 0's if the number of ranks changed.
        if len(set(self.sizes)) == 1:
            assert {seen % 10 for seen in self.seen} == {state.rank}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "sizes": self.sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.sizes = state["seen"], state["sizes"] + self.sizes


def data(runs: Runs) -> ShardManifest:
    """Returns 5 steps of 16 rows per epoch (the last has 14), and 10 validation rows."""
    return runs.shards(88, validation=np.arange(88) >= 78, row_group_rows=20)


def objects(at: int | None = None, dropout: float = 0.3) -> UserObjects:
    return UserObjects(module=net(dropout), callbacks=(Stops(at),))


def stopped(config: TrainConfig, at: int, dropout: float = 0.3) -> Path:
    """Trains until a failure; returns the folder of the checkpoints."""
    with pytest.raises(RuntimeError, match="stopped"):
        train_here(config, objects(at, dropout))
    return Path(config.run_uri) / "checkpoints"


def assert_same(result: TrainResult, expected: TrainResult) -> None:
    assert_equal_states(result, expected)
    assert records_of(result) == records_of(expected)
    written = replace(result, history=tuple(read_history(result.run_uri)))
    assert records_of(written) == records_of(expected)
    for name in ("steps", "rows", "stop_reason", "checkpoint_epoch"):
        assert getattr(result, name) == getattr(expected, name), name
    # Only the model, the logs and the checkpoints remain; the launcher removes the checkpoints.
    left = {path.name for path in Path(result.run_uri).iterdir()}
    story = {"history.json", "progress.json", "environment.json", "data.json", "config.json", "result.json"}
    assert left - {*story, "checkpoints"} == {Path(result.checkpoint_uri).name}


def test_one_rank_goes_on_from_any_step(runs: Runs) -> None:
    manifest = data(runs)
    expected = runs.here(manifest, objects())
    assert (expected.steps, expected.resumed_steps) == (15, ())
    # Failures within an epoch; after the checkpoint at an epoch's end; before any checkpoint; in the last
    # step.
    for at, last in ((4, 3), (6, 5), (8, 6), (11, 10), (2, None), (15, 12)):
        config = runs.config(manifest, checkpoint_every_steps=3, checkpoint_every_epochs=1)
        stopped(config, at)
        result = train_here(config, objects())
        assert result.resumed_steps == (() if last is None else (last,))
        assert_same(result, expected)


def test_a_run_may_be_continued_again_and_again_and_by_accumulation_in_fp16(runs: Runs) -> None:
    changes = {"precision": "fp16", "gradient_accumulation": 2, "max_grad_norm": 0.5}
    expected = runs.here(manifest := data(runs), objects(), **changes)
    assert sum(record.skipped_steps for record in expected.history) > 0
    config = runs.config(manifest, checkpoint_every_steps=1, **changes)
    # The checkpoint of step 7 is the first one with the halved rate, before any step used it.
    for at in (2, 5, 6, 8, 13):
        stopped(config, at)
    result = train_here(config, objects())
    assert result.resumed_steps == (1, 4, 5, 7, 12)
    assert_same(result, expected)


def test_a_jumping_clock_and_old_files_change_nothing(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = runs.here(manifest := data(runs), objects())
    draw = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: draw.uniform(0.0, 4e9))
    config = runs.config(manifest, checkpoint_every_steps=3, checkpoint_every_seconds=60.0)
    # The newest checkpoint has the most steps, whatever its file times are.
    checkpoints = sorted(stopped(config, 11).iterdir())
    assert len(checkpoints) == 2
    for age, folder in enumerate(checkpoints):
        for path in (folder, *folder.iterdir()):
            os.utime(path, (4e9 - 1e9 * age, 4e9 - 1e9 * age))
    result = train_here(config, objects())
    assert result.resumed_steps == (9,)
    assert_same(result, expected)


def test_early_stopping_counts_on(runs: Runs) -> None:
    # The first epoch is the best, so the training ends after the third.
    changes = {"patience": 2, "min_delta": 100.0, "epochs": 6}
    expected = runs.here(manifest := data(runs), objects(), **changes)
    assert "did not improve" in str(expected.stop_reason)
    config = runs.config(manifest, checkpoint_every_epochs=1, **changes)
    stopped(config, 12)
    assert_same(train_here(config, objects()), expected)


class CountsInGroup(torch.optim.SGD):
    """Keeps its step count in the parameter group, next to its settings."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["weight_decay"] = 0.01 * group["count"]
        return super().step(closure)


def test_what_optimizers_and_schedulers_keep_in_groups_comes_back(runs: Runs) -> None:
    def given(at: int | None = None) -> UserObjects:
        return UserObjects(
            module=net(),
            optimizer=lambda parameters: CountsInGroup(parameters, lr=0.01, momentum=0.9),
            lr_schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=15),
            callbacks=(Stops(at),),
        )

    expected = runs.here(manifest := data(runs), given())
    config = runs.config(manifest, checkpoint_every_steps=4)
    with pytest.raises(RuntimeError, match="stopped"):
        train_here(config, given(9))
    result = train_here(config, given())
    assert result.resumed_steps == (8,)
    assert_same(result, expected)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"precision": "fp16", "gradient_accumulation": 2},
    # The clock of rank 0 makes a checkpoint due after every step, even without a failure.
    "optimizer": {"sync": Zero(stage=1), "max_grad_norm": 0.5, "checkpoint_every_seconds": 1e-6},
    "gradients": {"sync": Zero(stage=2), "gradient_accumulation": 2},
    "parameters": {"sync": Zero(stage=3)},
}


@pytest.mark.slow
def test_two_ranks_go_on_to_the_bit_and_other_numbers_of_them_on_the_same_rows(
    runs: Runs, collective: str
) -> None:
    manifest, gang = data(runs), {"num_workers": 2, "collective": collective}
    trainings: dict[str, tuple[TrainConfig, UserObjects]] = {}
    names = [name for name in CASES if (name, collective) != ("parameters", "horovod")]
    for name in names:
        config = runs.config(manifest, **gang, **CASES[name])
        trainings[f"{name}, undisturbed"] = replace(config, run_uri=f"{config.run_uri}-plain"), objects()
        config = replace(config, checkpoint_every_steps=3, checkpoint_every_epochs=1)
        trainings |= {f"{name}, stopped at {at}": (config, objects(at)) for at in (4, 11)}
        trainings[name] = config, objects()
    # A small learning rate keeps rounding differences between rank counts small.
    slow = {"learning_rate": 0.002}
    whole = runs.here(manifest, objects(dropout=0.0), **slow)
    begun, to_begin = (runs.config(manifest, checkpoint_every_steps=3, **slow, **gang) for _ in range(2))
    stopped(begun, 8, dropout=0.0)
    trainings["begun"] = begun, objects(dropout=0.0)
    trainings["to begin, stopped"] = to_begin, objects(8, dropout=0.0)
    results = train_on_one_gang(trainings)[0]
    assert {results[name] for name in results if "stopped" in name} == {"RuntimeError: stopped"}
    for name in names:
        assert results[name].resumed_steps == (3, 10), name
        assert_same(results[name], results[f"{name}, undisturbed"])
    for result in (results["begun"], train_here(to_begin, objects(dropout=0.0))):
        assert result.resumed_steps == (6,)
        assert_equal_states(result, whole, bound=1e-5)
        # An epoch that two gangs trained has the losses and metrics of all its rows.
        for mine, theirs in zip(result.history, whole.history, strict=True):
            assert mine.train_loss == pytest.approx(theirs.train_loss, rel=1e-4)
            assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-4)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def _link(file: Path) -> None:
    moved = file.with_name("elsewhere")
    file.rename(moved)
    file.symlink_to(moved)


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    ("model.safetensors", _flip),
    ("optimizer.safetensors", _truncate),
    ("ranks.safetensors", Path.unlink),
    ("training.json", _flip),
    ("checkpoint.json", _truncate),
    ("checkpoint.json", Path.unlink),
    ("model.safetensors", _link),
]


def test_a_damaged_or_partial_checkpoint_is_passed_over(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    config = runs.config(data(runs), checkpoint_every_steps=3, keep_checkpoints=2)
    folders = stopped(config, 10)
    assert sorted(path.name for path in folders.iterdir()) == ["step-0000000006", "step-0000000009"]
    copies = [shutil.copytree(folders.parent, runs.folder / f"copy-{i}") for i in range(len(DAMAGES))]
    expected = train_here(config, objects())
    for copy, (name, damage) in zip(copies, DAMAGES, strict=True):
        damage(copy / "checkpoints" / "step-0000000009" / name)
        # An unfinished checkpoint, and files that are not ours.
        (copy / "checkpoints" / "step-0000000012").mkdir()
        (copy / "checkpoints" / "step-0000000013").symlink_to(copy / "checkpoints" / "step-0000000006")
        (copy / "checkpoints" / "step-7").mkdir()
        caplog.clear()
        result = train_here(replace(config, run_uri=str(copy)), objects())
        assert result.resumed_steps == (6,), (name, damage)
        assert "step-0000000013 is a link" in caplog.text
        if name != "checkpoint.json" or damage is _truncate:
            assert "the checkpoint of step 9 is skipped" in caplog.text
        assert_same(result, expected)


def rewrite(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Changes the JSON of a checkpoint's file, and the digest of `training.json`."""
    text = json.dumps(change(json.loads((folder / name).read_bytes()))).encode()
    (folder / name).write_bytes(text)
    if name == "training.json":
        digest = hashlib.sha256(text).hexdigest()
        rewrite(folder, "checkpoint.json", lambda info: info | {"training_sha256": digest})


@pytest.mark.parametrize("name", ["checkpoint.json", "training.json"])
def test_a_checkpoint_of_a_later_format_is_refused_and_stays(runs: Runs, name: str) -> None:
    """A resume that ignored it would start earlier and then remove the newer checkpoint."""
    config = runs.config(data(runs), checkpoint_every_steps=3)
    folder = stopped(config, 10) / "step-0000000009"
    rewrite(folder, name, lambda content: content | {"format_version": 2})
    with pytest.raises(ValueError, match=rf"{name} cannot be read: its format is 2, .*; upgrade ringspark"):
        train_here(config, objects())
    assert folder.exists()


def test_the_seconds_are_those_of_all_runs(runs: Runs) -> None:
    def lengthen(record: Any) -> Any:
        record["position"]["seconds"] += 5000.0  # simulates a long first run
        return record

    config = runs.config(data(runs), checkpoint_every_steps=3)
    rewrite(stopped(config, 10) / "step-0000000009", "training.json", lengthen)
    result = train_here(config, objects())
    assert result.resumed_steps == (9,)
    assert 5000.0 < result.seconds < 10000.0


class SilentDisk(LocalFileSystem):
    """File system that times out for paths ending in `about`."""

    protocol = "silent"
    about = ""

    def _check(self, path: str) -> None:
        if self.about and path.endswith(self.about):
            raise TimeoutError("the store does not answer")

    def info(self, path: str, **options: Any) -> Any:
        self._check(path)
        return super().info(path, **options)

    def exists(self, path: str, **options: Any) -> bool:
        # Like `exists` of fsspec's base class, which returns False on every error.
        try:
            return bool(self.info(path, **options))
        except OSError:
            return False

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._check(path)
        return super().open(path, mode, **options)


@pytest.mark.parametrize("about", ["optimizer.safetensors", "checkpoint.json"])
def test_a_checkpoint_that_the_store_does_not_give_now_is_not_taken_for_a_damaged_one(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, about: str
) -> None:
    """Otherwise the training would silently restart before it, and then remove it."""
    config = runs.config(data(runs), checkpoint_every_steps=3)
    stopped(config, 10)
    fsspec.register_implementation("silent", SilentDisk, clobber=True)
    apart = replace(config, run_uri=f"silent://{config.run_uri}")
    monkeypatch.setattr(SilentDisk, "about", about)
    with pytest.raises(OSError, match=r"step-0000000009 could not be read \(TimeoutError.*resume when"):
        train_here(apart, objects())
    monkeypatch.setattr(SilentDisk, "about", "")
    assert train_here(apart, objects()).resumed_steps == (9,)


def test_the_next_writer_removes_what_was_never_finished(runs: Runs) -> None:
    config = runs.config(data(runs), checkpoint_every_steps=2, keep_checkpoints=3)
    unfinished = Path(config.run_uri) / "checkpoints" / "step-0000000099"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"half of it")
    names = sorted(path.name for path in stopped(config, 12).iterdir())
    assert names == [f"step-{step:010d}" for step in (6, 8, 10)]


class BlocksTheFolder(Stops):
    """Blocks the checkpoint folder with a file until step 7."""

    def __init__(self, file: Path, at: int | None = None) -> None:
        super().__init__(at)
        self.file = file

    def on_train_start(self, state: TrainingState) -> None:
        super().on_train_start(state)
        if not state.step:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_bytes(b"")

    def on_step_end(self, state: TrainingState) -> None:
        if state.step == 7:
            self.file.unlink()
        super().on_step_end(state)


def test_a_store_that_cannot_be_written_costs_checkpoints_and_not_the_training(runs: Runs) -> None:
    expected = runs.here(manifest := data(runs), objects())
    config = runs.config(manifest, checkpoint_every_steps=3)

    def work(at: int | None) -> TrainResult:
        callback = BlocksTheFolder(Path(config.run_uri) / "checkpoints", at)
        return train_here(config, UserObjects(module=net(), callbacks=(callback,)))

    result = work(None)
    assert result.checkpoint_errors[0].startswith("the checkpoint of step 3 was not written (")
    assert_same(result, expected)
    shutil.rmtree(config.run_uri)
    # Checkpoints can be written again from step 9 on.
    with pytest.raises(RuntimeError, match="stopped"):
        work(10)
    again = work(None)
    assert (again.resumed_steps, again.checkpoint_errors) == ((9,), ())
    assert_same(again, expected)


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"optimizer": "sgd"}, {}, r"with optimizer AdamW in 1 .* this one has SGD in 1; set the same"),
        ({"batch_size": 8}, {}, r"with 5 steps per epoch, this training has 10; give the same data"),
        ({}, {"module": nn.Linear(4, 1)}, "another network|not of this model"),
        ({}, {"callbacks": ()}, "with 3 callbacks, this one has 2"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused(
    runs: Runs, changes: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    config = runs.config(data(runs), checkpoint_every_steps=3)
    stopped(config, 4)
    with pytest.raises(ValueError, match=message):
        train_here(replace(config, **changes), replace(objects(), **given))


def test_without_a_wish_nothing_is_written(runs: Runs) -> None:
    assert not stopped(runs.config(data(runs)), 12).exists()


class HoldsNoJson(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"weights": torch.zeros(1)}


def test_a_callback_whose_state_has_no_json_form_is_named_at_the_start(runs: Runs) -> None:
    own = UserObjects(module=net(), callbacks=(HoldsNoJson(),))
    with pytest.raises(ValueError, match="callback HoldsNoJson must return JSON values"):
        runs.here(data(runs), own, checkpoint_every_epochs=1)
