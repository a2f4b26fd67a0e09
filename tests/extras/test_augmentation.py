"""Image augmentation differs per row, repeats with the seed, and is off in evaluation."""

import pytest
import torch
from torch import nn

from ringspark.extras.augmentation import RandomCrop, RandomHorizontalFlip

IMAGES = torch.arange(64 * 2 * 5 * 6, dtype=torch.float32).reshape(64, 2, 5, 6)


def test_a_row_is_mirrored_or_left_alone() -> None:
    torch.manual_seed(0)
    changed = RandomHorizontalFlip(0.25)(IMAGES)
    mirrored = [torch.equal(new, old.flip(-1)) for new, old in zip(changed, IMAGES, strict=True)]
    same = [torch.equal(new, old) for new, old in zip(changed, IMAGES, strict=True)]
    assert all(a != b for a, b in zip(mirrored, same, strict=True))
    assert 4 < sum(mirrored) < 32
    assert torch.equal(RandomHorizontalFlip(0)(IMAGES), IMAGES)
    assert torch.equal(RandomHorizontalFlip(1)(IMAGES), IMAGES.flip(-1))


@pytest.mark.parametrize("mode", ["reflect", "constant"])
def test_a_crop_is_a_cut_of_the_padded_image(mode: str) -> None:
    torch.manual_seed(0)
    changed = RandomCrop(2, mode)(IMAGES)
    assert changed.shape == IMAGES.shape
    places = set()
    for new, old in zip(changed, IMAGES, strict=True):
        padded = nn.functional.pad(old[None], [2] * 4, mode=mode)[0]
        cuts = {(i, j): padded[:, i : i + 5, j : j + 6] for i in range(5) for j in range(5)}
        (place,) = (place for place, cut in cuts.items() if torch.equal(cut, new))
        places.add(place)
    assert len(places) > 15  # of 25


def test_several_are_seeded_and_do_nothing_in_evaluation() -> None:
    both = nn.Sequential(RandomCrop(1), RandomHorizontalFlip())
    torch.manual_seed(3)
    first = both(IMAGES)
    torch.manual_seed(3)
    assert torch.equal(both(IMAGES), first)
    assert not torch.equal(both(IMAGES), first)
    assert both.eval()(IMAGES) is IMAGES
    assert both.train()(IMAGES[:0]).shape == (0, 2, 5, 6)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="p of RandomHorizontalFlip must be from 0 to 1, got 2"):
        RandomHorizontalFlip(2)
    with pytest.raises(ValueError, match="padding of RandomCrop must be at least 1, got 0"):
        RandomCrop(0)
