"""transformBatch and transformInPrediction in whole trainings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from short_sync import sync_of
from small_training import config_of, train_gang, weights_of
from torch import nn

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.training.batch_transforms import BatchTransform, prepare_inputs, try_transform
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.check.driver import check_training
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.estimators.training.worker import TrainResult, train_worker
from ringspark.pipelines import ShardManifest

MakeShards = Callable[..., ShardManifest]
CPU = torch.device("cpu")


class Noise(nn.Module):
    """Augmentation with a buffer; it also uses NumPy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.training
        return x + self.scale * torch.randn_like(x) * np.random.uniform(0.5, 1.5)


class Wider(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x**2], 1)


def mixed(x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixup: blends each row and its labels with another row."""
    share, order = torch.rand(()), torch.randperm(len(x))
    return torch.lerp(x[order], x, share), torch.lerp(labels[order], labels, share)


def unchanged(x: torch.Tensor) -> torch.Tensor:
    torch.rand(7)
    return x


def absolute(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).abs()


def largest(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return absolute(outputs, labels).max()


METRICS: dict[str, Any] = {"absolute": absolute, "largest": largest}


def network(width: int = 3, dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))


@pytest.fixture
def manifest(make_shards: MakeShards) -> ShardManifest:
    g = np.random.default_rng(0)
    x = g.normal(size=(150, 3)).astype(np.float32)
    return make_shards({"x": x, "y": (x @ [1.0, -2.0, 0.5]).astype(np.float32)}, num_files=2)


def _objects(transform: Any, **more: Any) -> UserObjects:
    return UserObjects(module=network(), transform_batch=transform, **more)


def _train(config: TrainConfig, objects: UserObjects) -> TrainResult:
    config = check_training(config, objects, ShardManifest.load(config.shards_uri)).config
    return train_worker(config, LocalCollective(), objects)


def test_it_changes_the_training_and_leaves_the_network_s_own_randomness(
    manifest: ShardManifest, tmp_path: Path
) -> None:
    weights = {}
    for name, transform in {"none": None, "unchanged": unchanged, "noise": Noise(), "mixed": mixed}.items():
        result = _train(config_of(manifest, tmp_path / name), _objects(transform))
        weights[name] = weights_of(result, network())
    # The transform's random numbers do not change dropout's.
    assert weights["unchanged"].equal(weights["none"])
    assert not weights["noise"].equal(weights["none"])
    assert not weights["mixed"].equal(weights["none"])


def softly_mixed(x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixup of classes; the labels become probabilities."""
    return mixed(x, nn.functional.one_hot(labels, 2).float())


def test_mixed_classes_train_and_the_held_out_rows_alone_have_metrics(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).normal(size=(80, 3)).astype(np.float32)
    manifest = make_shards({"x": x, "y": (x[:, 0] > 0).astype(np.int64)}, validation=np.arange(80) % 4 == 0)
    config = config_of(
        manifest, tmp_path / "run", task="classification", losses=("cross_entropy",), metrics=("accuracy",)
    )
    objects = UserObjects(module=nn.Linear(3, 2), transform_batch=softly_mixed)
    result = _train(config, objects)
    assert list(result.history[-1].metrics) == ["validation_accuracy"]
    with pytest.raises(ValueError, match="monitor 'train_accuracy' is no entry of this training's history"):
        check_training(replace(config, monitor="train_accuracy"), objects, manifest)


@pytest.mark.parametrize("changes", ["transform_batch", "transform_in_prediction", "network"])
def test_a_change_in_place_leaves_labels_that_are_an_input_too(
    make_shards: MakeShards, tmp_path: Path, changes: str
) -> None:
    """An autoencoder's label is its input; on the CPU both share one NumPy array."""
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    manifest = make_shards({"x": x}, validation=np.arange(40) % 4 == 0)

    def history(in_place: bool) -> list[tuple[float, float | None]]:
        torch.manual_seed(3)
        first = nn.ReLU(inplace=in_place and changes == "network")
        objects = UserObjects(module=nn.Sequential(first, nn.Linear(3, 3)))
        if changes != "network":
            objects = replace(objects, **{changes: (lambda x: x.sub_(1)) if in_place else (lambda x: x - 1)})
        run = tmp_path / str(in_place)
        config = config_of(manifest, run, input_columns=("x",), label_columns=("x",), epochs=2)
        return [(record.train_loss, record.validation_loss) for record in _train(config, objects).history]

    assert history(in_place=True) == history(in_place=False)


def test_row_weights_beside_labels_that_change_rows_are_refused(
    make_shards: MakeShards, tmp_path: Path
) -> None:
    x = np.ones((40, 3), np.float32)
    manifest = make_shards({"x": x, "y": x.sum(1), "w": x[:, 0]})
    config = config_of(manifest, tmp_path, weight_column="w")
    with pytest.raises(
        ValueError, match=r"weightCol 'w' gives one weight per row, .* takes labels .* leave out"
    ):
        check_training(config, _objects(mixed), manifest)
    check_training(config, _objects(Noise()), manifest)


class Interrupt(Callback):
    """Fails after a step, once."""

    def __init__(self, step: int, marker: Path) -> None:
        self.step, self.marker = step, marker

    def on_step_end(self, state: TrainingState) -> None:
        if state.step == self.step and not self.marker.exists():
            self.marker.touch()
            raise KeyboardInterrupt


def test_a_run_that_was_cut_in_an_epoch_ends_with_the_same_bits(
    manifest: ShardManifest, tmp_path: Path
) -> None:
    def config(name: str) -> TrainConfig:
        return config_of(
            manifest,
            tmp_path / name,
            gradient_accumulation=3,
            checkpoint_every_steps=1,
            metrics=tuple(METRICS),
        )

    straight = _train(config("straight"), _objects(Noise(), metrics=METRICS))
    objects = _objects(Noise(), metrics=METRICS, callbacks=(Interrupt(7, tmp_path / "marker"),))
    with pytest.raises(KeyboardInterrupt):
        _train(config("cut"), objects)
    resumed = _train(config("cut"), objects)
    assert resumed.resumed_steps
    assert 5 < resumed.resumed_steps[0] <= 7  # in the second epoch of 5 steps
    assert weights_of(resumed, network()).equal(weights_of(straight, network()))
    assert [record.metrics for record in resumed.history] == [record.metrics for record in straight.history]
    assert set(straight.history[1].metrics) == {f"train_{name}" for name in METRICS}


@pytest.mark.distributed
@pytest.mark.parametrize("sharding", ["none", pytest.param("parameters", marks=pytest.mark.slow)])
def test_ranks_without_rows_keep_step_where_rows_change_their_shape(
    make_shards: MakeShards, tmp_path: Path, sharding: Any
) -> None:
    """33 rows in steps of 32, and 1 held out: in the last step, only one rank has a row."""
    x = np.random.default_rng(1).normal(size=(34, 3)).astype(np.float32)
    manifest = make_shards({"x": x, "y": x.sum(1)}, validation=np.arange(34) == 0)
    objects = UserObjects(module=network(6, 0.0), transform_batch=Wider(), transform_in_prediction=Wider())
    config = config_of(
        manifest, tmp_path / "gang", num_workers=3, collective="torch", sync=sync_of(sharding=sharding)
    )
    gang = train_gang(config, objects)
    alone = _train(replace(config, num_workers=1, run_uri=str(tmp_path / "alone")), objects)
    # The transform uses no random numbers, so every number of workers gives the same result.
    torch.testing.assert_close(weights_of(gang, network(6)), weights_of(alone, network(6)), rtol=0, atol=1e-6)
    assert gang.history[-1].validation_loss == pytest.approx(alone.history[-1].validation_loss, rel=1e-5)


@pytest.mark.distributed
@pytest.mark.slow
def test_each_rank_draws_its_own_numbers_and_a_rerun_the_same(
    manifest: ShardManifest, tmp_path: Path
) -> None:
    config = config_of(manifest, tmp_path / "one", num_workers=2, collective="torch")
    first = train_gang(config, _objects(Noise()))
    second = train_gang(replace(config, run_uri=str(tmp_path / "two")), _objects(Noise()))
    assert weights_of(first, network()).equal(weights_of(second, network()))
    batch = Batch(inputs=(torch.zeros(2, 3),), labels=(torch.zeros(2),), weight=None)
    changed = [
        BatchTransform(Noise(), 0, rank, CPU)(batch, step).inputs[0] for rank in (0, 1) for step in (0, 1)
    ]
    assert len({values.numpy().tobytes() for values in changed}) == 4


def test_the_prediction_s_transform_is_deterministic_by_mode_and_keeps_its_owner_s_module() -> None:
    dropout = nn.Dropout(0.5)
    assert dropout.training
    (result,), _ = try_transform(dropout, "transformInPrediction", (torch.ones(4, 3),), None)
    assert result.equal(torch.ones(4, 3))
    assert dropout.training
    (none,) = prepare_inputs(Wider(), (torch.ones(0, 3),))
    assert none.shape == (0, 6)


BAD: dict[str, tuple[Any, str]] = {
    "raises": (
        lambda x: x @ torch.ones(5),
        r"cannot take inputs \[\(2, 3\) float32\]: RuntimeError: .*; it is called",
    ),
    "fewer rows": (
        lambda x: x[:1],
        r"must return 1 inputs of 2 rows, as in its input, got a tensor \(1, 3\); ch",
    ),
    "no tensor": (lambda x: x.numpy(), "must return 1 inputs of 2 rows, as in its input, got a ndarray"),
    "two for one": (
        lambda x: (x, x),
        r"must return 1 inputs .*, got \(a tensor \(2, 3\), a tensor \(2, 3\)\)",
    ),
    "labels kept": (
        lambda x, labels: x,
        r"takes labels and must return \(inputs, labels\), got a tensor \(2, 3\)",
    ),
    "one label": (
        lambda x, labels: (x, labels[:1]),
        r"must return 1 labels of 2 rows, .* got a tensor \(1,\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_transform_of_rows_is_refused_after_a_trial(name: str) -> None:
    transform, sentence = BAD[name]
    with pytest.raises(ValueError, match=f"^transformBatch {sentence}"):
        try_transform(transform, "transformBatch", (torch.zeros(2, 3),), (torch.zeros(2),))


def test_a_network_that_cannot_take_what_it_gets_is_named(manifest: ShardManifest, tmp_path: Path) -> None:
    config = config_of(manifest, tmp_path)
    with pytest.raises(
        ValueError, match=r"model Sequential cannot take what transformBatch returns, \[\(2, 6\)\]"
    ):
        check_training(config, _objects(Wider()), manifest)
    longer = UserObjects(
        module=nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (2, -1))), transform_batch=Wider()
    )
    longer.module.append(nn.LazyLinear(1))
    with pytest.raises(ValueError, match="cannot take what transformBatch returns"):
        check_training(config, longer, manifest)


@pytest.mark.extras
def test_the_memory_of_a_step_is_that_of_the_changed_rows(manifest: ShardManifest, tmp_path: Path) -> None:
    """A budget that cannot be checked gives a warning, which fails tests."""
    from ringspark.extras.planning.memory.budget import check_budget

    lazy = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1))
    objects = UserObjects(
        module=lazy, transform_batch=nn.Sequential(Noise(), Wider()), transform_in_prediction=Wider()
    )
    config = check_training(config_of(manifest, tmp_path), objects, manifest).config
    check_budget(config, objects, manifest, 10**9)
    with pytest.raises(ValueError, match="memoryBudget is 100 B"):
        check_budget(config, objects, manifest, 100)
