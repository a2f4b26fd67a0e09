"""Packed booleans: exact, one eighth of the size, in NumPy's bit order."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringspark.extras.activations.compression import pack_bits, unpack_bits


@given(st.lists(st.booleans(), min_size=1, max_size=300), st.integers(0, 9))
def test_bits_come_back_from_any_offset(values: list[bool], offset: int) -> None:
    offset = min(offset, len(values) - 1)
    booleans = torch.tensor(values)[offset:]
    packed = pack_bits(booleans)
    assert packed.numpy().tolist() == np.packbits(booleans.numpy(), bitorder="little").tolist()
    assert unpack_bits(packed, len(booleans)).tolist() == booleans.tolist()


def test_bits_run_on_meta() -> None:
    packed = pack_bits(torch.empty(1001, dtype=torch.bool, device="meta"))
    assert packed.nbytes == 126
    assert unpack_bits(packed, 1001).shape == (1001,)
