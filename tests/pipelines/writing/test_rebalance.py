from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ringspark.pipelines import ShardFile
from ringspark.pipelines.writing.rebalance import FILES_PER_CORE, MAX_SKEW, RowRange, plan_even_files


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


@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    tasks=st.lists(st.integers(0, 3), min_size=40, max_size=40),
    num_files=st.one_of(st.none(), st.integers(1, 12)),
)
def test_files_of_several_partitions_give_the_files_of_one_partition_each(
    rows: list[int], tasks: list[int], num_files: int | None
) -> None:
    """Tasks write partitions in any mixture; `tasks[i]` writes partition i."""
    sizes: Counter[str] = Counter()
    partitions, owner = [], {}
    for number, count in enumerate(rows):
        path = f"task{tasks[number]}"
        partitions.append(RowRange(path, sizes[path], sizes[path] + count))
        for row in range(count):
            owner[path, sizes[path] + row] = f"f{number}", row
        sizes[path] += count
    written = [replace(_files([count])[0], path=path) for path, count in sorted(sizes.items())]
    separate = _files(rows)

    def taken(new: list[list[RowRange]], files: list[ShardFile]) -> list[list[tuple[str, int]]]:
        new = new or [[RowRange(file.path, 0, file.num_rows)] for file in files]
        return [[(part.path, row) for part in file for row in range(part.start, part.stop)] for file in new]

    found = taken(plan_even_files(written, num_files, 40_000, lambda: 2, partitions), written)
    expected = taken(plan_even_files(separate, num_files, 40_000, lambda: 2), separate)
    assert [[owner[row] for row in file] for file in found] == expected


def test_many_tiny_files_are_merged() -> None:
    new = plan_even_files(_files([10] * 200), None, 200_000, lambda: 2)
    assert len(new) == 2 * FILES_PER_CORE


def test_even_files_are_left_alone(no_thread_left: Any) -> None:
    assert plan_even_files(_files([10, 11, 9]), None, 0, _never) == []
    assert plan_even_files([], 3, 0, _never) == []
