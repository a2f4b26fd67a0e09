"""The search suggests settings that fit, cheapest first; `memoryBudget` fails before a gang starts."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_networks import Net
from small_training import bare_config, columns_of, config_of
from torch import nn

from ringspark.estimators import TorchEstimator, plan_memory
from ringspark.estimators.options.sync import Zero
from ringspark.estimators.training.settings.byte_sizes import parse_bytes, show_bytes
from ringspark.estimators.training.settings.config import TrainConfig, UserObjects
from ringspark.extras.planning.memory.columns import shard_columns
from ringspark.extras.planning.memory.plan import Planner, check_budget
from ringspark.extras.planning.memory.search import find_settings
from ringspark.models import ModelSpec

NET = ModelSpec("mlp", {"in_features": 8, "hidden": [64] * 9, "out_features": 3})
BATCH = (((2048, 8), "float32"), ((2048,), "int64"))


def config(**changes: Any) -> TrainConfig:
    return bare_config(**{"batch_size": 4096, "collective": "torch"} | changes)


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
    layers = {"a": nn.Linear(8, 512), "b": nn.Linear(512, 3)}
    flat = Net(lambda self, x: self.b(torch.tanh(self.a(x))), **layers)
    plan = plan_memory(flat, BATCH)
    held = plan_memory(flat, BATCH, budget=plan.peak * 3 // 4)
    assert held.suggest
    assert {other.settings["gradientCheckpointing"] for other in held.suggest} == {"none"}


DEFAULTS = config(num_workers=2)
NAMES = ("sync", "gradient_accumulation", "gradient_checkpointing", "activation_compression")
NAMES += ("activation_offload", "precision")


def changes(other: TrainConfig, base: TrainConfig = DEFAULTS) -> dict[str, Any]:
    return {name: getattr(other, name) for name in NAMES if getattr(other, name) != getattr(base, name)}


def less_for(**savings: int) -> Callable[[TrainConfig], int]:
    """Returns a peak of 100 minus the given bytes for each changed setting."""
    return lambda tried: 100 - sum(savings.get(name, 0) for name in changes(tried))


def found_by(peak_of: Callable[[TrainConfig], int], budget: int) -> list[dict[str, Any]]:
    return [changes(other) for other in find_settings(DEFAULTS, 64, peak_of, budget)[0]]


def test_one_change_each_is_suggested_in_the_order_of_the_ladder() -> None:
    peak_of = less_for(activation_offload=50, gradient_accumulation=50, sync=10, gradient_checkpointing=50)
    assert find_settings(DEFAULTS, 64, peak_of, budget=50)[1] is None
    assert found_by(peak_of, 50) == [
        {"gradient_accumulation": 2},
        {"gradient_checkpointing": "sqrt"},
        {"activation_offload": "disk"},
    ]


def test_rungs_are_taken_together_and_those_that_are_not_needed_are_taken_back() -> None:
    peak_of = less_for(sync=10, gradient_checkpointing=40, activation_compression=20)
    assert found_by(peak_of, 50) == [{"sync": Zero(stage=1), "gradient_checkpointing": "sqrt"}]
    assert found_by(peak_of, 40) == [{"gradient_checkpointing": "sqrt", "activation_compression": "bits"}]


def test_16_bits_are_suggested_only_where_no_exact_setting_fits() -> None:
    peak_of = less_for(precision=60, sync=20, activation_offload=20)
    assert found_by(peak_of, 60) == [{"sync": Zero(stage=1), "activation_offload": "disk"}]
    assert found_by(peak_of, 40) == [{"precision": "bf16"}]


def test_settings_that_refuse_each_other_are_tried_one_without_the_other() -> None:
    def peak_of(tried: TrainConfig) -> int:
        shards, offloads = tried.sync.sharding == "parameters", tried.activation_offload == "disk"
        return 100 - 10 * shards - 30 * offloads - 20 * (tried.gradient_checkpointing == "all")

    assert found_by(peak_of, 50) == [{"gradient_checkpointing": "all", "activation_offload": "disk"}]


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
    chosen = {"gradient_checkpointing": "7", "precision": "fp16", "activation_compression": "int8"}
    base = config(num_workers=2, gradient_accumulation=4, sync=Zero(stage=2), **chosen)
    for tried in tried_by(base, rows=64):
        assert {name: getattr(tried, name) for name in chosen} == chosen
        assert tried.gradient_accumulation in (4, 8, 16, 64)
        assert tried.sync.sharding == "gradients"


def test_settings_that_do_not_suit_the_network_are_not_taken_further() -> None:
    def peak_of(tried: TrainConfig) -> int | None:
        return None if tried.gradient_checkpointing != "none" else less_for(activation_offload=10)(tried)

    found, least = find_settings(DEFAULTS, 64, peak_of, budget=1)
    assert found == []
    assert least is not None
    assert changes(least) == {"activation_offload": "disk"}
    assert find_settings(DEFAULTS, 64, lambda tried: 10, budget=1) == ([], None)


def test_sizes_are_read_as_spark_reads_them() -> None:
    sizes = {5: 5, "5": 5, "4g": 4 << 30, "1.5k": 1536, "512M": 512 << 20, "2gb": 2 << 30, "1 GiB": 1 << 30}
    assert {text: parse_bytes(text) for text in sizes} == sizes


@pytest.mark.parametrize("text", ["", "g", "4x", "-4g", "0", 0, -1])
def test_other_sizes_are_refused(text: int | str) -> None:
    with pytest.raises(ValueError, match="budget must be"):
        parse_bytes(text)


def test_sizes_are_shown_in_the_unit_that_fits() -> None:
    shown = [show_bytes(n) for n in (12, 1536, 5 << 20, 6.1 * 2**30)]
    assert shown == ["12 B", "1.5 KiB", "5.0 MiB", "6.1 GiB"]


WIDE = ModelSpec("mlp", {"in_features": 2, "hidden": [64] * 3, "out_features": 1})


def fit(spark: Any, folder: Path, **params: Any) -> Any:
    frame = spark.range(64).selectExpr("array(double(id), -double(id)) as features", "double(id) as label")
    return TorchEstimator(**params, storageUri=str(folder), showProgress=False).fit(frame)


def test_the_budget_is_kept_in_bytes() -> None:
    assert TorchEstimator().getMemoryBudget() is None
    assert TorchEstimator(memoryBudget="4g").getMemoryBudget() == 4 << 30
    assert TorchEstimator().setMemoryBudget(1000).getMemoryBudget() == 1000
    with pytest.raises(ValueError, match="memoryBudget must be bytes"):
        TorchEstimator(memoryBudget="four")


@pytest.mark.spark
def test_fit_refuses_what_does_not_fit_and_names_what_would(spark: Any, tmp_path: Path) -> None:
    sentence = (
        r"training needs \d\.\d MiB per worker, memoryBudget is 1\.0 MiB; "
        r"gradientAccumulation=\d+ needs [\d.]+ [KM]iB"
    )
    with pytest.raises(ValueError, match=sentence):
        fit(spark, tmp_path, model=WIDE, batchSize=4096, numWorkers=2, memoryBudget="1m")
    assert not list(tmp_path.glob("run-*"))


@pytest.mark.spark
def test_a_network_that_cannot_be_judged_is_trained_with_a_warning(spark: Any, tmp_path: Path) -> None:
    branches = Net(lambda self, x: self.layer(x if x.sum() > 0 else -x), layer=nn.Linear(2, 1))
    # pytest.warns would raise Spark's unclosed-socket warnings again without the module name for the
    # filters.
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(spark, tmp_path, model=branches, batchSize=32, learningRate=1e-6, memoryBudget="4g")
    said = [str(entry.message) for entry in seen if entry.category is UserWarning]
    (sentence,) = [text for text in said if "memoryBudget" in text]
    assert sentence.startswith("memoryBudget 4.0 GiB could not be checked: model Net does not run")


@pytest.mark.parametrize(("workers", "share"), [({}, 1.0), ({"num_workers": 2, "sync": Zero(stage=1)}, 0.5)])
def test_the_copy_for_a_checkpoint_counts_if_needed(make_shards: Any, workers: Any, share: float) -> None:
    """The budget lies between the memory of a step and this memory with the copy."""
    manifest = make_shards(columns_of(64, 2))
    base = {"model": WIDE, "collective": "torch", "checkpoint_every_seconds": 0.0, **workers}
    made, objects = config_of(manifest, Path("run"), **base), UserObjects()
    plan = Planner(made, objects, *shard_columns(made, manifest, made.most_rows)).plan()
    weights = sum(parameter.nbytes for parameter in WIDE.build().parameters())
    assert plan.checkpoint == pytest.approx(3 * weights * share, rel=0.2)
    budget = plan.peak + plan.checkpoint // 2
    for without in (made, replace(made, checkpoint_every_steps=1, use_gpu=True)):
        check_budget(without, objects, manifest, budget)
    for on in ({"steps": 1}, {"epochs": 1}, {"seconds": 600.0}):
        counts: Any = {f"checkpoint_every_{unit}": number for unit, number in on.items()}
        with pytest.raises(ValueError, match="memoryBudget is"):
            check_budget(replace(made, **counts), objects, manifest, budget)
