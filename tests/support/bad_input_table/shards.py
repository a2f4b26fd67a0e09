"""Refusals when shards are written or read, and when tables of Parquet or Delta files are read."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F

from bad_input_table.place import BadInput, Place, blocked, cut, edited, gone
from ringspark.pipelines import Binary, Padded, ShardManifest, open_reader, plan_epoch, write_shards

R = BadInput

# fmt: off
WRITING = [
    R("write: string column", lambda p: p.write("text"), "column 'text' has type string", "Vocabulary"),
    R("write: binary column", lambda p: p.write("bytes"), "column 'bytes' has type binary", "Binary"),
    R("write: a string in a struct", lambda p: p.write("named"),
      r"column 'named' has a field 'named\.text' of type string", "select it as a separate column"),
    R("write: a whole number in a struct that float64 lacks", lambda p: p.write("wide"),
      "the field 'key' of struct.* holds 900719925474.*, but float64.* only up to", "as a separate column"),
    R("write: map column", lambda p: p.write("lookup"), "column 'lookup' has type map", "; "),
    R("write: wide decimal", lambda p: p.write("exact"), r"'exact' has type decimal\(38,2\)", "cast it"),
    R("write: nulls", lambda p: p.write("holey"), "'holey' has nulls in 1 of 60", "drop them first"),
    R("write: arrays of two lengths", lambda p: p.write("uneven"),
      "'uneven' has arrays of 1 to 2", "pad or cut"),
    R("write: no row", lambda p: write_shards(p.pair.limit(0), p.storage), "no training rows", "nothing was"),
    R("write: a pandas frame", lambda p: write_shards(pd.DataFrame(), p.storage),
      "got pandas", "createDataFrame"),
    R("write: no folder", lambda p: p.write(uri=""), "storage URI must not be empty", "pass '/data"),
    R("write: unwritable folder", lambda p: p.write(uri=blocked(p)), "cannot be written", "choose a folder"),
    R("write: unknown store", lambda p: p.write(uri="nosuch://bucket/x"),
      "URI 'nosuch:.*cannot be reached", "install"),
    R("write: folder in use", lambda p: write_shards(p.pair, p.prepared("shards")),
      "holds shards already", "choose another folder or pass overwrite=True"),
    R("write: num_files=0", lambda p: p.write(num_files=0), "num_files", "at least 1, got 0"),
    R("write: row_group_rows=-1", lambda p: p.write(row_group_rows=-1),
      "row_group_rows", "at least 1, got -1"),
    R("write: compression", lambda p: p.write(compression="zip"), "compression", "one of zstd, .* got 'zip'"),
    R("write: handle_invalid", lambda p: p.write(handle_invalid="drop"), "handle_invalid", "one of error, "),
    R("write: handle_invalid of no column", lambda p: p.write(handle_invalid={"x": "skip"}),
      "handle_invalid names 'x'", "not a column"),
    R("write: kind of no column", lambda p: p.write(columns={"labelz": Padded()}),
      "columns has the key 'labelz'", "no such column; did you mean 'label'"),
    R("write: kind by name", lambda p: p.write(columns={"label": "pad"}), r"columns\['label'\]", "such as"),
    R("write: no validation_col", lambda p: p.write(validation_col="x"),
      "validation_col 'x'", "known: features"),
    R("write: fraction as text", lambda p: p.write(validation_fraction="0.1"),
      "validation_fraction", "a number between 0 and 1"),
    R("write: long seed", lambda p: p.write(validation_fraction=0.1, seed=2**70),
      "seed must be", "whole number of 64"),
    R("write: list of kinds", lambda p: p.write(columns=["label"]),
      "columns must map names to column types", "e.g."),
    R("write: two ways to hold out", lambda p: p.write(validation_fraction=0.1, validation_col="label"),
      "validation_col or validation_fraction", "not both"),
    R("write: a stream", lambda p: p.stream(),
      "takes a batch DataFrame, got a streaming", "call it in foreachBatch"),
    R("write: no column but the split", lambda p: p.write("never", validation_col="never"),
      "no column to write", "select"),
    R("write: half a split", lambda p: p.write(validation_fraction=1.5),
      "validation_fraction", "between 0 and 1"),
    R("write: images of two sizes", lambda p: write_shards(pictures(p), p.storage, columns={
        "bytes": Binary("image", shape=(2, 2, 3))}),
      r"'bytes' holds uint8 of shape \(2, 3, 3\)", r"Image\(2, 2, 3\) takes images of any size"),
    R("write: an image of 16 bits for Binary", lambda p: write_shards(
        pictures(p, deep=True), p.storage, columns={"bytes": Binary("image", shape=(2, 2))}),
      "mode 'I;16.*' has more than 8 bits per channel", "store it as npy"),
    R("write: everything held out",
      lambda p: write_shards(p.pair.withColumn("v", F.lit(True)), p.storage, validation_col="v"),
      "no training rows", "of 60 rows, 60 are for validation"),
]
# fmt: on

# fmt: off
READING = [
    R("read: no shards", lambda p: ShardManifest.load(p.prepared()), "holds no shards", "write_shards"),
    R("read: manifest cut", lambda p: ShardManifest.load(p.prepared("shards", cut("manifest.json"))),
      "manifest in .* cannot be used", "write the shards again"),
    R("read: newer manifest",
      lambda p: load_manifest(p, lambda m: m | {"format_version": 9}),
      "its format is 9", "upgrade ringspark"),
    R("read: manifest with a path out of its folder",
      lambda p: load_manifest(p, lambda m: m | {"files": [m["files"][0] | {"path": "../x"}]}),
      r"manifest .* only name files in its folder, got '\.\./x'", "write the shards again"),
    R("read: shard missing",
      lambda p: ShardManifest.load(p.prepared("shards", gone("_shards*/*.parquet"))).verify_files(),
      r"shard file '.*\.parquet' is missing", "write the shards again"),
    R("read: shard cut",
      lambda p: ShardManifest.load(p.prepared("shards", cut("_shards*/*.parquet"))).verify(),
      r"shard file '.*\.parquet' has \d+ bytes, but", "write the shards again"),
    R("read: a path", lambda p: open_reader(p.prepared("shards")),
      "takes a manifest, got", "ShardManifest.load"),
    R("read: unknown column", lambda p: reader(p, columns=["x"]), "no column 'x'", "known: features, label"),
    R("read: columns as text", lambda p: reader(p, columns="label"), "columns must be a list", "got 'label'"),
    R("read: shard 2 of 2", lambda p: reader(p, shard=2, num_shards=2),
      "shard must be", "from 0 to 1, got 2"),
    R("read: no rows a batch", lambda p: reader(p, batch_size=0), "batch_size must be", "at least 1, got 0"),
    R("read: unknown engine", lambda p: reader(p, engine="dask"),
      "reader must be", "one of arrow, petastorm"),
    R("read: unknown cache", lambda p: reader(p, cache="gpu"), "cache must be", "memory, disk, got 'gpu'"),
    R("read: no room in the cache", lambda p: reader(p, cache="memory", cache_bytes=0),
      "cache_bytes", "at least 1"),
    R("read: unknown split", lambda p: manifest_of(p).select("test"),
      "split must be", "train, validation, got"),
    R("read: step after the last", lambda p: reader(p).batches(0, start_step=9),
      "start_step must be", "0 to 1, got 9"),
    R("plan: negative row groups", lambda p: plan_epoch([-1], num_shards=1, batch_size=1, epoch=0, seed=0),
      "row_groups must not be negative", "got -1"),
]
# fmt: on


def load_manifest(place: Place, change: Callable[[Any], Any]) -> ShardManifest:
    return ShardManifest.load(place.prepared("shards", edited("manifest.json", change)))


def manifest_of(place: Place) -> ShardManifest:
    return ShardManifest.load(place.prepared("shards"))


def reader(place: Place, **settings: Any) -> Any:
    return open_reader(manifest_of(place), engine=settings.pop("engine", "arrow"), **settings)


def pictures(place: Place, *, deep: bool = False) -> Any:
    """Returns two PNGs; the second is wider, or has 16 bits."""
    import numpy as np
    from PIL import Image as Pillow

    files = []
    second = np.zeros((2, 2), np.uint16) if deep else np.zeros((2, 3, 3), np.uint8)
    for pixels in (np.zeros((2, 2, 3), np.uint8), second):
        buffer = BytesIO()
        Pillow.fromarray(pixels).save(buffer, "PNG")
        files.append((buffer.getvalue(),))
    return place.spark.createDataFrame(files, "bytes binary").coalesce(1)


# fmt: off
TABLES = [
    R("fitOnParquet: no such folder", lambda p: on_table(p, f"{p.storage}/none"),
      r"there is no folder '.*none'", "pass a folder that holds Parquet files"),
    R("fitOnParquet: a folder without tables", lambda p: on_table(p, p.prepared()),
      "holds no Parquet files", "pass a folder with files"),
    R("fitOnParquet: a column of another type in one file",
      lambda p: on_table(p, p.prepared(damage=with_table(features=[[1, 2]] * 4))),
      r"Spark cannot read the file .*b\.parquet \(Data type mismatches .* \[features, list, element\]",
      "or write it again"),
    R("fitOnParquet: a file that is none",
      lambda p: on_table(p, p.prepared(damage=with_table(text="features"))),
      r"Spark cannot read the file .*b\.parquet", "remove it"),
    R("fitOnParquet: nulls",
      lambda p: on_table(p, p.prepared(damage=with_table(label=[0.0, None, 1.0, 1.0]))),
      "'label' has nulls in 1 of 8 rows", "drop them first"),
    R("rows in place that are in no files", lambda p: p.fit(data="inPlace"),
      "data='inPlace' cannot read .*: Spark does not report from which file each row", "set data='copy'"),
    R("fitOnDelta: no Delta table", lambda p: p.fit(run=lambda e: e.fitOnDelta(p.storage)),
      "cannot be read as a Delta table", "pass the folder that holds _delta_log"),
]
# fmt: on


def on_table(place: Place, uri: str, **changes: Any) -> Any:
    """Fits on a folder of Parquet files."""
    return place.fit(run=lambda estimator: estimator.fitOnParquet(uri), **changes)


def with_table(text: str = "", **changes: Any) -> Callable[[Path], None]:
    """Returns a function that writes two files: the second has changed columns, or is `text`."""

    def write(folder: Path) -> None:
        columns = {"features": [[1.0, 2.0]] * 4, "label": [0.0, 1.0] * 2}
        pq.write_table(pa.table(columns), folder / "a.parquet")
        if text:
            (folder / "b.parquet").write_text(text)
        else:
            pq.write_table(pa.table(columns | changes), folder / "b.parquet")

    return write
