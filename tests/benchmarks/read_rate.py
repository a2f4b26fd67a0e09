"""Read rate of one epoch: ringspark's engines against Petastorm's loader and pyarrow.

All cases read the same rows in the same process. The engines read shards, whose arrays are fixed-width bytes;
the other cases read files with lists, as Spark writes them. The pyarrow cases decode the files in order and
drop the result, without shuffle or batches. Engines and loader return shuffled batches of `BATCH_SIZE` rows
as tensors. Petastorm's loader shuffles within a window of `WINDOW_ROWS` rows from shuffled row groups; the
engines shuffle the whole epoch. Opening is part of the time. A cache is filled by an epoch that does not
count.

    python tests/benchmarks/read_rate.py --chart docs/read_rate.png
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch

from ringspark.pipelines import (
    Array,
    Column,
    Scalar,
    ShardFile,
    ShardManifest,
    ShardReader,
    open_reader,
)
from ringspark.pipelines.typed_json import record
from ringspark.pipelines.writing.shard_writer import WritePlan, write_partition

BATCH_SIZE = 1024
WINDOW_ROWS = 100_000
NUM_FILES = 4
ATTEMPTS = 20
ARROW_BATCH_ROWS = 10_000  # rows per Arrow batch in Spark's Python functions
# Distinct values of the integers: some columns get a Parquet dictionary, some do not.
INT_RANGES = (10, 1_000, 100_000, 1 << 20, 1 << 31)

BARE = "pyarrow alone, 1 thread"
BARE_THREADS = "pyarrow alone, its threads"
LOADER = "Petastorm BatchedDataLoader"

Data = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One of the measured data sets.

    Attributes:
        title: Description for the table and the chart.
        data: Column name -> values, (rows,) or (rows, width).
    """

    title: str
    data: Data


def array_data(rows: int) -> DataSet:
    """Returns one array column."""
    values = np.random.default_rng(0).random((rows, harness.DIM), dtype=np.float32)
    return DataSet(title=f"{harness.DIM} float32 in one array column", data={"features": values})


def scalar_data(rows: int) -> DataSet:
    """Returns 20 scalar columns of five types."""
    draw = np.random.default_rng(1)
    data: dict[str, np.ndarray[Any, Any]] = {}
    for number, high in enumerate(INT_RANGES):
        data[f"int{number}"] = draw.integers(high, size=rows).astype(np.int32)
        data[f"bigint{number}"] = draw.integers(high, size=rows) << 20
    for number in range(4):
        data[f"float{number}"] = draw.random(rows, dtype=np.float32)
        data[f"double{number}"] = draw.random(rows)
    for number in range(2):
        data[f"boolean{number}"] = draw.random(rows) < 0.5
    return DataSet(title=f"{len(data)} mixed scalar columns", data=data)


def write(data: Data, folder: Path, row_group_rows: int | None = None) -> ShardManifest:
    """Writes shards as the tasks of `write_shards` do, without Spark or statistics."""
    name = "_shards-bench"
    (folder / name).mkdir(parents=True)
    kinds = {key: _kind(values) for key, values in data.items()}
    columns = tuple(Column(name=key, kind=kind) for key, kind in kinds.items())
    plan = WritePlan(
        uri=str(folder),
        folder=name,
        columns=columns,
        handle_invalid=("error",) * len(columns),
        row_group_rows=row_group_rows,
    )
    files: list[ShardFile] = []
    num_rows = len(next(iter(data.values())))
    for part in np.array_split(np.arange(num_rows), NUM_FILES):
        (report,) = write_partition(plan, _arrow_batches(data, int(part[0]), int(part[-1]) + 1))
        files += [record(ShardFile, file) for file in json.loads(report.column(0)[0].as_py())["files"]]
    manifest = ShardManifest(uri=str(folder), columns=columns, files=tuple(files))
    assert manifest.num_rows == num_rows
    manifest.save()
    return manifest


def with_lists(manifest: ShardManifest, data: Data) -> list[str]:
    """Writes an array column's rows again, as lists.

    Returns these files, or the shards if there are no arrays.
    """
    if any(values.ndim == 1 for values in data.values()):
        return list(manifest.paths)
    floats = pa.list_(pa.field("element", pa.float32(), nullable=False))
    schema = pa.schema([pa.field(name, floats, nullable=False) for name in data])
    files, start = [], 0
    for file, path in zip(manifest.files, manifest.paths, strict=True):
        batches = _arrow_batches(data, start, start + file.num_rows)
        table = pa.Table.from_batches(batches).cast(schema)
        files.append(f"{path}-lists.parquet")
        pq.write_table(table, files[-1], file.row_groups[0], compression="zstd", use_dictionary=False)
        start += file.num_rows
    return files


