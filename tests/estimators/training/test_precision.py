"""Mixed precision: operations in fp32, and how fp16 scales, skips and recovers."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import GANGS
from small_training import Runs, columns_of, train_ranks, weights_of
from torch import nn

from ringspark.estimators.launch.local import train_here
from ringspark.estimators.stages.summary import TrainingSummary
from ringspark.estimators.training.callbacks import Callback, TrainingState
from ringspark.estimators.training.precision import (
    MIN_SCALE,
    NORMS,
    LossScaler,
    autocast,
    keep_norms_fp32,
)
from ringspark.estimators.training.settings.config import UserObjects
from ringspark.estimators.training.worker import TrainResult
from ringspark.pipelines.typed_json import record

CPU = torch.device("cpu")
# The loss is small enough that no gradient overflows at the initial scale, 65536.
SETTINGS = {"shuffle": False, "loss_weights": (1 / 64,), "precision": "fp16"}

NORM_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer": (lambda: nn.LayerNorm(64), (32, 64)),
    "rms": (lambda: nn.RMSNorm(64), (32, 64)),
    "group": (lambda: nn.GroupNorm(4, 16), (8, 16, 4, 4)),
    "batch": (lambda: nn.BatchNorm1d(64), (32, 64)),
    "batch of images": (lambda: nn.BatchNorm2d(16), (8, 16, 4, 4)),
    "instance": (lambda: nn.InstanceNorm2d(16, affine=True), (8, 16, 4, 4)),
    "local response": (lambda: nn.LocalResponseNorm(2), (8, 16, 4)),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", NORM_LAYERS)
def test_norms_compute_in_fp32_and_pass_the_dtype_on(kind: str, precision: str) -> None:
    make, shape = NORM_LAYERS[kind]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 10
    seen: list[torch.dtype] = []
    layer, plain = make(), make()
    keep_norms_fp32(layer)
    layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    rounded = values.to(torch.bfloat16 if precision == "bf16" else torch.float16).requires_grad_()
    with autocast(precision, CPU):
        output = layer(rounded)
    output.float().square().sum().backward()
    assert seen == [torch.float32]
    assert rounded.grad is not None
    assert output.dtype == rounded.grad.dtype == rounded.dtype
    # Only the final rounding is in 16 bits.
    assert output.equal(plain(rounded.float()).to(rounded.dtype))
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    assert all(a.equal(b) for a, b in zip(layer.buffers(), plain.buffers(), strict=True))


def test_every_norm_of_torch_is_covered() -> None:
    names = {name for name in dir(nn) if name.endswith("Norm") or "Norm1d" in name or "Norm2d" in name}
    kinds = {name for name in names if issubclass(getattr(nn, name), NORMS)}
    # A lazy norm has become a plain one before the training begins.
    assert names - kinds <= {"CrossMapLRN2d"}


def test_norms_without_autocast_or_in_16_bits_by_themselves_are_left_alone() -> None:
    layer = nn.LayerNorm(8).to(torch.bfloat16)
    keep_norms_fp32(layer)
    values = torch.randn(4, 8, dtype=torch.bfloat16)
    assert layer(values).dtype == torch.bfloat16
    with autocast("bf16", CPU):
        assert layer(values).dtype == torch.bfloat16
    full = nn.LayerNorm(8)
    keep_norms_fp32(full)
    with autocast("bf16", CPU):
        assert full(values.float()).dtype == torch.float32


def _take_steps(scaler: LossScaler, *slopes: float) -> tuple[float, list[bool], list[float]]:
    """Takes a step of SGD per slope, from 1 at a rate of 0.1; returns the weight, skipped and scales."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    skipped, scales = [], []
    for slope in slopes:
        optimizer.zero_grad()
        scaler.scale((weight * slope).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.skipped)
        scales.append(scaler.current_scale)
    return weight.item(), skipped, scales


def test_the_scale_backs_off_at_an_overflow_and_grows_after_a_while() -> None:
    scaler = LossScaler("fp16", CPU, init_scale=8.0, growth_interval=3)
    weight, skipped, scales = _take_steps(scaler, 1.0, math.inf, math.nan, 1.0, 1.0, 1.0, 1.0)
    assert skipped == [False, True, True, False, False, False, False]
    assert scales == [8.0, 4.0, 2.0, 2.0, 2.0, 4.0, 4.0]
    assert scaler.skipped_steps == 2
    # The gradients were unscaled: five steps of 0.1.
    assert weight == pytest.approx(0.5)


