from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ringspark.pipelines import ShardFile
from ringspark.pipelines.writing.rebalance import FILES_PER_CORE, MAX_SKEW, plan_even_files


def _files(rows: list[int]) -> list[ShardFile]:
    return [
        ShardFile(path=f"f{index}", split="train", num_bytes=1000, sha256="", row_groups=(count,))
        for index, count in enumerate(rows)
    ]


def _never() -> int:
    raise AssertionError("the number of cores was requested")


@given(
    rows=st.lists(st.integers(1, 1000), max_size=20),
    num_files=st.one_of(st.none(), st.integers(1, 30)),
)
def test_new_files_hold_every_row_once_in_order_and_evenly(rows: list[int], num_files: int | None) -> None:
    new = plan_even_files(_files(rows), num_files, 1 << 40, _never)
    if not new:
        # If more files than rows are requested, each row gets a file.
        assert num_files is None or min(num_files, sum(rows)) == len(rows)
        assert not rows or max(rows) <= max(1, MAX_SKEW * sum(rows) / len(rows))
        return
    taken = [(part.path, row) for file in new for part in file for row in range(part.start, part.stop)]
    assert taken == [(f"f{index}", row) for index, count in enumerate(rows) for row in range(count)]
    sizes = [sum(part.stop - part.start for part in file) for file in new]
    assert max(sizes) - min(sizes) <= 1
    assert len(new) == min(num_files or len(rows), sum(rows))


def test_many_tiny_files_are_merged() -> None:
    new = plan_even_files(_files([10] * 200), None, 200_000, lambda: 2)
    assert len(new) == 2 * FILES_PER_CORE


def test_even_files_are_left_alone(no_thread_left: Any) -> None:
    assert plan_even_files(_files([10, 11, 9]), None, 0, _never) == []
    assert plan_even_files([], 3, 0, _never) == []
