"""Corruption of inputs, and the losses that compare reconstructions with the targets."""

import math

import pytest
import torch

from ringspark.extras.pretraining.corruption import IGNORED, Corruption
from ringspark.extras.pretraining.losses import ReconstructionLoss, TableLoss
from ringspark.extras.pretraining.row_random import normal, row_keys, to_unit, uniform

ROWS = torch.randn(4000, 6, generator=torch.Generator().manual_seed(0))


def corrupt(corruption: Corruption, *inputs: torch.Tensor, step_seed: int = 7) -> tuple[torch.Tensor, ...]:
    (changed, *_), targets = corruption(*inputs, labels=inputs[0], step_seed=step_seed)
    return changed, *targets


@pytest.mark.parametrize("settings", [{"noise": 0.5}, {"mask": 0.25}, {"noise": 0.5, "mask": 0.25}])
def test_a_row_is_corrupted_alike_in_every_batch(settings: dict[str, float]) -> None:
    corruption = Corruption(roles=("value",), **settings)
    whole = corrupt(corruption, ROWS)
    parts = [corrupt(corruption, part) for part in ROWS.split([1, 1500, 2499])]
    for values, found in zip(whole, map(torch.cat, zip(*parts, strict=True)), strict=True):
        assert torch.equal(values.nan_to_num(-9), found.nan_to_num(-9))
    assert not torch.equal(whole[0], corrupt(corruption, ROWS, step_seed=8)[0])


def test_noise_is_standard_normal_and_masks_have_their_share() -> None:
    keys = row_keys([ROWS], 3)
    noise = normal(keys, (6,), 1)
    # Five standard errors of 24,000 numbers.
    assert abs(float(noise.mean())) < 5 / math.sqrt(24_000)
    assert abs(float(noise.var()) - 1) < 5 * math.sqrt(2 / 24_000)
    chosen = (uniform(keys, (6,), 0) < 0.25).float()
    assert abs(float(chosen.mean()) - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 24_000)
    pairs = torch.corrcoef(torch.cat([noise, uniform(keys, (6,), 0)], 1).T) - torch.eye(12)
    assert float(pairs.abs().max()) < 5 / math.sqrt(4000)


def test_no_hash_gives_an_infinite_number() -> None:
    numbers = to_unit(torch.tensor([-1, 0, (1 << 63) - 1, -(1 << 63)]))
    assert bool(((numbers > 0) & (numbers < 1)).all())
    assert bool(torch.erfinv(2 * numbers - 1).isfinite().all())


def test_only_masked_positions_are_replaced_and_have_targets() -> None:
    value = (9.0, 8.0, 7.0, 6.0, 5.0, 4.0)
    changed, target = corrupt(Corruption(roles=("value",), mask=0.25, mask_value=value), ROWS)
    masked = ~target.isnan()
    assert 0 < int(masked.sum()) < masked.numel()
    assert torch.equal(changed, torch.where(masked, torch.tensor(value), ROWS))
    assert torch.equal(target[masked], ROWS[masked])


def test_padding_of_texts_is_neither_masked_nor_compared() -> None:
    ids, real = torch.arange(1, 601).reshape(50, 12), (torch.arange(12) < 9).float().expand(50, 12)
    corruption = Corruption(roles=("value", "valid"), mask=0.5, mask_id=999)
    (changed, kept), (target,) = corruption(ids, real, labels=ids, step_seed=1)
    assert kept is real
    assert torch.equal(changed == 999, target != IGNORED)
    assert torch.equal(changed[:, 9:], ids[:, 9:])
    assert 0.3 < float((changed[:, :9] == 999).float().mean()) < 0.7


def test_a_mask_that_whole_numbers_cannot_hold_is_refused() -> None:
    ids = torch.arange(12).reshape(3, 4)
    with pytest.raises(ValueError, match="an input without a tokenizer has no known mask token; set maskId"):
        Corruption(roles=("value",), mask=0.5)(ids, labels=ids, step_seed=1)
    changed, _ = corrupt(Corruption(roles=("value",), mask=0.5, mask_id=99), ids)
    assert bool((changed == 99).any())
    changed, _ = corrupt(Corruption(roles=("value",), mask=0.5, mask_value=(9.0,) * 4, joins=True), ids)
    assert bool((changed == 9).any())
    with pytest.raises(ValueError, match=r"maskValue 0\.5 is no whole number"):
        Corruption(roles=("value",), mask=0.5, mask_value=0.5, joins=True)(ids, labels=ids, step_seed=1)


def test_several_inputs_become_one_target() -> None:
    inputs = (ROWS[:, 0], ROWS[:, 1:3], torch.arange(len(ROWS)))
    _, (target,) = Corruption(roles=("value",) * 3, joins=True)(*inputs, labels=inputs[0], step_seed=0)
    assert torch.equal(target, torch.cat([ROWS[:, :3], inputs[2][:, None].float()], 1))


def test_a_table_masks_numbers_as_missing_and_ids_as_unknown() -> None:
    numbers, ids = ROWS.clone(), torch.arange(2 * len(ROWS)).reshape(-1, 2) % 7 % 4
    numbers[0] = float("nan")
    corruption = Corruption(roles=("numbers", "ids"), mask=0.5)
    (seen, seen_ids), (target,) = corruption(numbers, ids, labels=numbers, step_seed=2)
    assert torch.equal(seen.isnan(), ~target[:, :6].isnan() | numbers.isnan())
    assert bool(target[0, :6].isnan().all())  # a missing number is no target
    masked = target[:, 6:] != IGNORED
    assert torch.equal(seen_ids, ids.masked_fill(masked, 0))
    assert not bool((ids == 0)[masked].any())  # nor is an unknown category


def test_a_loss_is_the_mean_over_all_positions_with_a_target() -> None:
    _, target = corrupt(Corruption(roles=("value",), mask=0.25), ROWS)
    loss, output = ReconstructionLoss(), torch.zeros_like(ROWS)
    mean = loss(output, target).sum() / loss.row_weights(target).sum()
    assert float(mean) == pytest.approx(float(target[~target.isnan()].square().mean()), rel=1e-6)


def test_a_missing_target_gives_no_gradient() -> None:
    output = torch.zeros(2, 2, requires_grad=True)
    ReconstructionLoss()(output, torch.tensor([[1.0, math.nan], [math.nan, 2.0]])).sum().backward()
    assert output.grad.tolist() == [[-2.0, 0.0], [0.0, -4.0]]


def test_ids_need_logits() -> None:
    ids = torch.tensor([[1, 2, IGNORED]])
    logits = torch.zeros(1, 3, 4)
    assert float(ReconstructionLoss()(logits, ids)) == pytest.approx(2 * math.log(4))
    assert ReconstructionLoss().row_weights(ids).tolist() == [2.0]
    with pytest.raises(ValueError, match="cast the column to double"):
        ReconstructionLoss()(torch.zeros(1, 3), ids)


def test_a_guess_of_a_category_costs_one() -> None:
    loss, target = TableLoss(1, [5, 3]), torch.tensor([[math.nan, 2.0, 1.0], [0.5, IGNORED, IGNORED]])
    assert loss(torch.zeros(2, 9), target).tolist() == pytest.approx([2.0, 0.25])
    assert loss.row_weights(target).tolist() == [2.0, 1.0]
    # Members of an ensemble count equally.
    assert loss(torch.zeros(2, 3, 9), target).tolist() == pytest.approx([2.0, 0.25])
