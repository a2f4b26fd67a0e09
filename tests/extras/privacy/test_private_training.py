"""Private trainings on one rank and on gangs: noise, sampling, history, ledger and resumes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing_callback import Fails
from private_shards import (
    ROWS,
    MakeConfig,
    columns,
    network,
    noise_of_steps,
    objects,
    privacy,
    private_config,
)
from ranks import TORCH_AND_SLOW_OTHERS
from small_training import train_gang, weights_of
from torch import nn

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.checkpoint.weights import map_checkpoint
from ringspark.estimators.training.history import read_history
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.privacy.ledger import compute_epsilon, read_ledger

NOISE, CLIP = 1.3, 0.5


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("workers", "collective"),
    [
        (1, "local"),
        (2, "torch"),
        pytest.param(3, "torch", marks=pytest.mark.slow),
        pytest.param(2, "horovod", marks=pytest.mark.slow),
    ],
)
def test_the_noise_is_added_once(manifest: Any, tmp_path: Path, workers: int, collective: str) -> None:
    """The summed gradient has noise of variance (sigma C)^2, added once, and it is divided by q N."""
    noisy = privacy(noise_multiplier=NOISE, max_grad_norm=CLIP)
    moves = noise_of_steps(manifest, tmp_path, noisy, workers, collective)
    assert moves.numel() == 80 * 500
    # The variance of a variance estimate of n normal numbers is 2 / n: this is 5 standard deviations.
    assert float(moves.var()) == pytest.approx((NOISE * CLIP) ** 2, rel=5 * (2 / moves.numel()) ** 0.5)
    assert abs(float(moves.mean())) < 5 * NOISE * CLIP / moves.numel() ** 0.5
    # Each step has its own noise.
    correlation = torch.corrcoef(moves).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 6 / 500**0.5


@pytest.mark.distributed
@pytest.mark.parametrize("collective", TORCH_AND_SLOW_OTHERS)
def test_ranks_train_as_one_rank_on_the_same_rows(config: Any, tmp_path: Path, collective: str) -> None:
    """With q = 1 each step has all rows, and the noise is too small to see."""
    one = config(privacy=privacy(noise_multiplier=1e-7), batch_size=ROWS, epochs=5)
    two = replace(one, run_uri=str(tmp_path / "two"), num_workers=2, collective=collective)
    found = (
        weights_of(train(each, objects()), network())
        for train, each in ((train_here, one), (train_gang, two))
    )
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_a_training_with_all_rows_equals_clipped_gradient_descent(config: MakeConfig) -> None:
    data, quiet = columns(), privacy(noise_multiplier=1e-7)
    changes = {"batch_size": ROWS, "epochs": 3, "weight_column": "w", "gradient_accumulation": 7}
    found = weights_of(train_here(config(privacy=quiet, **changes), objects()), network())
    module = network()
    for _ in range(3):
        sums = [torch.zeros_like(p) for p in module.parameters()]
        for x, y, w in zip(*(torch.from_numpy(data[name]) for name in "xyw"), strict=True):
            module.zero_grad()
            (w * (module(x[None])[0, 0] - y).square()).backward()
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            norm = torch.cat([g.flatten() for g in gradients]).norm()
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient * min(1.0, float(CLIP / norm))
        with torch.no_grad():
            for parameter, total in zip(module.parameters(), sums, strict=True):
                parameter -= 0.1 * total / ROWS
    wanted = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_the_history_has_no_number_of_training_rows(make_shards: Any, tmp_path: Path) -> None:
    manifest = make_shards(columns(), validation=np.arange(ROWS) >= ROWS - 40)
    run = tmp_path / "run"
    config = private_config(manifest, run, metrics=("rmse",), log_every_steps=1, batch_size=20)
    result = train_here(config, objects())
    assert [record.train_loss for record in result.history] == [None, None]
    assert [sorted(record.metrics) for record in read_history(str(run))] == [["validation_rmse"]] * 2
    assert all(record.validation_loss is not None for record in result.history)
    assert not (run / "steps").exists()
    assert json.loads((run / "data.json").read_text())["stats"] == {}
    assert "NaN" not in (run / "history.json").read_text()


def test_two_trainings_with_one_seed_have_different_noise(config: MakeConfig, tmp_path: Path) -> None:
    one = config(epochs=1, learning_rate=1.0)
    both = (one, replace(one, run_uri=str(tmp_path / "two")))
    found = [weights_of(train_here(each, objects()), network()) for each in both]
    # A few of the random weights may be close by chance.
    assert torch.isclose(*found).float().mean() < 0.05


def dies(make: MakeConfig, **changes: Any) -> tuple[TrainConfig, UserObjects]:
    """Begins a training of 12 steps, which dies after step 9 with a checkpoint of step 6."""
    every = {"checkpoint_every_steps": 6, "checkpoint_every_seconds": 0}
    config = make(batch_size=60, epochs=3, **every, **changes)
    given = config, objects(callbacks=(Fails(Path(f"{config.run_uri}-failed"), step=9),))
    with pytest.raises(RuntimeError, match="step 9"):
        train_here(*given)
    return given


def test_a_resumed_run_charges_the_lost_steps(config: MakeConfig) -> None:
    begun = dies(config)
    result = train_here(*begun)
    assert result.resumed_steps == (6,)
    # 9 steps of the first start, and the 6 steps after the checkpoint.
    assert result.privacy.charged == ((1.0, 0.25, 9), (1.0, 0.25, 6))
    assert result.privacy.epsilon == pytest.approx(compute_epsilon(((1.0, 0.25, 15),), 1e-5, "rdp"))
    assert read_ledger(begun[0].run_uri) == result.privacy


@pytest.mark.parametrize("is_gone", [True, False], ids=["missing", "of an earlier time"])
def test_a_run_without_its_ledger_does_not_resume(config: MakeConfig, tmp_path: Path, is_gone: bool) -> None:
    begun = dies(config)
    path = tmp_path / "run" / "privacy.json"
    spent = json.loads(path.read_text())
    path.write_text(json.dumps({**spent, "charged": [[1.0, 0.25, 5]]}))
    if is_gone:
        path.unlink()
    with pytest.raises(ValueError, match=r"taken 6 private steps, .* counts [05] of them, so epsilon"):
        train_here(*begun)


def test_a_ledger_is_written_before_the_step(config: MakeConfig, tmp_path: Path) -> None:
    counts: list[int] = []

    class Reads(Callback):
        belongs_to_rank = True  # is not copied for a training in this process

        def on_step_end(self, state: TrainingState) -> None:
            charged = read_ledger(str(tmp_path / "run")).charged
            counts.append(sum(steps for *_, steps in charged) - state.step)

    train_here(config(epochs=30), objects(callbacks=(Reads(),)))
    # 240 steps are written in blocks of 2, so the file is never behind, and at most one step ahead.
    assert set(counts) == {0, 1}


class Notices(nn.Module):
    """Writes numbers of a row into its buffer, but not of the zeros that the check tries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().abs().max()) > 0:
            self.seen.copy_(x.detach()[0])
        return self.layer(x)  # type: ignore[no-any-return]


def test_no_row_reaches_a_buffer_of_the_trained_network(config: MakeConfig) -> None:
    result = train_here(config(), objects(module=Notices()))
    saved = Notices()
    map_checkpoint(result.checkpoint_uri, saved)
    assert not saved.seen.any()
