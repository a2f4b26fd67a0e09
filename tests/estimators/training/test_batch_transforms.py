"""transformBatch and transformInPrediction in whole trainings."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parity import equal_to_one_worker, equal_to_undisturbed
from short_sync import sync_of
from small_training import Runs, columns_of, train_in_threads, weights_of
from torch import nn

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.batch_transforms import BatchTransform, prepare_inputs, try_transform
from ringspark.estimators.training.feed import Batch
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.models.generators import common_seed

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


class Shifted(nn.Module):
    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, step_seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x + step_seed % 7, labels + step_seed % 7


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


def _objects(transform: Any, **more: Any) -> UserObjects:
    return UserObjects(module=network(), transform_batch=transform, **more)


def _weights(result: TrainResult) -> torch.Tensor:
    return weights_of(result, network())


def test_it_changes_the_training_and_leaves_the_network_s_own_randomness(runs: Runs) -> None:
    columns = columns_of(150, 3)
    none, same, noise, blended = (
        _weights(runs.here(columns, _objects(transform))) for transform in (None, unchanged, Noise(), mixed)
    )
    # The transform's random numbers do not change dropout's.
    assert same.equal(none)
    assert not noise.equal(none)
    assert not blended.equal(none)


def softly_mixed(x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixup of classes; the labels become probabilities."""
    return mixed(x, nn.functional.one_hot(labels, 2).float())


def test_mixed_classes_train_and_the_held_out_rows_alone_have_metrics(runs: Runs) -> None:
    x = columns_of(80, 3)["x"]
    manifest = runs.shards({"x": x, "y": (x[:, 0] > 0).astype(np.int64)}, validation=np.arange(80) % 4 == 0)
    changes = {"task": "classification", "losses": ("cross_entropy",), "metrics": ("accuracy",)}
    objects = UserObjects(module=nn.Linear(3, 2), transform_batch=softly_mixed)
    assert list(runs.here(manifest, objects, **changes).history[-1].metrics) == ["validation_accuracy"]
    with pytest.raises(ValueError, match="monitor 'train_accuracy' is no entry of this training's history"):
        runs.check(manifest, objects, monitor="train_accuracy", **changes)


@pytest.mark.parametrize("changes", ["transform_batch", "transform_in_prediction", "network"])
def test_a_change_in_place_leaves_labels_that_are_an_input_too(runs: Runs, changes: str) -> None:
    """An autoencoder's label is its input; on the CPU both share one NumPy array."""
    manifest = runs.shards({"x": columns_of(40, 3)["x"]}, validation=np.arange(40) % 4 == 0)

    def history(in_place: bool) -> list[tuple[float, float | None]]:
        torch.manual_seed(3)
        first = nn.ReLU(inplace=in_place and changes == "network")
        objects = UserObjects(module=nn.Sequential(first, nn.Linear(3, 3)))
        if changes != "network":
            objects = replace(objects, **{changes: (lambda x: x.sub_(1)) if in_place else (lambda x: x - 1)})
        result = runs.here(manifest, objects, label_columns=("x",))
        return [(record.train_loss, record.validation_loss) for record in result.history]

    assert history(in_place=True) == history(in_place=False)


def test_a_run_that_was_cut_in_an_epoch_ends_with_the_same_bits(runs: Runs) -> None:
    settings = {"gradient_accumulation": 3, "checkpoint_every_steps": 1, "metrics": tuple(METRICS)}
    config = runs.config(columns_of(150, 3), **settings)
    # In the second epoch of 5 steps.
    straight, resumed = equal_to_undisturbed(config, _objects(Noise(), metrics=METRICS), train=train_here)
    assert 5 < resumed.resumed_steps[0] <= 7
    assert [record.metrics for record in resumed.history] == [record.metrics for record in straight.history]
    assert set(straight.history[1].metrics) == {f"train_{name}" for name in METRICS}


@pytest.mark.distributed
@pytest.mark.parametrize("sharding", ["none", pytest.param("parameters", marks=pytest.mark.slow)])
def test_ranks_without_rows_keep_step_where_rows_change_their_shape(runs: Runs, sharding: Any) -> None:
    """33 rows in steps of 32, and 1 held out: in the last step, only one rank has a row."""
    objects = UserObjects(module=network(6, 0.0), transform_batch=Wider(), transform_in_prediction=Wider())
    config = runs.config(runs.shards(columns_of(34, 3), validation=np.arange(34) == 0))
    # The transform uses no random numbers, so every number of workers gives the same result.
    spread = {"num_workers": 3, "collective": "torch", "sync": sync_of(sharding=sharding)}
    equal_to_one_worker(config, objects, alone=train_here, bound=1e-6, **spread)


def test_each_rank_draws_its_own_numbers_and_a_rerun_the_same(runs: Runs) -> None:
    columns = columns_of(150, 3) | {"w": np.ones(150)}
    first, second = (
        train_in_threads(runs.config(columns, weight_column="w", num_workers=2), _objects(Noise()))
        for _ in range(2)
    )
    assert _weights(first).equal(_weights(second))
    batch = Batch(inputs=(torch.zeros(2, 3),), labels=(torch.zeros(2),), weight=None)
    changed = [BatchTransform(Noise(), 0, rank, CPU)(batch, i).inputs[0] for rank in (0, 1) for i in (0, 1)]
    assert len({values.numpy().tobytes() for values in changed}) == 4


def test_a_module_gets_labels_and_the_seed_of_the_step() -> None:
    batch = Batch(inputs=(torch.zeros(3, 2),), labels=(torch.zeros(3),), weight=None)
    transform = BatchTransform(Shifted(), 1, 0, CPU)
    found = transform(batch, 5)
    assert found.inputs[0][0, 0] == found.labels[0][0] == common_seed(transform._seed, 5) % 7


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


def test_a_network_that_cannot_take_what_it_gets_is_named(runs: Runs) -> None:
    longer = nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (2, -1)), nn.LazyLinear(1))
    for module, returned in ((network(), r", \[\(2, 6\)\]"), (longer, "")):
        objects = UserObjects(module=module, transform_batch=Wider())
        message = f"model Sequential cannot take what transformBatch returns{returned}"
        with pytest.raises(ValueError, match=message):
            runs.check(columns_of(150, 3), objects)


@pytest.mark.extras
def test_the_memory_of_a_step_is_that_of_the_changed_rows(runs: Runs) -> None:
    """A budget that cannot be checked gives a warning, which fails tests."""
    from ringspark.extras.planning.memory.plan import check_budget

    objects = UserObjects(
        module=nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1)),
        transform_batch=nn.Sequential(Noise(), Wider()),
        transform_in_prediction=Wider(),
    )
    manifest = runs.shards(columns_of(150, 3))
    config = runs.check(manifest, objects)
    check_budget(config, objects, manifest, 10**9)
    with pytest.raises(ValueError, match="memoryBudget is 100 B"):
        check_budget(config, objects, manifest, 100)
