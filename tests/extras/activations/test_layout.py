"""Tensors return from flat memory with their strides; only dense tensors count as dense."""

from __future__ import annotations

import pytest
import torch

from ringspark.extras.activations.hooks import Density, density, flatten_memory, flatten_values

BASE = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
CASES: dict[str, tuple[torch.Tensor, Density]] = {
    "contiguous": (BASE, "dense"),
    "permuted": (BASE.permute(3, 0, 2, 1), "dense"),
    "channels last": (BASE.contiguous(memory_format=torch.channels_last), "dense"),
    "one row": (BASE[1], "dense"),
    "size one": (BASE[:, :, :, :1].contiguous(), "dense"),
    "slice": (BASE[:, :, 1:3], "gaps"),
    "every other": (BASE[..., ::2], "gaps"),
    "part of a projection": (BASE.view(2, 60)[:, 20:40].view(2, 4, 5).transpose(1, 2), "gaps"),
    "expanded": (BASE[:, :1].expand(2, 6, 4, 5), "overlapping"),
    "windows": (BASE.view(-1).unfold(0, 4, 2), "overlapping"),
}


@pytest.mark.parametrize(("tensor", "expected"), CASES.values(), ids=CASES)
def test_whole_memory_gives_values_and_strides_back(tensor: torch.Tensor, expected: Density) -> None:
    assert density(tensor) == expected
    flat = flatten_memory(tensor)
    result = flat.values.clone().as_strided(*flat.geometry)
    assert torch.equal(result, tensor)
    assert result.stride() == tensor.stride()
    assert flat.values.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(("tensor", "expected"), [c for c in CASES.values() if c[1] != "overlapping"])
def test_own_values_are_the_elements_alone(tensor: torch.Tensor, expected: Density) -> None:
    flat = flatten_values(tensor)
    result = flat.values.clone().as_strided(*flat.geometry)
    assert torch.equal(result, tensor)
    assert flat.values.numel() == tensor.numel()
    assert expected != "dense" or result.stride() == tensor.stride()


def test_small_part_of_a_large_storage_travels_alone() -> None:
    assert flatten_memory(torch.arange(100)[10:20]).values.tolist() == list(range(10, 20))
    assert flatten_memory(torch.arange(100)[10:80]).values.numel() == 100
