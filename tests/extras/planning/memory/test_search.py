"""The search suggests settings that fit, cheapest first, and reports a budget that nothing fits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from measured_step import TRANSFORMER, compare, draw_columns
from torch import nn

from ringspark.estimators import plan_memory
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.settings.byte_sizes import parse_bytes, show_bytes
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.planning.memory.search import find_settings
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


@pytest.mark.slow
def test_the_suggestion_fits_when_it_is_measured() -> None:
    rows = 16
    _, measured = compare(TRANSFORMER, rows)
    torch.manual_seed(0)
    plan = plan_memory(TRANSFORMER, draw_columns(TRANSFORMER, rows), budget=measured * 2 // 3)
    keys = ("precision", "gradientCheckpointing", "gradientAccumulation", "activationCompression")
    first = plan.suggest[0]
    changed = {key: first.settings[key] for key in keys}
    assert compare(TRANSFORMER, rows, **changed)[1] <= measured * 2 // 3


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


DEFAULTS = config(num_workers=2)
NAMES = (
    "sync",
    "gradient_accumulation",
    "gradient_checkpointing",
    "activation_compression",
    "activation_offload",
    "precision",
)


def changes(other: TrainConfig, base: TrainConfig = DEFAULTS) -> dict[str, Any]:
    return {name: getattr(other, name) for name in NAMES if getattr(other, name) != getattr(base, name)}


def less_for(**savings: int) -> Callable[[TrainConfig], int]:
    """Returns a peak of 100 minus the given bytes for each changed setting."""
    return lambda tried: 100 - sum(savings.get(name, 0) for name in changes(tried))


def test_one_change_each_is_suggested_in_the_order_of_the_ladder() -> None:
    peak_of = less_for(activation_offload=50, gradient_accumulation=50, sync=10, gradient_checkpointing=50)
    found, least = find_settings(DEFAULTS, 64, peak_of, budget=50)
    assert least is None
    assert [changes(other) for other in found] == [
        {"gradient_accumulation": 2},
        {"gradient_checkpointing": "sqrt"},
        {"activation_offload": "disk"},
    ]


def test_rungs_are_taken_together_and_those_that_are_not_needed_are_taken_back() -> None:
    peak_of = less_for(sync=10, gradient_checkpointing=40, activation_compression=20)
    found, _ = find_settings(DEFAULTS, 64, peak_of, budget=50)
    assert [changes(other) for other in found] == [{"sync": Zero(stage=1), "gradient_checkpointing": "sqrt"}]
    found, _ = find_settings(DEFAULTS, 64, peak_of, budget=40)
    assert [changes(other) for other in found] == [
        {"gradient_checkpointing": "sqrt", "activation_compression": "bits"}
    ]


def test_16_bits_are_suggested_only_where_no_exact_setting_fits() -> None:
    peak_of = less_for(precision=60, sync=20, activation_offload=20)
    assert [changes(other) for other in find_settings(DEFAULTS, 64, peak_of, 60)[0]] == [
        {"sync": Zero(stage=1), "activation_offload": "disk"}
    ]
    assert [changes(other) for other in find_settings(DEFAULTS, 64, peak_of, 40)[0]] == [
        {"precision": "bf16"}
    ]


def test_settings_that_refuse_each_other_are_tried_one_without_the_other() -> None:
    def peak_of(tried: TrainConfig) -> int:
        return (
            100
            - 10 * (tried.sync.sharding == "parameters")
            - 30 * (tried.activation_offload == "disk")
            - (20 * (tried.gradient_checkpointing == "all"))
        )

    found, _ = find_settings(DEFAULTS, 64, peak_of, budget=50)
    assert [changes(other) for other in found] == [
        {"gradient_checkpointing": "all", "activation_offload": "disk"}
    ]


def tried_by(base: TrainConfig, rows: int) -> list[TrainConfig]:
    """Returns every configuration that the search tries when each change lowers the peak but none fits."""
    asked: list[TrainConfig] = []

    def peak_of(tried: TrainConfig) -> int:
        asked.append(tried)
        return 1_000 - len(asked)

    found, least = find_settings(base, rows, peak_of, budget=1)
    assert found == []
    assert least is not None
    return asked


def test_only_what_training_accepts_is_tried() -> None:
    horovod = tried_by(config(num_workers=2, collective="horovod"), rows=2)
    assert {c.sync.sharding for c in horovod} == {"none", "optimizer", "gradients"}
    assert {c.gradient_accumulation for c in horovod} == {1, 2}
    alone = tried_by(config(), rows=2)
    assert {c.sync.sharding for c in alone} == {"none"}
    assert {c.activation_offload for c in alone} == {"none", "disk"}


def test_lossy_codecs_are_never_tried() -> None:
    assert {c.activation_compression for c in tried_by(config(), rows=64)} == {"none", "bits"}


def test_what_the_user_chose_is_not_weakened() -> None:
    chosen = config(
        num_workers=2,
        gradient_checkpointing="7",
        precision="fp16",
        gradient_accumulation=4,
        sync=Zero(stage=2),
        activation_compression="int8",
    )
    for tried in tried_by(chosen, rows=64):
        assert tried.gradient_checkpointing == "7"
        assert tried.precision == "fp16"
        assert tried.gradient_accumulation in (4, 8, 16, 64)
        assert tried.sync.sharding == "gradients"
        assert tried.activation_compression == "int8"


def test_settings_that_do_not_suit_the_network_are_not_taken_further() -> None:
    def peak_of(tried: TrainConfig) -> int | None:
        return None if tried.gradient_checkpointing != "none" else less_for(activation_offload=10)(tried)

    found, least = find_settings(DEFAULTS, 64, peak_of, budget=1)
    assert found == []
    assert least is not None
    assert changes(least) == {"activation_offload": "disk"}
    assert find_settings(DEFAULTS, 64, lambda tried: 10, budget=1) == ([], None)


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
