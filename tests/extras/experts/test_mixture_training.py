"""`train_worker` trains mixtures of experts to the weights and history of one worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from short_sync import sync_of
from small_training import config_of, train_gang, weights_of

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.objective.heads import Head
from ringspark.estimators.training.objective.sums import MicroBatchOutput, Sums
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.models import ModelSpec
from ringspark.models.reports import CountingLayer, collect_reports

CPU = torch.device("cpu")
NUMBERS = ("dropped_share", "expert_balance", "balance_loss", "z_loss")


def spec(router: str, **options: Any) -> ModelSpec:
    experts = {"num_experts": 4, "router": router, "min_capacity": 1, "capacity_factor": 1.0, **options}
    sizes = {"vocab_size": 13, "max_seq_len": 8, "dim": 8, "depth": 2, "num_heads": 2, "out_features": 3}
    return ModelSpec("transformer_classifier", {**sizes, "padding_id": 0, "experts": experts})


def columns(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 13, size=(rows, 8))
    ids[np.arange(8) >= rng.integers(1, 9, size=(rows, 1))] = 0
    return {
        "x": ids,
        "y": (ids.sum(1) % 3).astype(np.int64),
        "w": rng.uniform(0.5, 2, rows).astype(np.float32),
    }


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
    config = config_of(
        manifest,
        tmp_path / "one",
        model=model.to_json(),
        task="classification",
        losses=("cross_entropy",),
        weight_column="w",
        gradient_accumulation=2,
        # A key bias has only rounding errors as gradients, which Adam would scale up to full steps.
        optimizer="sgd",
        learning_rate=0.1,
        epochs=5,
    )
    one = train_here(config)
    two = train_gang(
        replace(
            config,
            run_uri=str(tmp_path / "two"),
            num_workers=2,
            collective="torch",
            sync=sync_of(sharding=sharding),
        )
    )
    weights = [weights_of(result, model.build()) for result in (one, two)]
    assert (weights[0] - weights[1]).abs().max() < 1e-5
    for record, other in zip(one.history, two.history, strict=True):
        assert {f"{split}_{name}" for split in ("train", "validation") for name in NUMBERS} <= set(
            record.metrics
        )
        assert record.metrics == pytest.approx(other.metrics, rel=1e-5)
    assert one.history[0].metrics["train_dropped_share"] > 0


def test_layers_losses_are_trained(make_shards: Any, tmp_path: Path) -> None:
    manifest = make_shards(columns(64))
    last: dict[float, dict[str, float]] = {}
    for weight in (0.0, 1.0):
        config = config_of(
            manifest,
            tmp_path / str(weight),
            model=spec("switch", balance_weight=weight, z_weight=weight).to_json(),
            task="classification",
            losses=("cross_entropy",),
            epochs=8,
        )
        last[weight] = train_here(config).history[-1].metrics
    assert last[1.0]["train_balance_loss"] < last[0.0]["train_balance_loss"]
    assert last[1.0]["train_z_loss"] < last[0.0]["train_z_loss"]
    assert last[1.0]["train_dropped_share"] < last[0.0]["train_dropped_share"]


class Stops(Callback):
    def __init__(self, at: int | None = None) -> None:
        self.at = at

    def on_step_end(self, state: TrainingState) -> None:
        if state.step == self.at:
            raise KeyError("stopped")


def test_a_training_that_goes_on_in_the_middle_of_an_epoch_has_the_undisturbed_history(
    make_shards: Any, tmp_path: Path
) -> None:
    """A checkpoint holds the random generators that the noise comes from."""
    manifest = make_shards(columns(104))
    config = config_of(
        manifest,
        tmp_path / "whole",
        model=spec("gshard", random_second=True, jitter=0.1).to_json(),
        task="classification",
        losses=("cross_entropy",),
        checkpoint_every_steps=2,
        epochs=2,
    )
    whole = train_here(config, UserObjects(callbacks=(Stops(),)))
    config = replace(config, run_uri=str(tmp_path / "stopped"))
    with pytest.raises(KeyError, match="stopped"):
        train_here(config, UserObjects(callbacks=(Stops(at=3),)))
    again = train_here(config, UserObjects(callbacks=(Stops(),)))
    assert again.resumed_steps == (2,)
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
