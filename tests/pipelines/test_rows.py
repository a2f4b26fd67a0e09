import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringspark.pipelines.rows import RaggedRows, Rows, cut, num_bytes

Lists = list[list[int]]
lists = st.lists(st.lists(st.integers(-5, 5), max_size=4), max_size=12)


def ragged(rows: Lists) -> RaggedRows:
    """Two arrays under one set of offsets, which do not start at 0."""
    flat = np.array([99, *(value for row in rows for value in row), 99], dtype=np.int64)
    offsets = 1 + np.cumsum([0, *map(len, rows)])
    return RaggedRows(offsets, (flat, flat.astype(np.float32) / 2))


def to_lists(rows: Rows) -> Lists:
    assert isinstance(rows, RaggedRows)
    first, second = rows.parts
    spans = list(zip(rows.offsets[:-1], rows.offsets[1:], strict=True))
    assert [(first[a:b] / 2).tolist() for a, b in spans] == [second[a:b].tolist() for a, b in spans]
    return [first[a:b].tolist() for a, b in spans]


@given(rows=lists, data=st.data())
def test_ragged_rows_are_cut_like_a_list(rows: Lists, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    part = cut(ragged(rows), start, stop)
    assert to_lists(part) == rows[start:stop]
    assert isinstance(part, RaggedRows)
    compact = part.compact()
    assert compact.offsets[0] == 0
    assert len(compact.parts[0]) == compact.offsets[-1]
    assert to_lists(compact) == rows[start:stop]
    assert num_bytes(part) == num_bytes(compact)