def _kind(values: np.ndarray[Any, Any]) -> Scalar | Array:
    return Scalar(values.dtype.name) if values.ndim == 1 else Array(values.dtype.name, values.shape[1:])


def _arrow_batches(data: Data, start: int, stop: int) -> Iterator[Any]:
    for first in range(start, stop, ARROW_BATCH_ROWS):
        rows = slice(first, min(first + ARROW_BATCH_ROWS, stop))
        yield pa.RecordBatch.from_arrays([_arrow(values[rows]) for values in data.values()], names=list(data))


def _arrow(values: np.ndarray[Any, Any]) -> Any:
    if values.ndim == 1:
        return pa.array(values)
    offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, values.ravel())


def read_bare(paths: Sequence[str]) -> int:
    """Decodes every row group in one thread. Returns the number of rows."""
    rows = 0
    for path in paths:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                rows += file.read_row_group(group, use_threads=False).num_rows
    return rows


def read_bare_threads(paths: Sequence[str]) -> int:
    """Decodes everything with pyarrow's scanner and its defaults. Returns the number of rows."""
    return sum(batch.num_rows for batch in ds.dataset(list(paths)).to_batches())


def read_engine(manifest: ShardManifest, engine: str) -> int:
    """Reads one shuffled epoch with a new reader. Returns the number of rows."""
    return _epoch(open_reader(manifest, batch_size=BATCH_SIZE, engine=engine), 0)


class CachedEpochs:
    """Engine "arrow" with cache "memory". Every call reads another epoch; the first one fills the cache."""

    def __init__(self, manifest: ShardManifest) -> None:
        decoded = sum(column.kind.row_bytes for column in manifest.columns) * manifest.num_rows
        self._reader = open_reader(
            manifest, batch_size=BATCH_SIZE, engine="arrow", cache="memory", cache_bytes=2 * decoded
        )
        self._epoch = 0

    def read(self) -> int:
        """Reads an epoch from memory. Returns the number of rows."""
        self._epoch += 1
        return _epoch(self._reader, self._epoch)

    def fill(self) -> None:
        """Reads the first epoch, from the files."""
        _epoch(self._reader, 0)


def _epoch(reader: ShardReader, epoch: int) -> int:
    return _count(
        {name: torch.from_numpy(values) for name, values in batch.items()} for batch in reader.batches(epoch)
    )


def _count(batches: Iterable[Mapping[str, torch.Tensor]]) -> int:
    return sum(len(next(iter(batch.values()))) for batch in batches)


def read_loader(paths: Sequence[str]) -> int:
    """Reads one shuffled epoch with Petastorm's loader and its defaults. Returns the number of rows."""
    from petastorm.pytorch import BatchedDataLoader

    with _petastorm_reader(paths) as reader:
        return _count(BatchedDataLoader(reader, batch_size=BATCH_SIZE, shuffling_queue_capacity=WINDOW_ROWS))


def read_petastorm(paths: Sequence[str]) -> int:
    """Reads with Petastorm's reader alone, which returns row groups as NumPy columns.

    Returns the number of rows.
    """
    with _petastorm_reader(paths) as reader:
        return sum(len(group[0]) for group in reader)


@contextlib.contextmanager
def _petastorm_reader(paths: Sequence[str]) -> Iterator[Any]:
    from petastorm import make_batch_reader

    # Pass files, because Petastorm ignores folders whose names begin with "_". It also prints when it ends.
    with (
        contextlib.redirect_stdout(io.StringIO()),
        make_batch_reader([f"file://{path}" for path in paths]) as reader,
    ):
        yield reader


def cases(manifest: ShardManifest, lists: Sequence[str]) -> dict[str, Callable[[], float]]:
    """Returns every case as a function that reads once and returns rows/s.

    The peers read the files `lists`.
    """
    cached = CachedEpochs(manifest)
    cached.fill()
    reads: dict[str, Callable[[], int]] = {
        BARE: partial(read_bare, lists),
        BARE_THREADS: partial(read_bare_threads, lists),
        'engine "arrow"': partial(read_engine, manifest, "arrow"),
        'engine "arrow", memory cache': cached.read,
    }
    if find_spec("petastorm") is None:
        print("Petastorm is not installed", file=sys.stderr)
    else:
        reads['engine "petastorm"'] = partial(read_engine, manifest, "petastorm")
        if find_spec("pyarrow.filesystem") is None:
            print("Petastorm's own loader needs an older pyarrow, as .venv-floor has", file=sys.stderr)
        else:
            reads[LOADER] = partial(read_loader, lists)
            reads["Petastorm make_batch_reader alone"] = partial(read_petastorm, lists)
    return {name: partial(_rate, name, read, manifest.num_rows) for name, read in reads.items()}


