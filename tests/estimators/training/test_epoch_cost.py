"""Cost of an epoch: rows per second, bytes, operations and energy; None if unknown."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from short_sync import sync_of
from small_training import Runs, train_ranks
from torch import nn

from ringspark.estimators.collectives.local_collective import LocalCollective
from ringspark.estimators.stages.summary import TrainingSummary
from ringspark.estimators.training.observation.epoch_meter import PEAKS, FlopCount, RaplEnergy, peak_flops
from ringspark.estimators.training.worker import train_worker
from ringspark.models import ModelSpec, apply_activation_checkpoint

ROWS = 803
SPEC = ModelSpec("mlp", {"in_features": 4, "hidden": [16, 16], "out_features": 1})
SETTINGS = {"model": SPEC}
# 2 operations per weight each for the forward pass, the weight gradients and the input gradients. The first
# layer needs no input gradients.
FLOPS_A_ROW = 2 * 3 * (4 * 16 + 16 * 16 + 16) - 2 * 4 * 16


@pytest.mark.distributed
@pytest.mark.parametrize("sharding", ["none", pytest.param("parameters", marks=pytest.mark.slow)])
def test_a_gang_counts_the_bytes_and_operations_of_all_ranks(runs: Runs, sharding: str) -> None:
    config = runs.config(ROWS, num_workers=2, collective="torch", sync=sync_of(sharding=sharding))
    results = train_ranks(config)
    sent = []
    for record in results[0].history:
        cost = record.cost
        assert cost is not None
        assert 0 < cost.training_seconds <= record.seconds
        assert cost.flops == ROWS * FLOPS_A_ROW
        assert cost.flops_utilization is None  # the peak rate of a CPU is unknown
        sent.append(cost.bytes_sent)
    # The total also includes the initial weights and the all-reduces at the end of each epoch.
    assert sent[1] > 26 * 2 * 4 * sum(p.numel() for p in SPEC.build().parameters())
    assert sum(sent) <= sum(result.bytes_sent for result in results)
    row = TrainingSummary.of(results[0]).history.iloc[1]
    assert row.rows_per_second == pytest.approx(ROWS / row.training_seconds)
    assert row.flops_per_second == pytest.approx(row.flops / row.training_seconds)


def test_an_epoch_that_was_resumed_has_no_bytes(runs: Runs) -> None:
    config = runs.check(ROWS, epochs=1, checkpoint_every_steps=10)
    # The checkpoint of step 20 stays; only `fit` removes it.
    first, second = (train_worker(config, LocalCollective()) for _ in range(2))
    assert second.resumed_steps == (20,)
    whole, rest = first.history[0].cost, second.history[0].cost
    assert whole is not None
    assert rest is not None
    assert (whole.bytes_sent, rest.bytes_sent, rest.energy_joules) == (0, None, None)
    assert rest.flops == whole.flops == ROWS * FLOPS_A_ROW


def test_what_is_computed_again_is_not_counted_and_nothing_changes() -> None:
    x = torch.randn(8, 10, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for counts, recomputes in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        network = nn.Sequential(layer, nn.Conv1d(10, 3, 5), nn.Flatten(), nn.Linear(84, 1))
        if recomputes:
            apply_activation_checkpoint(network, "all")
        count = FlopCount()
        with count if counts else nullcontext():
            network(x).square().sum().backward()
        found.append((count.flops, [p.grad for p in network.parameters()]))
    off, on, again = found
    assert off[0] == 0
    assert on[0] == again[0] > 0
    for other in (on, again):
        assert all(map(torch.equal, off[1], other[1]))


def test_attention_on_a_cpu_is_seven_matrix_products() -> None:
    """Two in the forward pass and five in the backward pass; torch's table has only the kernels of GPUs."""
    values = [torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3)]
    with FlopCount() as count:
        nn.functional.scaled_dot_product_attention(*values).sum().backward()
    assert count.flops == 7 * 2 * (2 * 4 * 16 * 16 * 8)


def test_a_peak_is_known_of_listed_devices_alone() -> None:
    known = {("NVIDIA A100-SXM4-80GB", "bf16"): 312e12, ("NVIDIA L4", "fp32"): 30.3e12}
    unknown = [("NVIDIA L40", "fp32"), ("Tesla T4", "bf16"), ("", "fp32")]
    for names, peak in {**known, **dict.fromkeys(unknown)}.items():
        assert peak_flops(*names) == peak
    assert all(single < half for _, single, half in PEAKS)


def test_energy_is_that_of_packages_and_their_memory_also_when_a_counter_begins_anew(tmp_path: Path) -> None:
    """Writes the files as Linux shows them, because the test machine has none."""
    zones = {
        "intel-rapl:0": ("package-0", 900),
        "intel-rapl:0:0": ("core", 500),
        "intel-rapl:0:1": ("dram", 100),
        "intel-rapl-mmio:0": ("package-0", 900),
    }
    for folder, (name, energy) in zones.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "name").write_text(f"{name}\n")
        (tmp_path / folder / "energy_uj").write_text(f"{energy}\n")
        (tmp_path / folder / "max_energy_range_uj").write_text("1000\n")
    energy = RaplEnergy(tmp_path)
    assert energy.joules() == 0
    for folder, now in (("intel-rapl:0", 50), ("intel-rapl:0:0", 700), ("intel-rapl:0:1", 130)):
        (tmp_path / folder / "energy_uj").write_text(f"{now}\n")
    assert energy.joules() == pytest.approx((150 + 30) / 1e6)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("250\n")
    assert energy.joules() == pytest.approx((350 + 30) / 1e6)


def test_a_machine_that_says_nothing_has_no_energy(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no zone of a package"):
        RaplEnergy(tmp_path)
