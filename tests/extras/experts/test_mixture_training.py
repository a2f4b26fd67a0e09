"""`train_worker` trains mixtures of experts to the weights and history of one worker."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import equal_to_one_worker, equal_to_undisturbed
from short_sync import sync_of
from small_training import config_of

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.objective.sums import MicroBatchOutput, Sums
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models import ModelSpec
from ringspark.models.reports import CountingLayer, collect_reports

CPU = torch.device("cpu")
NUMBERS = ("dropped_share", "expert_balance", "balance_loss", "z_loss")


def spec(router: str, **options: Any) -> ModelSpec:
    experts = {"num_experts": 4, "router": router, "min_capacity": 1, "capacity_factor": 1.0, **options}
    sizes = {"vocab_size": 13, "max_seq_len": 8, "dim": 8, "depth": 2, "num_heads": 2, "out_features": 3}
    return ModelSpec("transformer_classifier", {**sizes, "padding_id": 0, "experts": experts})


def classification(manifest: Any, folder: Path, **changes: Any) -> TrainConfig:
    return config_of(manifest, folder / "run", task="classification", losses=("cross_entropy",), **changes)


def columns(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 13, size=(rows, 8))
    ids[np.arange(8) >= rng.integers(1, 9, size=(rows, 1))] = 0
    weight = rng.uniform(0.5, 2, rows).astype(np.float32)
    return {"x": ids, "y": (ids.sum(1) % 3).astype(np.int64), "w": weight}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("router", "sharding"),
    [
        ("switch", "none"),
        pytest.param("gshard", "parameters", marks=pytest.mark.slow),
        pytest.param("expert_choice", "gradients", marks=pytest.mark.slow),
    ],
)
def test_two_workers_are_one_worker(make_shards: Any, tmp_path: Path, router: str, sharding: str) -> None:
    """The last batches leave a rank without rows; rows have weights, and steps have micro-batches."""
    manifest = make_shards(columns(104), validation=np.arange(104) >= 97, row_group_rows=97)
    model = spec(router, balance_weight=0.5, z_weight=0.1)
    # A key bias has only rounding errors as gradients, which Adam would scale up to full steps.
    settings = {"weight_column": "w", "optimizer": "sgd", "learning_rate": 0.1, "epochs": 3}
    config = classification(manifest, tmp_path, model=model, gradient_accumulation=2, **settings)
    spread = {"num_workers": 2, "collective": "torch", "sync": sync_of(sharding=sharding)}
    one, _ = equal_to_one_worker(config, alone=train_here, **spread)
    names = {f"{split}_{name}" for split in ("train", "validation") for name in NUMBERS}
    assert all(names <= record.metrics.keys() for record in one.history)
    assert one.history[0].metrics["train_dropped_share"] > 0


def test_layers_losses_are_trained(make_shards: Any, tmp_path: Path) -> None:
    manifest = make_shards(columns(64))
    last: dict[float, dict[str, float]] = {}
    for weight in (0.0, 1.0):
        model = spec("switch", balance_weight=weight, z_weight=weight)
        config = classification(manifest, tmp_path / str(weight), model=model, epochs=8)
        last[weight] = train_here(config).history[-1].metrics
    for name in ("train_balance_loss", "train_z_loss", "train_dropped_share"):
        assert last[1.0][name] < last[0.0][name]


def test_a_training_resumed_in_an_epoch_has_the_undisturbed_history(make_shards: Any, tmp_path: Path) -> None:
    """A checkpoint holds the random generators that the noise comes from."""
    model = spec("gshard", random_second=True, jitter=0.1)
    config = classification(make_shards(columns(104)), tmp_path, model=model, checkpoint_every_steps=2)
    whole, again = equal_to_undisturbed(config, step=3)
    assert [r.metrics for r in again.history] == [r.metrics for r in whole.history]
    assert [r.train_loss for r in again.history] == [r.train_loss for r in whole.history]


def test_sums_of_layers_go_through_a_checkpoint_of_any_number_of_ranks() -> None:
    network = spec("switch").build()
    heads = [Head(label="y", loss="cross_entropy", width=3)]
    parts = [torch.from_numpy(columns(12)["x"])[start : start + 4] for start in (0, 4, 8)]

    def seen(ids: torch.Tensor) -> MicroBatchOutput:
        with collect_reports() as reports:
            network(ids)
        return MicroBatchOutput(torch.ones(1), 1.0, [], reports.counts)

    def made(*ids: torch.Tensor) -> Sums:
        sums = Sums("train", heads, CPU, network)
        sums.add([seen(part) for part in ids])
        return sums

    whole = made(*parts).take(LocalCollective())
    again, joined, other = made(), made(), made(parts[0])
    again.load(made(*parts).state())
    joined.load_all([made(part).state() for part in parts], takes_all=True)
    other.load_all([made(part).state() for part in parts], takes_all=False)
    assert again.take(LocalCollective()) == joined.take(LocalCollective()) == whole
    numbers = other.take(LocalCollective())
    assert np.isnan([numbers["train_dropped_share"], numbers["train_loss"]]).all()
    assert isinstance(network.blocks[1].mixture, CountingLayer)
    with pytest.raises(ValueError, match=r"has 9 counts of layers, this network has 0; give runUri"):
        Sums("train", heads, CPU).load(made(parts[0]).state())
