"""Reading some rows of a row group through page offsets gives the same rows as Arrow."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringspark.extras.external_tables.in_place import row_pages
from ringspark.extras.external_tables.in_place import thrift_compact as thrift

ROWS = 3_000
# (start, stop): within one page, across pages, at both ends, one row.
SPANS = [(0, 1), (0, ROWS), (700, 701), (999, 1_001), (1, 2_999), (ROWS - 1, ROWS), (2_000, 3_000)]


def _table() -> Any:
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 4, ROWS)
    offsets = pa.array(np.r_[0, np.cumsum(lengths)].astype(np.int32))
    ragged = pa.ListArray.from_arrays(offsets, pa.array(draw.random(int(lengths.sum()))))
    few = draw.integers(0, 9, ROWS)
    pairs = zip(few.tolist(), ragged.to_pylist(), strict=True)
    return pa.table(
        {
            "double": draw.random(ROWS),
            "few": few,
            "flag": few > 4,
            "holey": pa.array(draw.random(ROWS), mask=few == 3),
            "text": pa.array([f"{'long ' * int(n)}{n}" for n in few]),
            "a.b": draw.integers(0, 1 << 40, ROWS),
            "a": draw.random(ROWS).astype(np.float32),
            "ragged": ragged,
            "pair": pa.array([None if n == 7 else {"size": n, "values": values} for n, values in pairs]),
        }
    )


@pytest.fixture(
    params=[
        {"compression": "snappy", "write_page_index": True},
        {"compression": "zstd", "write_page_index": True, "data_page_version": "2.0"},
        {"compression": "none", "write_page_index": True, "use_dictionary": False},
        {"compression": "gzip"},
        {"compression": "none", "data_page_version": "2.0", "use_dictionary": ["few", "text"]},
    ],
    ids=str,
)
def written(request: Any, tmp_path: Path) -> tuple[Path, Any]:
    table, path = _table(), tmp_path / "t.parquet"
    small = {"row_group_size": ROWS, "data_page_size": 1_000, "write_batch_size": 50}
    pq.write_table(table, path, **small, **request.param)
    return path, table


def test_the_pages_of_any_rows_give_what_arrow_gives(written: tuple[Path, Any]) -> None:
    path, table = written
    with pa.OSFile(str(path)) as source:
        metadata = pq.ParquetFile(source).metadata
        reader = row_pages.PageReader(source, metadata)
        leaves = row_pages.find_leaves(metadata)
        names = [name for name in table.column_names if row_pages.has_page_rows(metadata, 0, leaves[name])]
        # Without an offset index, the reader cannot locate the list rows of a page.
        has_index = metadata.row_group(0).column(0).has_offset_index
        assert names == table.column_names[: None if has_index else 7]
        for start, stop in SPANS:
            got = reader.read(0, names, start, stop)
            assert got.equals(table.select(names).slice(start, stop - start))


class Counting:
    def __init__(self, file: Any) -> None:
        self.file, self.num_bytes = file, 0

    def seek(self, *place: int) -> Any:
        return self.file.seek(*place)

    def tell(self) -> int:
        return int(self.file.tell())

    def read(self, size: int) -> bytes:
        self.num_bytes += size
        return bytes(self.file.read(size))


def test_only_the_pages_of_the_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table({"x": np.random.default_rng(0).random(400_000)})
    small = {"use_dictionary": False, "data_page_size": 80_000, "write_batch_size": 1_000}
    pq.write_table(table, path, row_group_size=400_000, write_page_index=True, **small)
    with path.open("rb") as file:
        counting = Counting(file)
        reader = row_pages.PageReader(counting, pq.ParquetFile(str(path)).metadata)
        first = reader.read(0, ["x"], 200_000, 220_000)
        before = counting.num_bytes
        assert reader.read(0, ["x"], 300_000, 320_000).num_rows == first.num_rows == 20_000
        assert counting.num_bytes - before < 2 * 20_000 * 8


def test_pages_behind_the_end_of_a_dictionary_are_read_without_it(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table({"x": np.random.default_rng(0).random(50_000)})
    small = {"dictionary_pagesize_limit": 40_000, "data_page_size": 8_000, "write_batch_size": 100}
    pq.write_table(table, path, row_group_size=50_000, compression="none", write_page_index=True, **small)
    kept = row_pages.KeptPages()
    with path.open("rb") as file:
        reader = row_pages.PageReader(file, pq.ParquetFile(str(path)).metadata, kept)
        assert reader.read(0, ["x"], 40_000, 41_000).equals(table.slice(40_000, 1_000))
        assert kept.dictionary_bytes == 0
        # The writer abandons the dictionary in the middle of these rows.
        assert reader.read(0, ["x"], 0, 20_000).equals(table.slice(0, 20_000))
        assert kept.dictionary_bytes >= 40_000


def test_a_file_that_is_opened_again_is_not_searched_again(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table({"x": np.random.default_rng(0).integers(0, 500, 100_000), "y": np.arange(100_000.0)})
    small = {"use_dictionary": ["x"], "data_page_size": 4_000, "write_batch_size": 500}
    pq.write_table(table, path, row_group_size=100_000, **small)
    metadata, kept, sizes = pq.ParquetFile(str(path)).metadata, row_pages.KeptPages(), []
    for start in (0, 50_000):
        with path.open("rb") as file:
            counting = Counting(file)
            rows = row_pages.PageReader(counting, metadata, kept, "t").read(
                0, ["x", "y"], start, start + 5_000
            )
            assert rows.equals(table.slice(start, 5_000))
            sizes.append(counting.num_bytes)
    # The reader finds page headers once per file; each header takes a read of some hundred bytes.
    assert sizes[1] < sizes[0] / 2
    # One limit covers the dictionaries of all files.
    monkeypatch.setattr(row_pages, "_KEPT_DICTIONARIES", 10_000)
    for name in "abcdefgh":
        with path.open("rb") as file:
            row_pages.PageReader(file, metadata, kept, name).read(0, ["x"], 0, 9)
            assert 0 < kept.dictionary_bytes <= 10_000


def test_what_is_kept_of_a_footer_holds_neither_statistics_nor_texts(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    long = "only in the statistics " * 20
    table = pa.table({"text": [long] * 50}).replace_schema_metadata({"note": "only in the key-values" * 20})
    pq.write_table(table, path, write_page_index=True)
    with pa.OSFile(str(path)) as source:
        reader = row_pages.PageReader(source, pq.ParquetFile(source).metadata)
        assert reader.read(0, ["text"], 10, 20).column("text").to_pylist() == [long] * 10
        assert "only in the" not in repr(reader._whole_footer())


@pytest.mark.parametrize("place", ["index", "rows", "header", "footer"])
def test_damaged_places_are_errors_and_not_other_rows(place: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table({"x": np.arange(5_000.0)})
    pq.write_table(table, path, data_page_size=1_000, write_page_index=place != "header")
    metadata = pq.read_metadata(path)
    data = bytearray(path.read_bytes())
    if place in ("index", "rows"):
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        column = thrift.read_struct(bytes(data[footer:-8]))[0][4][1][1][0][1][1][1][0]
        start, size = column[4][1], column[5][1]
        index, _ = thrift.read_struct(bytes(data[start : start + size]))
        second = index[1][1][1][1]
        if place == "index":
            second[1] = (second[1][0], 1 << 40)
        else:
            second[3] = (second[3][0], 4_000)  # the third page begins earlier
        broken = thrift.write_struct(index)
        data[start : start + size] = broken[:size].ljust(size, b"\0")
    elif place == "footer":
        data[-8:-4] = (1 << 30).to_bytes(4, "little")
    else:
        data[metadata.row_group(0).column(0).data_page_offset] = 0xFF
    with pa.BufferReader(bytes(data)) as source:
        reader = row_pages.PageReader(source, metadata)
        with pytest.raises((ValueError, OSError)):
            reader.read(0, ["x"], 100, 200)


def test_thrift_data_are_written_as_they_were_read_and_never_read_past_their_end() -> None:
    path_like = pa.BufferOutputStream()
    pq.write_table(_table().slice(0, 40), path_like)
    data = path_like.getvalue().to_pybytes()
    footer = data[len(data) - 8 - int.from_bytes(data[-8:-4], "little") : -8]
    fields, end = thrift.read_struct(footer)
    assert end == len(footer)
    assert thrift.read_struct(thrift.write_struct(fields)) == (fields, len(thrift.write_struct(fields)))
    for stop in range(0, len(footer) - 1, 7):
        with pytest.raises(thrift.ThriftError):
            thrift.read_struct(footer[:stop])


@pytest.mark.parametrize("length", [14, 15, 16])
def test_lists_around_the_largest_short_length_are_read_as_written(length: int) -> None:
    fields = {1: (thrift.LIST, (thrift.I32, list(range(length))))}
    assert thrift.read_struct(thrift.write_struct(fields))[0] == fields
