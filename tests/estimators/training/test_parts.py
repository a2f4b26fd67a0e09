"""The small parts of the training room, each against torch or against its definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ringspark.estimators.training.checkpoint import WEIGHTS, load_checkpoint, read_info, save_checkpoint
from ringspark.estimators.training.feed import to_batch, to_tensor
from ringspark.estimators.training.losses import LOSSES, default_loss, from_user
from ringspark.estimators.training.optimizers import OPTIMIZERS, make_optimizer
from ringspark.estimators.training.schedules import SCHEDULES

CPU = torch.device("cpu")

REFERENCES = {
    "cross_entropy": (torch.randn(7, 3), torch.randint(0, 3, (7,)), nn.CrossEntropyLoss()),
    "cross_entropy_per_member": (torch.randn(7, 3), torch.randint(0, 3, (7,)), nn.CrossEntropyLoss()),
    "bce_with_logits_per_member": (
        torch.randn(7, 1),
        torch.randint(0, 2, (7,)).float(),
        nn.BCEWithLogitsLoss(),
    ),
    "bce_with_logits": (torch.randn(7, 1), torch.randint(0, 2, (7,)).float(), nn.BCEWithLogitsLoss()),
    "mse_per_member": (torch.randn(7, 1), torch.randn(7), nn.MSELoss()),
    "mse": (torch.randn(7, 1), torch.randn(7), nn.MSELoss()),
    "l1": (torch.randn(7, 2), torch.randn(7, 2), nn.L1Loss()),
    "huber": (torch.randn(7), torch.randn(7), nn.HuberLoss()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_of_the_row_losses_is_torchs_loss(name: str) -> None:
    output, label, reference = REFERENCES[name]
    rows = LOSSES[name](output, label)
    assert rows.shape == (7,)
    expected = reference(
        output.squeeze(-1) if output.dim() > label.dim() and not name.startswith("cross_entropy") else output,
        label,
    )
    torch.testing.assert_close(rows.mean(), expected)


@pytest.mark.parametrize("name", ["cross_entropy_per_member", "bce_with_logits_per_member"])
def test_members_are_held_against_the_label_one_by_one(name: str) -> None:
    _, label, _ = REFERENCES[name]
    members = [torch.randn(7, 3 if name.startswith("cross") else 1) for _ in range(4)]
    together = LOSSES[name](torch.stack(members, dim=1), label)
    apart = torch.stack([LOSSES[name](member, label) for member in members]).mean(0)
    torch.testing.assert_close(together, apart)


def test_labels_of_a_row_loss_keep_their_row() -> None:
    """(batch, 1) outputs against (batch,) labels must not broadcast to (batch, batch)."""
    rows = LOSSES["mse"](torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 4.0]))
    assert rows.tolist() == [0.0, 4.0]


def test_outputs_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"output and label of one shape, got \(4, 3, 1\) and \(4,\)"):
        LOSSES["mse"](torch.zeros(4, 3, 1), torch.zeros(4))
    with pytest.raises(ValueError, match="output and label of one shape"):
        LOSSES["mse"](torch.zeros(4, 1), torch.zeros(4, 2))
    assert LOSSES["mse"](torch.ones(4), torch.zeros(4, 1)).tolist() == [1.0] * 4


def test_a_class_loss_takes_sparks_double_labels() -> None:
    output, label = torch.randn(5, 3), torch.tensor([0.0, 1.0, 2.0, 1.0, 0.0])
    expected = nn.functional.cross_entropy(output, label.long(), reduction="none")
    torch.testing.assert_close(from_user(nn.CrossEntropyLoss())(output, label), expected)


def test_a_users_loss_instance_loses_its_reduction_but_is_not_changed() -> None:
    loss = nn.SmoothL1Loss()
    rows = from_user(loss)(torch.zeros(3), torch.tensor([0.0, 1.0, 2.0]))
    assert rows.tolist() == [0.0, 0.5, 1.5]
    assert loss.reduction == "mean"


def test_a_users_loss_with_one_number_for_all_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss must return one value per row, shape \(3,\), got \(\)"):
        from_user(lambda output, label: (output - label).mean())(torch.zeros(3), torch.zeros(3))


def test_default_losses() -> None:
    assert default_loss("classification", 1) == "bce_with_logits"
    assert default_loss("classification", 3) == "cross_entropy"
    assert default_loss("regression", 1) == default_loss("any", 4) == "mse"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_lowers_a_quadratic(name: str) -> None:
    parameter = nn.Parameter(torch.tensor([3.0]))
    optimizer = make_optimizer(name, [parameter], learning_rate=0.05, weight_decay=0.0)
    assert optimizer.param_groups[0]["lr"] == 0.05
    for _ in range(100):
        optimizer.zero_grad()
        (parameter**2).sum().backward()
        optimizer.step()
    assert abs(parameter.item()) < 1.0


def test_an_unknown_optimizer_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"got 'adamv'; did you mean 'adam"):
        make_optimizer("adamv", [], 0.1, 0.0)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_steps", [1, 2, 7, 1000])
def test_factors_stay_between_zero_and_one(name: str, num_steps: int) -> None:
    factors = [SCHEDULES[name](step, num_steps) for step in range(num_steps)]
    assert all(0.0 <= f <= 1.0 for f in factors)
    assert max(factors) > 0


def test_one_cycle_agrees_with_torchs() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    steps = 100
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=steps, cycle_momentum=False
    )
    for step in range(steps):
        # torch ends its rise one step earlier; beyond that the two are the same curve.
        assert SCHEDULES["one_cycle"](step, steps) == pytest.approx(scheduler.get_last_lr()[0], abs=0.04)
        optimizer.step()
        scheduler.step()


def test_integers_stay_exact_and_floats_become_fp32() -> None:
    ids = np.array([16_777_217, -(2**53) - 1], dtype=np.int64)
    assert to_tensor(ids, CPU).tolist() == ids.tolist()
    assert to_tensor(np.array([100], dtype=np.int8), CPU).dtype == torch.int64
    assert to_tensor(np.array([0.5], dtype=np.float64), CPU).dtype == torch.float32
    assert to_tensor(np.array([True, False]), CPU).tolist() == [1.0, 0.0]


def test_micro_batches_hold_every_row_once_and_none_is_empty() -> None:
    columns = {"x": np.arange(10, dtype=np.float32).reshape(5, 2), "y": np.arange(5), "w": np.ones(5)}
    batch = to_batch(columns, ["x"], "y", "w", CPU)
    parts = batch.split(3)
    assert [p.num_rows for p in parts] == [2, 2, 1]
    assert torch.cat([p.inputs[0] for p in parts]).equal(batch.inputs[0])
    assert torch.cat([p.weight for p in parts if p.weight is not None]).equal(batch.weight)
    assert len(batch.split(9)) == 5


def test_a_checkpoint_gives_the_weights_back(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, other = nn.Linear(3, 2), nn.Linear(3, 2)
    info = save_checkpoint(str(tmp_path / "c"), module, epoch=2, step=5)
    assert load_checkpoint(str(tmp_path / "c"), other) == info
    assert info.epoch == 2
    assert info.step == 5
    assert all(a.equal(b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def tied() -> nn.ModuleDict:
        module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        module["b"].weight = module["a"].weight
        return module

    saved, loaded = tied(), tied()
    save_checkpoint(str(tmp_path / "c"), saved)
    load_checkpoint(str(tmp_path / "c"), loaded)
    assert loaded["a"].weight is loaded["b"].weight
    assert loaded["a"].weight.equal(saved["a"].weight)


def test_a_folder_without_checkpoint_a_damaged_one_and_a_foreign_one_are_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "c")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        read_info(uri)
    save_checkpoint(uri, nn.Linear(3, 2))
    with pytest.raises(ValueError, match="is not of this model"):
        load_checkpoint(uri, nn.Linear(4, 2))
    weights = tmp_path / "c" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ValueError, match="the file is damaged"):
        load_checkpoint(uri, nn.Linear(3, 2))