def _rate(name: str, read: Callable[[], int], expected: int) -> float:
    for _ in range(ATTEMPTS):
        counted: list[int] = []
        seconds = harness.seconds_of(lambda: counted.append(read()))  # noqa: B023 (called at once)
        if counted == [expected]:
            return expected / seconds
        # Petastorm 0.13 may report the end too early, while it hands out the last row group, see
        # readers/petastorm_reader.py. With few row groups it then reads nothing at all.
        print(f"{name} read {counted[0]:,} of {expected:,} rows; once more", file=sys.stderr)
    raise RuntimeError(f"{name} lost rows in {ATTEMPTS} attempts; use more --rows")


def table(rates: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """Returns a line per case: rows/s, and the ratios to Petastorm's loader and to pyarrow."""
    lines = harness.rate_rows(rates, BARE)
    for line, values in zip(lines, rates.values(), strict=True):
        ratio = f"{harness.median_ratio(values, rates[LOADER]):.2f}" if LOADER in rates else "-"
        line.insert(4, ratio)
    return lines


def draw_chart(path: str, results: Mapping[str, Mapping[str, Sequence[float]]], rows: int) -> None:
    """Draws bars of the medians with lines from the slowest to the fastest round, one panel per data set."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        1, len(results), figsize=(6 * len(results), 4.2), sharey=True, layout="constrained", squeeze=False
    )
    for axes, (title, rates) in zip(panels[0], results.items(), strict=True):
        names = list(rates)
        millions = {name: np.array(values) / 1e6 for name, values in rates.items()}
        middle = [float(median(millions[name])) for name in names]
        low = [mid - millions[name].min() for mid, name in zip(middle, names, strict=True)]
        high = [millions[name].max() - mid for mid, name in zip(middle, names, strict=True)]
        colors = [_color(name) for name in names]
        axes.barh(names, middle, xerr=[low, high], color=colors, ecolor="0.25", capsize=3)
        for row, (mid, above) in enumerate(zip(middle, high, strict=True)):
            axes.annotate(f"{mid:.2f}", (mid + above, row), (5, 0), textcoords="offset points", va="center")
        axes.set(title=title, xlabel="million rows/s", xlim=(0, 1.15 * max(map(max, millions.values()))))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("what reads the shards")
    panels[0][0].invert_yaxis()
    figure.suptitle(
        f"Reading one epoch of {rows:,} rows in batches of {BATCH_SIZE}; medians, lowest to highest"
    )
    figure.savefig(path, dpi=130)
    print(f"chart: {path}")


def _color(name: str) -> str:
    if name.startswith("engine"):
        return "tab:blue"
    return "tab:orange" if name.startswith("Petastorm") else "0.65"


def main() -> None:
    """Measures one data set after another, with the cases of each in interleaved rounds."""
    args = harness.parse(__doc__, rows=(1_000_000, 20_000))
    # Petastorm uses pyarrow's legacy dataset, which warns at every call, and makes tensors of read-only
    # arrays.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
    results: dict[str, dict[str, list[float]]] = {}
    for make in (array_data, scalar_data):
        with tempfile.TemporaryDirectory() as folder:
            data_set = make(args.rows)
            manifest = write(data_set.data, Path(folder) / "shards")
            lists = with_lists(manifest, data_set.data)
            rates = harness.measure_in_turns(cases(manifest, lists), args.repeats)
        results[data_set.title] = rates
        harness.print_table(
            f"read_rate: rows/s, {args.rows:,} rows, {data_set.title}, {NUM_FILES} files, "
            f"{len(manifest.row_groups)} row groups,\nbatches of {BATCH_SIZE}, shuffling_queue_capacity "
            f"{WINDOW_ROWS:,}, {args.repeats} rounds",
            ["", "median", "min", "max", "ratio to BatchedDataLoader", "ratio to pyarrow, 1 thread"],
            table(rates),
        )
    if args.chart is not None:
        draw_chart(args.chart, results, args.rows)


if __name__ == "__main__":
    main()
