"""Reused arrays: never while something still refers to them, and hardly larger than requested."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringspark.pipelines.readers.blocks import Buffers

LIKE = np.empty((0, 16), np.float32)


def _tensor(array: Any) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(array[3:5])[:, 1:]


@pytest.mark.parametrize(
    "part",
    [
        lambda array: array,
        lambda array: array[2:4],
        lambda array: array[2:9][1:3].T,
        lambda array: array.reshape(-1)[5:6].view(np.uint8),
        lambda array: memoryview(array[4:]),
        lambda array: np.broadcast_to(array[0], (3, 16)),
        lambda array: np.split(array, 2)[1],
        _tensor,
    ],
    ids=["whole", "slice", "views", "bytes", "buffer", "broadcast", "split", "tensor"],
)
def test_an_array_is_used_again_once_nobody_refers_to_a_part_of_it(part: Callable[[Any], Any]) -> None:
    buffers = Buffers()
    for _ in range(20):  # enough iterations for an interpreter that optimizes hot code
        array = buffers.empty("x", 10, LIKE)
        start = array.ctypes.data
        held = part(array)
        del array
        others = [buffers.empty("x", 10, LIKE) for _ in range(3)]
        assert all(other.ctypes.data != start for other in others), f"{held} is in use"
        del others, held
    starts = {buffers.empty("x", 10, LIKE).ctypes.data for _ in range(4)}
    assert len(starts) <= 4
    assert buffers.num_bytes < 5 * 2 * 10 * 64, "arrays that nobody holds are used again"


def test_wide_rows_get_hardly_more_than_was_asked_for() -> None:
    buffers = Buffers()
    array = buffers.empty("x", 4, np.empty((0, 3 << 18), np.float32))  # 3 MiB per row
    assert array.nbytes <= buffers.num_bytes <= 1.25 * array.nbytes


def test_a_consumer_that_keeps_all_batches_does_not_make_the_pool_grow() -> None:
    buffers = Buffers()
    held = [buffers.empty("x", 10, LIKE) for _ in range(2000)]
    assert len({array.ctypes.data for array in held}) == 2000
    assert buffers.num_bytes < 2000 * 10 * 64 / 2


def test_arrays_of_no_bytes() -> None:
    assert Buffers().empty("x", 0, LIKE).shape == (0, 16)
    assert Buffers().empty("x", 3, np.empty((0, 0), np.int64)).shape == (3, 0)
