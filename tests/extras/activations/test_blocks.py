"""Eight-bit blocks have a bounded error; packed booleans and flat memory are exact."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_calls import Operations

from ringspark.extras.activations import compression
from ringspark.extras.activations.compression import BLOCK, BLOCK_FORMATS, Blocks, pack_bits, unpack_bits
from ringspark.extras.activations.hooks import Density, density, flatten_memory, flatten_values

FORMATS = tuple(BLOCK_FORMATS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def there_and_back(values: torch.Tensor, block_format: str, width: int = 1) -> torch.Tensor:
    blocks = Blocks(width=width)
    parts = compression.quantize(values, BLOCK_FORMATS[block_format], blocks)
    num_blocks = -(-values.numel() // width // BLOCK)
    assert [part.nbytes for part in parts] == [num_blocks * width * size for size in (BLOCK, 4, 4)]
    return compression.dequantize(parts, values.dtype).flatten()[: values.numel()]


@pytest.mark.parametrize("dtype", DTYPES)
@given(count=st.integers(1, 3 * BLOCK), exponent=st.integers(-4, 4), seed=st.integers(0, 99))
def test_error_stays_in_the_promised_bounds(dtype: torch.dtype, count: int, exponent: int, seed: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    values = (values * 10.0**exponent).to(dtype)
    largest = torch.cat([part.abs().amax().expand(len(part)) for part in values.float().split(BLOCK)])
    # The smallest code rounds in the dtype too.
    rounded = values.float().abs() + largest / 126
    of_dtype = 2 * torch.finfo(dtype).eps * rounded + torch.finfo(dtype).smallest_normal
    error = (there_and_back(values, "int8").float() - values.float()).abs()
    is_small = values.float().abs() <= largest / 126
    assert (error <= 1.0001 * largest / torch.where(is_small, 126, 252) + of_dtype).all()
    error = (there_and_back(values, "fp8").float() - values.float()).abs()
    # Below 2^-6, the codes of e4m3 are evenly spaced, 2^-9 apart.
    assert (error <= values.float().abs() / 16 + largest / 416 * 2**-9 + of_dtype).all()


@pytest.mark.parametrize("block_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [BLOCK // 2, BLOCK * 3 + 7, 1024 * BLOCK + 5])
def test_nan_and_inf_spoil_their_own_block(block_format: Any, dtype: Any, count: int) -> None:
    values = torch.randn(count).to(dtype)
    values[10], values[-1] = torch.inf, torch.nan
    blocks = [0, (count - 1) // BLOCK]
    spoilt = torch.isin(torch.arange(count) // BLOCK, torch.tensor(blocks))
    result = there_and_back(values, block_format)
    assert torch.equal(result.isfinite(), ~spoilt)
    torch.testing.assert_close(result[~spoilt], values[~spoilt], rtol=1 / 15, atol=0.05)


@pytest.mark.parametrize("codec", [*FORMATS, "bits"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_starts_at_most_twenty_operations_per_tensor(codec: str, dtype: torch.dtype) -> None:
    # Meta tensors take the path of a GPU: 16 million values are one chunk.
    blocks = Blocks(width=2048, rows=250)
    block = compression.SIGNS if codec == "bits" else compression.in_blocks(BLOCK_FORMATS[codec], blocks)
    tensor = torch.empty(8, 1000, 2048, dtype=dtype, device="meta")
    with Operations() as operations:
        flat = flatten_values(tensor)
        restored = block.decode(block.encode(flat.values), tensor.numel(), dtype).as_strided(*flat.geometry)
    assert (restored.shape, restored.dtype) == (tensor.shape, dtype)
    assert len(operations.names) <= 20  # views included


@pytest.mark.parametrize("block_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_path_of_a_gpu_computes_the_same_bits(block_format: Any, dtype: Any, monkeypatch: Any) -> None:
    values = torch.randn(3 * BLOCK, 1030).add_(torch.arange(1030) % 7).to(dtype)
    expected = there_and_back(values.flatten(), block_format, 1030)
    monkeypatch.setattr(compression, "on_cpu", lambda tensor: False)
    assert torch.equal(there_and_back(values.flatten(), block_format, 1030), expected)


@pytest.mark.parametrize("block_format", FORMATS)
def test_zeros_and_extremes_stay_finite(block_format: str) -> None:
    zeros = torch.zeros(300)
    assert torch.equal(there_and_back(zeros, block_format), zeros)
    extremes = torch.tensor([3e38, -3e38, 1e-45, 0.0]).repeat(100)
    assert there_and_back(extremes, block_format).isfinite().all()
    tiny = torch.full((300,), 1e-40)
    assert (there_and_back(tiny, block_format) - tiny).abs().max() <= 1.2e-38
    halves = torch.full((300,), 65504.0, dtype=torch.float16)
    assert torch.equal(there_and_back(halves, block_format), halves)


@pytest.mark.parametrize("block_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(exponents=st.lists(st.integers(-9, 9), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_no_value_loses_its_sign(block_format: Any, dtype: Any, exponents: Any, seed: int) -> None:
    values = torch.randn(700, generator=torch.Generator().manual_seed(seed))
    values *= torch.tensor([10.0**e for e in exponents]).repeat(700)[:700]
    values = values.clamp(-65504, 65504).to(dtype)  # finite in fp16
    values[::7] = 0
    assert torch.equal(there_and_back(values, block_format).sign(), values.sign())


@pytest.mark.parametrize("block_format", FORMATS)
@pytest.mark.parametrize("shape", [(9, 3), (256, 2), (600, 1030), (9, 70_000)], ids=str)
def test_a_column_keeps_its_digits_next_to_larger_ones(block_format: Any, shape: Any) -> None:
    rows = torch.empty(shape).uniform_(0.5, 1).mul_(torch.logspace(-12, 12, shape[1]))
    result = there_and_back(rows.view(-1), block_format, shape[1]).view(shape)
    torch.testing.assert_close(result, rows, rtol=1 / 15, atol=0)


@given(st.lists(st.booleans(), min_size=1, max_size=300), st.integers(0, 9))
def test_bits_come_back_from_any_offset(values: list[bool], offset: int) -> None:
    booleans = torch.tensor(values)[min(offset, len(values) - 1) :]
    packed = pack_bits(booleans)
    assert packed.numpy().tolist() == np.packbits(booleans.numpy(), bitorder="little").tolist()
    assert unpack_bits(packed, len(booleans)).tolist() == booleans.tolist()


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