def test_gradients_that_somebody_looked_at_are_unscaled_once_and_a_rank_may_have_none() -> None:
    scaler, weights = LossScaler("fp16", CPU), [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer, without = (torch.optim.SGD([weight], lr=0.1) for weight in weights)
    scaler.scale(weights[0].sum() * 3).backward()  # type: ignore[no-untyped-call]
    scaler.unscale(optimizer)
    scaler.unscale(optimizer)
    assert weights[0].grad == torch.tensor([3.0])
    scaler.step(optimizer)
    assert weights[0].item() == pytest.approx(0.7)
    scaler = LossScaler("fp16", CPU)
    scaler.step(without)
    scaler.update()
    assert (scaler.skipped_steps, weights[1].item()) == (0, 1.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_fp16_nothing_is_scaled_or_skipped(precision: str) -> None:
    scaler = LossScaler(precision, CPU)
    weight, skipped, scales = _take_steps(scaler, math.inf)
    assert (math.isfinite(weight), skipped, scales) == (False, [False], [1.0])
    assert scaler.state_dict() == {}


def test_a_scale_at_its_floor_ends_the_training() -> None:
    scaler = LossScaler("fp16", CPU, init_scale=MIN_SCALE * 4)
    _take_steps(scaler, math.nan, math.nan)
    with pytest.raises(FloatingPointError, match=r"3 steps were skipped, .* set precision='bf16'"):
        _take_steps(scaler, math.nan)


def test_a_saved_scaler_goes_on_where_it_was() -> None:
    first, second = LossScaler("fp16", CPU, init_scale=8.0, growth_interval=2), LossScaler("fp16", CPU)
    _take_steps(first, math.inf, 1.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (second.skipped_steps, second.current_scale) == (1, 4.0)
    # One good step was counted before, so this one is the second.
    _take_steps(second, 1.0)
    assert second.current_scale == 8.0
    second.load_state_dict({})
    assert second.current_scale == 8.0


class _Net(nn.Module):
    """A network with a norm; rows with x above 100 overflow fp16 in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 32), nn.LayerNorm(32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(torch.relu(self.norm(self.first(x.clamp(-100, 100)))))
        grows = (x[:, :1] > 100).to(y.dtype) * 60000 + 1
        return y * grows * grows  # type: ignore[no-any-return]


def _columns(rows: int, bad_rows: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    columns = columns_of(rows)
    columns["x"][list(bad_rows), 0] = 1000
    return columns


def _weights(result: TrainResult) -> torch.Tensor:
    return weights_of(result, _Net())


class _Watch(Callback):
    """Checks the rates, and writes the weights of each rank at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rates = str(folder), []

    def on_step_end(self, state: TrainingState) -> None:
        self.rates.append(state.optimizer.param_groups[0]["lr"])
        assert state.step == len(self.rates)

    def on_train_end(self, state: TrainingState) -> None:
        planned = [0.01 * (1 - step / state.num_steps) for step in range(state.num_steps)]
        assert self.rates == pytest.approx(planned)
        weights = torch.cat([p.detach().flatten() for p in state.module.parameters()])
        Path(self.folder, str(state.rank)).write_bytes(weights.numpy().tobytes())


# The third step of 32 rows has one bad row, which makes its rank overflow.
BAD_ROW = 2 * 32 + 1


@pytest.mark.distributed
@pytest.mark.parametrize(("collective", "accumulation"), [(name, 1 + i) for i, name in enumerate(GANGS)])
def test_an_overflow_on_a_rank_skips_the_step_on_both(runs: Runs, collective: str, accumulation: int) -> None:
    config = runs.config(
        runs.shards(_columns(160, (BAD_ROW,)), num_files=1, row_group_rows=16),
        num_workers=2,
        collective=collective,
        gradient_accumulation=accumulation,
        lr_schedule="linear",
        max_grad_norm=10.0,
    )
    results = train_ranks(config, UserObjects(module=_Net(), callbacks=(_Watch(runs.folder),)))
    first, second = ((runs.folder / str(rank)).read_bytes() for rank in range(2))
    assert first == second
    for result in results:
        assert [record.skipped_steps for record in result.history] == [1, 1]
        assert result.steps == 10
    # The training continued with the loss of the other rows.
    losses = [record.train_loss for record in results[0].history]
    assert math.isfinite(losses[0])
    assert losses[1] < losses[0]
    one = train_here(replace(config, run_uri=str(runs.folder / "one")), UserObjects(module=_Net()))
    assert [record.skipped_steps for record in one.history] == [1, 1]
    assert (_weights(results[0]) - _weights(one)).abs().max() < 1e-2


def test_a_skipped_step_leaves_weights_and_optimizer_as_they_were(runs: Runs) -> None:
    """Training with a bad batch equals training without it."""
    rest = {name: np.delete(values, np.s_[64:96], axis=0) for name, values in _columns(160).items()}
    skipped, clean = (
        runs.here(
            runs.shards(columns, num_files=1, row_group_rows=160),
            UserObjects(module=_Net()),
            epochs=1,
            max_grad_norm=1.0,
        )
        for columns in (_columns(160, (BAD_ROW,)), rest)
    )
    assert (skipped.steps, clean.steps) == (5, 4)
    assert _weights(skipped).equal(_weights(clean))
    # The mean over 128 rows; the bad batch does not count.
    assert skipped.history[0].train_loss == pytest.approx(clean.history[0].train_loss, rel=1e-6)


def test_metrics_leave_out_rows_that_overflowed(runs: Runs) -> None:
    """The summary and its table count the skipped steps."""
    manifest = runs.shards(_columns(160, (BAD_ROW,)), num_files=1)
    module, kept = _Net(), np.arange(160) != BAD_ROW
    result = runs.here(manifest, UserObjects(module=module), metrics=("mse",), learning_rate=1e-7)
    x, y = (torch.from_numpy(values[kept]) for values in _columns(160).values())
    with torch.no_grad():
        # Metrics ignore loss weights.
        expected = (module(x)[:, 0] - y).square().mean().item()
    assert result.history[0].metrics["train_mse"] == pytest.approx(expected, rel=1e-2)
    summary = TrainingSummary.of(result)
    assert summary.skipped_steps == 2
    assert summary.history["skipped_steps"].tolist() == [1, 1]
    assert record(TrainingSummary, json.loads(json.dumps(summary.to_json()))) == summary


def test_a_training_without_a_step_that_holds_is_an_error(runs: Runs) -> None:
    manifest = runs.shards(_columns(64, (0, 32)), num_files=1)
    with pytest.raises(FloatingPointError, match=r"loss is nan .*2 steps were skipped in fp16"):
        runs.here(manifest, UserObjects(module=_Net()), epochs=1)
    # All losses are finite, but the gradients are not.
    columns = _columns(64)
    large = columns | {"y": columns["y"] * 1_000}
    with pytest.raises(FloatingPointError, match=r"all 4 did, at loss scales .* set precision='bf16'"):
        runs.here(large, UserObjects(module=_Net()))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_16_bits_train_nearly_like_fp32(runs: Runs, precision: str, accumulation: int) -> None:
    changes = {"epochs": 8, "gradient_accumulation": accumulation}
    full, half = (
        runs.here(640, UserObjects(module=_Net()), precision=name, **changes) for name in ("fp32", precision)
    )
    loss = full.history[-1].train_loss
    assert loss < 0.1 * full.history[0].train_loss
    assert half.history[-1].train_loss == pytest.approx(loss, rel=0.1)
    assert not _weights(full).equal(_weights(half))
    assert _weights(half).dtype == torch.float32


def test_small_gradients_survive_fp16_by_the_scale() -> None:
    """At 1e-9 of the loss, an unscaled fp16 gradient would be 0."""
    layer = nn.Linear(4, 1)
    rows = torch.randn(8, 4)

    def gradient(precision: str) -> torch.Tensor:
        layer.zero_grad()
        scaler = LossScaler(precision, CPU)
        with autocast("fp16", CPU):
            output = layer(rows)
        scaler.scale(output.float().sum() * 1e-9).backward()  # type: ignore[no-untyped-call]
        scaler.unscale(torch.optim.SGD(layer.parameters()))
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    expected = rows.sum(0, keepdim=True) * 1e-9
    torch.testing.assert_close(gradient("fp16"), expected, rtol=2e-2, atol=1e-11)
    assert not gradient("fp32").any()
