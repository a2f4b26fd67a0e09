"""Suggestions fit, the cheap ones come first, and a budget that nothing fits is said to be one."""

from typing import Any

import pytest
import torch
from torch import nn

from ringspark.estimators import plan_memory
from ringspark.estimators.memory.search import candidates, cheapest
from ringspark.estimators.memory.sizes import parse_bytes, show_bytes
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.models import ModelSpec

NET = ModelSpec("mlp", {"in_features": 8, "hidden": [64] * 9, "out_features": 3})
BATCH = (((2048, 8), "float32"), ((2048,), "int64"))


def config(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {"input_columns": ("x",), "label_columns": ("y",), "collective": "torch"}
    return TrainConfig(shards_uri="", run_uri="", batch_size=4096, **values | changes)


def test_every_suggestion_fits_the_budget() -> None:
    plan = plan_memory(NET, BATCH)
    held = plan_memory(NET, BATCH, budget=plan.peak // 2)
    assert not held.fits
    assert 1 <= len(held.suggest) <= 3
    for other in held.suggest:
        assert other.peak <= plan.peak // 2
        keys = "precision gradientCheckpointing gradientAccumulation activationOffload activationCompression"
        settings: Any = {key: other.settings[key] for key in keys.split()}
        assert plan_memory(NET, BATCH, **settings).peak == other.peak


def test_the_suggestion_fits_when_it_is_measured(benchmark_step: Any) -> None:
    rows = 16
    plain = benchmark_step.Case(model=benchmark_step.TRANSFORMER)
    _, measured = benchmark_step.compare(plain, rows)
    torch.manual_seed(0)
    plan = plan_memory(benchmark_step.TRANSFORMER, plain.columns(rows), budget=measured * 2 // 3)
    keys = ("precision", "gradientCheckpointing", "gradientAccumulation", "activationCompression")
    first = plan.suggest[0]
    changed = benchmark_step.Case(
        model=benchmark_step.TRANSFORMER, settings={key: first.settings[key] for key in keys}
    )
    assert benchmark_step.compare(changed, rows)[1] <= measured * 2 // 3


def test_a_plan_that_fits_suggests_nothing() -> None:
    plan = plan_memory(NET, BATCH, budget="1g")
    assert plan.fits
    assert plan.suggest == ()
    assert plan.verdict == "fits the budget of 1.0 GiB"


def test_a_budget_below_the_parameters_is_said_to_be_out_of_reach() -> None:
    plan = plan_memory(NET, BATCH, budget=4 * 64 * 64)
    assert plan.suggest == ()
    assert "and no settings fit: " in plan.verdict
    assert "still needs" in plan.verdict


def test_a_network_without_blocks_gets_other_suggestions() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 512), nn.Linear(512, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    plan = plan_memory(Flat(), BATCH)
    held = plan_memory(Flat(), BATCH, budget=plan.peak * 3 // 4)
    assert held.suggest
    assert {other.settings["gradientCheckpointing"] for other in held.suggest} == {"none"}


def test_exact_settings_come_before_lossy_ones_and_cheap_ones_before_dear_ones() -> None:
    ordered = candidates(config(num_workers=2), rows=64)
    assert [c.lossy for c in ordered] == sorted(c.lossy for c in ordered)
    for lossy in (False, True):
        costs = [c.slowdown for c in ordered if c.lossy is lossy]
        assert costs == sorted(costs)
    assert {c.config.precision for c in ordered if not c.lossy} == {"fp32"}


def test_only_what_training_accepts_is_a_candidate() -> None:
    horovod = candidates(config(num_workers=2, collective="horovod"), rows=2)
    assert all(c.config.sharding != "parameters" for c in horovod)
    assert all(c.config.gradient_accumulation <= 2 for c in horovod)
    alone = candidates(config(), rows=2)
    assert {c.config.sharding for c in alone} == {"none"}
    assert all(c.config.activation_offload != "host" for c in alone)


def test_what_the_user_chose_is_not_weakened() -> None:
    chosen = config(gradient_checkpointing="all", precision="bf16", gradient_accumulation=4)
    for candidate in candidates(chosen, rows=64):
        assert candidate.config.gradient_checkpointing == "all"
        assert candidate.config.precision == "bf16"
        assert candidate.config.gradient_accumulation >= 4


def test_no_suggestion_contains_another() -> None:
    ordered = candidates(config(), rows=64)
    fitting, least = cheapest(ordered, lambda c: 0, budget=1)
    assert least is None
    assert len(fitting) == 3
    assert all(not a.at_least(b) for a in fitting for b in fitting if a is not b)


def test_settings_that_do_not_suit_the_network_are_never_combined() -> None:
    asked: list[TrainConfig] = []

    def peak_of(candidate: TrainConfig) -> int | None:
        asked.append(candidate)
        return None if candidate.gradient_checkpointing != "none" else 10

    fitting, least = cheapest(candidates(config(), rows=64), peak_of, budget=1)
    assert fitting == []
    assert least is not None
    assert sum(c.gradient_checkpointing != "none" for c in asked) == 2


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (5, 5),
        ("5", 5),
        ("4g", 4 << 30),
        ("1.5k", 1536),
        ("512M", 512 << 20),
        ("2gb", 2 << 30),
        ("1 GiB", 1 << 30),
    ],
)
def test_sizes_are_read_as_spark_reads_them(text: int | str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "g", "4x", "-4g", "0", 0, -1])
def test_other_sizes_are_refused(text: int | str) -> None:
    with pytest.raises(ValueError, match="budget must be"):
        parse_bytes(text)


def test_sizes_are_shown_in_the_unit_that_fits() -> None:
    assert [show_bytes(n) for n in (12, 1536, 5 << 20, 6.1 * 2**30)] == [
        "12 B",
        "1.5 KiB",
        "5.0 MiB",
        "6.1 GiB",
    ]
