"""What a user can give that cannot work, one row each: what is done, and what the one sentence must say.

`test_bad_inputs.py` asserts every row, `tests/benchmarks/bad_inputs.py` times them. A row's `do` gets a
`Place` with a table, shards, a model and a saved one, and must raise its error.

To add one: a row in the list of its part; `python tests/benchmarks/bad_inputs.py` shows what is said.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyspark.sql import functions as F
from tokenizers import Tokenizer, processors
from tokenizers import models as tokenizer_models
from torch import nn

from ringspark.estimators import (
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    TorchRegressor,
    plan_memory,
)
from ringspark.estimators.run.folder import RunRefusedError
from ringspark.estimators.training.checkpoint.weights import save_checkpoint
from ringspark.jobs import cli, etl, score, shards, train
from ringspark.models import CountingLayer, ModelSpec
from ringspark.pipelines import (
    Binary,
    HashBuckets,
    Image,
    Padded,
    Ragged,
    ShardManifest,
    Tokens,
    Vocabulary,
    open_reader,
    plan_epoch,
    train_tokenizer,
    write_shards,
)
from ringspark.pipelines.columns import Column
from ringspark.pipelines.kinds import Array

SPEC = ModelSpec("linear", {"in_features": 2, "out_features": 1})
SCALING = {"name": "linear", "baseBatchSize": 4}
DEEP = ModelSpec("mlp", {"in_features": 2, "hidden": [2], "out_features": 1})
JOBS = {"etl": etl, "train": train, "score": score, "shards": shards}


IMAGE_STRUCT = "struct<origin:string,height:int,width:int,nChannels:int,mode:int,data:binary>"
NUMBERS = ["broken", "endless", "many", "half", "negative", "zero"]


class RefusedError(Exception):
    """What a job printed in place of its work."""


class Place:
    """What the rows use. `root` is new for each of them; what it holds, `prepared` has put there.

    Attributes:
        table: 60 rows with columns of all sorts.
        storage: `storageUri` of the fits: an empty folder, which every row leaves empty.
    """

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark = spark
        self.table = spark.range(0, 60, 1, 2).select(
            F.array((F.col("id") / 60).cast("float"), F.lit(1.0).cast("float")).alias("features"),
            (F.col("id") % 2).cast("double").alias("label"),
            F.col("id").cast("string").alias("text"),
            F.when(F.col("id") != 7, F.col("id").cast("double")).alias("holey"),
            F.when(F.col("id") == 7, F.lit(float("nan"))).otherwise(1.0).alias("broken"),
            F.when(F.col("id") == 7, F.lit(float("inf"))).otherwise(1.0).alias("endless"),
            F.col("id").alias("many"),
            (F.col("id") / 60).alias("half"),
            (F.col("id") - 30).cast("double").alias("negative"),
            F.lit(0.0).alias("zero"),
            F.lit(False).alias("never"),
            F.col("id").cast("string").cast("binary").alias("bytes"),
            F.when(F.col("id") == 7, F.array("id")).otherwise(F.array("id", "id")).alias("uneven"),
            F.struct("id").alias("pair"),
            F.struct("id", F.col("id").cast("string").alias("text")).alias("named"),
            F.struct(F.col("id") / 60, (F.col("id") + 2**53).alias("key")).alias("wide"),
            F.create_map(F.lit("k"), F.col("id")).alias("lookup"),
            F.col("id").cast("decimal(38,2)").alias("exact"),
        )
        self.pair = self.table.select("features", "label")
        self._shards = folder / "shards"
        write_shards(self.table.select("features", "label", *NUMBERS), str(self._shards), num_files=1)
        self._run, self._saved = folder / "run", folder / "saved"
        estimator = TorchClassifier(model=SPEC, runUri=str(self._run), showProgress=False)
        self.model = estimator.fitOnShards(str(self._shards))
        self.model.save(str(self._saved))
        self.enter(folder / "warm")

    def enter(self, root: Path) -> None:
        """Starts a row in an empty folder."""
        self.root, self.storage = root, str(root / "storage")
        (root / "storage").mkdir(parents=True)
        self.before = self.holds()

    def prepared(self, copy_of: str = "", damage: Callable[[Path], Any] | None = None) -> str:
        """A folder for the row: empty, or a copy of the "shards", the "run" or the "saved" model."""
        folder = self.root / "given"
        if copy_of:
            shutil.copytree({"shards": self._shards, "run": self._run, "saved": self._saved}[copy_of], folder)
        else:
            folder.mkdir()
        if damage is not None:
            damage(folder)
        self.before = self.holds()
        return str(folder)

    def holds(self) -> set[tuple[str, int]]:
        """Every file and folder below the root, with its size."""
        return {(str(path), path.stat().st_size if path.is_file() else 0) for path in self.root.rglob("*")}

    def train(self, kind: Any = TorchClassifier, **changes: Any) -> Any:
        """The same on shards that are there: no job of Spark's is needed to refuse it."""
        return self.fit(kind, lambda estimator: estimator.fitOnShards(str(self._shards)), **changes)

    def fit(self, kind: Any = TorchClassifier, run: Any = None, **changes: Any) -> Any:
        """A small fit with some settings changed, or what `run` does with its estimator."""
        params: dict[str, Any] = {"model": SPEC, "epochs": 2, "batchSize": 8, "storageUri": self.storage}
        if "runUri" in changes:
            params["storageUri"] = None
        estimator = kind(**(params | {"showProgress": False} | changes))
        return estimator.fit(self.table) if run is None else run(estimator)

    def mesh(self, **changes: Any) -> Any:
        """A fit by two workers that share a network of three matrices."""
        return self.fit(**({"model": DEEP, "numWorkers": 2} | changes))

    def write(self, *columns: str, **settings: Any) -> Any:
        """A write of some columns."""
        given = self.table.select(*columns) if columns else self.pair
        return write_shards(given, **({"uri": f"{self.storage}/shards"} | settings))

    def stream(self) -> Any:
        """A write of a DataFrame that never ends."""
        return write_shards(self.spark.readStream.format("rate").load(), self.storage)

    def on_damaged(self, damage: Callable[[str], Callable[[Path], None]]) -> Any:
        """A fit on shards of which one is damaged."""
        uri = self.prepared("shards", damage("_shards*/*.parquet"))
        return self.fit(run=lambda estimator: estimator.fitOnShards(uri))

    def load(self, damage: Callable[[Path], Any], kind: Any = TorchClassificationModel) -> Any:
        """Loads the saved model after some damage."""
        return kind.load(self.prepared("saved", damage))

    def job(self, name: str, *options: str) -> None:
        """A job's command line, in this process."""
        errors = StringIO()
        with redirect_stderr(errors):
            try:
                code = cli.main(JOBS[name].build_parser(), JOBS[name].run, options)
            except SystemExit as ended:
                code = ended.code
        if code:
            raise RefusedError(errors.getvalue().removesuffix("\n"))


@dataclass(frozen=True)
class BadInput:
    """One row: its sentence must match `subject`, and `remedy` behind that.

    Attributes:
        do: Raises `error`.
        remedy: What to do, or the values that can be used.
    """

    name: str
    do: Callable[[Place], Any]
    subject: str
    remedy: str
    error: type[Exception] = ValueError

    def problem(self, error: BaseException) -> str:
        """What is wrong with what was raised; empty where nothing is."""
        text = str(error)
        if type(error) is not self.error:
            return f"raised {type(error).__name__}, not {self.error.__name__}"
        if "\n" in text or "Traceback" in text or "py4j" in text:
            return "is more than one line"
        if re.search(f"{self.subject}.*{self.remedy}", text) is None:
            return f"lacks /{self.subject}/ or, behind it, /{self.remedy}/"
        return ""


def edited(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Damage: changes the JSON of a file below the folder."""

    def damage(folder: Path) -> None:
        path = folder / name
        value = json.loads(path.read_text())
        path.write_text(json.dumps(change(value)))

    return damage


def cut(pattern: str) -> Callable[[Path], None]:
    """Damage: the first file of that pattern loses its second half."""

    def damage(folder: Path) -> None:
        path = next(iter(sorted(folder.glob(pattern))))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return damage


def gone(pattern: str) -> Callable[[Path], None]:
    """Damage: the first file of that pattern is removed."""
    return lambda folder: next(iter(sorted(folder.glob(pattern)))).unlink()


def blocked(place: Place) -> str:
    """A folder that nobody can make: there is a file in its way."""
    place.prepared(damage=lambda folder: (folder / "file").write_text("no folder"))
    return str(place.root / "given" / "file" / "inside")


def huge() -> ModelSpec:
    return ModelSpec("mlp", {"in_features": 2, "hidden": [20_000] * 150, "out_features": 1})


def three_heads() -> ModelSpec:
    sizes = {"vocab_size": 9, "max_seq_len": 2, "dim": 6, "depth": 1, "num_heads": 3, "out_features": 2}
    return ModelSpec("transformer_classifier", sizes)


class Counting(CountingLayer):
    """Counts what it sees, and does not know of parts of rows."""

    num_counts = 1


def counting() -> nn.Module:
    network = three_heads().build()
    network.norm = nn.Sequential(network.norm, Counting())
    return network


def with_experts(**experts: Any) -> nn.Module:
    sizes = {"vocab_size": 4, "max_seq_len": 4, "dim": 4, "depth": 2, "num_heads": 2}
    return ModelSpec("transformer_lm", {**sizes, "experts": experts}).build()


def frozen() -> nn.Module:
    return nn.Linear(2, 1).requires_grad_(False)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.linear(x)


class Locked(nn.Module):
    """Cannot travel."""

    def __init__(self) -> None:
        super().__init__()
        import threading

        self.linear, self.lock = nn.Linear(2, 1), threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


def not_a_metric(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    raise KeyError("nothing")


def pictures(place: Place, *, deep: bool = False) -> Any:
    """Two PNGs, the second wider or of 16 bits."""
    import numpy as np
    from PIL import Image as Pillow

    files = []
    second = np.zeros((2, 2), np.uint16) if deep else np.zeros((2, 3, 3), np.uint8)
    for pixels in (np.zeros((2, 2, 3), np.uint8), second):
        buffer = BytesIO()
        Pillow.fromarray(pixels).save(buffer, "PNG")
        files.append((buffer.getvalue(),))
    return place.spark.createDataFrame(files, "bytes binary").coalesce(1)


R = BadInput
# fmt: off
WRITING = [
    R("write: string column", lambda p: p.write("text"), "column 'text' has type string", "Vocabulary"),
    R("write: binary column", lambda p: p.write("bytes"), "column 'bytes' has type binary", "Binary"),
    R("write: a string in a struct", lambda p: p.write("named"),
      r"column 'named' has a field 'named\.text' of type string", "select it as a column of its own"),
    R("write: a whole number in a struct that float64 lacks", lambda p: p.write("wide"),
      "the field 'key' of struct.* holds 900719925474.*, and float64.* only up to", "as a column of its own"),
    R("write: map column", lambda p: p.write("lookup"), "column 'lookup' has type map", "; "),
    R("write: wide decimal", lambda p: p.write("exact"), r"'exact' has type decimal\(38,2\)", "cast it"),
    R("write: nulls", lambda p: p.write("holey"), "'holey' has nulls in 1 of 60", "fill or drop them"),
    R("write: arrays of two lengths", lambda p: p.write("uneven"),
      "'uneven' has arrays of 1 to 2", "pad or cut"),
    R("write: no row", lambda p: write_shards(p.pair.limit(0), p.storage), "no training rows", "nothing was"),
    R("write: two columns of one name", lambda p: p.write("label", "label"),
      "two columns .* 'label'", "rename"),
    R("write: a pandas frame", lambda p: write_shards(pd.DataFrame(), p.storage),
      "got pandas", "createDataFrame"),
    R("write: no folder", lambda p: p.write(uri=""), "storage URI must not be empty", "pass a folder"),
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
      "handle_invalid names 'x'", "not among the columns"),
    R("write: kind of no column", lambda p: p.write(columns={"x": Padded()}), "columns names 'x'", ";"),
    R("write: kind by name", lambda p: p.write(columns={"label": "pad"}), r"columns\['label'\]", "such as"),
    R("write: no validation_col", lambda p: p.write(validation_col="x"),
      "validation_col 'x'", "known: features"),
    R("write: validation_col of fractions", lambda p: p.write("features", "half", validation_col="half"),
      "validation column 'half'", "must be boolean or 0/1, got values from 0.0 to"),
    R("write: fraction as text", lambda p: p.write(validation_fraction="0.1"),
      "validation_fraction", "a number between 0 and 1"),
    R("write: long seed", lambda p: p.write(validation_fraction=0.1, seed=2**70),
      "seed must be", "whole number of 64"),
    R("write: list of kinds", lambda p: p.write(columns=["label"]),
      "columns must map names to kinds", "e.g."),
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
    R("write: an image of 16 bits", lambda p: write_shards(
        pictures(p, deep=True), p.storage, columns={"bytes": Image(2, 2)}),
      "'bytes' holds .* more than 8 bits a channel", "convert it to 8 first"),
    R("write: everything held out",
      lambda p: write_shards(p.pair.withColumn("v", F.lit(True)), p.storage, validation_col="v"),
      "no training rows", "of 60, 60 are for validation"),
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
      r"manifest .* only name files in its own folder, got '\.\./x'", "write the shards again"),
    R("read: shard missing",
      lambda p: ShardManifest.load(p.prepared("shards", gone("_shards*/*.parquet"))).verify_files(),
      r"shard file '.*\.parquet' is missing", "write the shards again"),
    R("read: shard cut",
      lambda p: ShardManifest.load(p.prepared("shards", cut("_shards*/*.parquet"))).verify(),
      r"shard file '.*\.parquet' has \d+ bytes where", "write the shards again"),
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


def part_as_weights(place: Place) -> Any:
    rows = place.table.select("uneven", "label")
    uri = place.prepared(damage=lambda folder: write_shards(rows, str(folder), columns={"uneven": Padded()}))
    return place.fit(inputCols=["uneven"], weightCol="uneven.length", run=lambda e: e.fitOnShards(uri))


def unread(place: Place, kind: Any = TorchClassifier, **changes: Any) -> Any:
    """A fit on rows of which none can be read, so what refuses it has written nothing."""
    rows = place.table.where(F.raise_error(F.lit("a row was read")).isNull())
    return place.fit(kind, lambda estimator: estimator.fit(rows), **changes)


def of_two_outputs(place: Place, **changes: Any) -> Any:
    return place.train(TorchEstimator, model=TwoOutputs(), **changes)


def words_of(place: Place, **settings: Any) -> Any:
    """A fit on the column `text` by a tokenizer of whole words, which adds two tokens to each."""
    words = {"?": 0, "<": 1, ">": 2}
    made = Tokenizer(tokenizer_models.WordLevel(words, unk_token="?"))
    made.post_processor = processors.BertProcessing((">", 2), ("<", 1))
    column = settings.pop("column", "text")
    return place.fit(featuresCol=column, columns={column: Tokens.of(made, **settings)})


# fmt: off
TEXTS = [
    R("text: no tokenizer there", lambda p: Tokens.of(p.prepared()),
      "there is no .*/tokenizer.json", "give the folder"),
    R("text: a damaged tokenizer", lambda p: p.write("text", columns={"text": Tokens('{"model": ', 8)}),
      "tokenizer of Tokens cannot be read", "save it again"),
    R("text: no bound", lambda p: words_of(p), "sets no bound to a text", "give one, e.g."),
    R("text: a number", lambda p: words_of(p, column="many", max_length=8),
      "'many' has type bigint: Tokens is for strings", "; "),
    R("text: too long", lambda p: words_of(p, max_length=4, too_long="cut it"),
      "too_long of Tokens must be 'cut' or 'refuse'", "got 'cut it'"),
    R("text: shorter than the special tokens", lambda p: words_of(p, max_length=2),
      "max_length of Tokens for column 'text' is 2, and the tokenizer adds 2", "take at least 3"),
    R("text: nothing to learn from",
      lambda p: train_tokenizer(p.table.where("text is null"), "text"), "'text' holds no text", "filter"),
]
# fmt: on

# fmt: off
COLUMNS = [
    R("fit: typo in a column", lambda p: p.fit(featuresCol="featurez"),
      "'featurez'", "did you mean 'features'"),
    R("fit: typo in the label", lambda p: p.fit(labelCol="labelz"),
      "labelCol 'labelz'", "did you mean 'label'"),
    R("fit: no weight column", lambda p: p.fit(weightCol="w"),
      "weightCol 'w' is not a column", "the DataFrame has"),
    R("fit: string feature", lambda p: p.fit(inputCols=["text"]), "'text' has type string", "Vocabulary"),
    R("fit: more strings than classes", lambda p: p.fit(labelCol="text"), "classes", "; "),
    R("fit: kind of no column", lambda p: p.fit(columns={"txt": Vocabulary()}),
      "columns 'txt' is not a column", "did you mean 'text'"),
    R("fit: kind of an unused column", lambda p: p.fit(columns={"text": Vocabulary()}),
      "columns names 'text', which is neither an input nor a label", "drop it"),
    R("fit: kind of another type", lambda p: p.fit(columns={"features": Vocabulary()}),
      "'features' has type .* Vocabulary is for strings", "; "),
    R("fit: binary feature", lambda p: p.fit(inputCols=["bytes"]),
      "'bytes' has type binary", "have fit decode it"),
    R("fit: bytes that are no image", lambda p: p.fit(featuresCol="bytes", columns={"bytes": Image(4, 4)}),
      r"'bytes' holds 1 bytes that .*no format that Pillow knows\), in row 0 ", "handleInvalid='skip'"),
    R("fit: images in numbers", lambda p: p.fit(columns={"features": Image(4, 4)}),
      "'features' has type array<float>: Image is for bytes", "image struct"),
    R("fit: images in a struct of another type",
      lambda p: p.fit(inputCols=["pair"], columns={"pair": Image(4, 4)}),
      "'pair' has type struct<id:bigint>: Image is for bytes", "image struct"),
    R("fit: an image struct without a size",
      lambda p: p.fit(run=lambda e: e.fit(p.table.withColumn("features", F.lit(None).cast(IMAGE_STRUCT)))),
      "'features' has type struct<origin", r"columns=\{'features': Image\(height, width\)\}"),
    R("fit: an image of no height", lambda p: p.fit(columns={"bytes": Image(0, 4)}),
      "height of Image must be", "from 1 to 16384, got 0"),
    R("fit: a string in a struct", lambda p: p.fit(inputCols=["named"]),
      r"'named' has a field 'named\.text' of type string", "select it as a column of its own"),
    R("fit: wide decimal", lambda p: p.fit(inputCols=["exact"]),
      r"'exact' has type decimal\(38,2\)", "cast it to"),
    R("fit: nulls", lambda p: p.fit(inputCols=["holey"]),
      "'holey' has nulls in 1 of 60", "handleInvalid='skip'"),
    R("fit: uneven arrays", lambda p: p.fit(inputCols=["uneven"]),
      "'uneven' has arrays of 1 to 2", "pad or cut"),
    R("fit: NaN label", lambda p: p.train(labelCol="broken"),
      "'broken' has 1 NaN values", "filter or replace"),
    R("fit: infinite label", lambda p: p.train(TorchRegressor, labelCol="endless"),
      "'endless' has 1 infinite values", "filter or replace"),
    R("fit: label out of range", lambda p: p.train(labelCol="many"),
      r"'many' must lie in 0\.\.1", "StringIndexer"),
    R("fit: label of fractions", lambda p: p.train(labelCol="half"),
      "'half' must hold whole class", "StringIndexer"),
    R("fit: arrays as labels", lambda p: unread(p, labelCol="features"),
      "'features' must hold one class number per row", "got an array"),
    R("fit: arrays of any length as labels",
      lambda p: unread(p, TorchRegressor, labelCol="uneven", columns={"uneven": Ragged()}),
      "'uneven' is ragged, but a label or weight is one dense array", "give it of one length"),
    R("fit: filled arrays as labels",
      lambda p: unread(p, TorchRegressor, labelCol="uneven", columns={"uneven": Padded()}),
      "labelCol 'uneven' is Padded, .* its filling for labels", "of one length, or take TorchEstimator"),
    R("fit: hashes as labels",
      lambda p: unread(p, labelCol="text", columns={"text": HashBuckets(8)}),
      "labelCol 'text' is of HashBuckets", r"take columns=\{'text': Vocabulary\(\)\}"),
    R("fit: arrays as weights", lambda p: unread(p, weightCol="features"),
      "weightCol 'features' must hold one number per row", "got an array"),
    R("fit: part of a column alone",
      lambda p: unread(p, inputCols=["uneven.values"], columns={"uneven": Ragged()}),
      "'uneven.values' is of no use alone", "name 'uneven' itself"),
    R("fit: no rows", lambda p: p.fit(run=lambda e: e.fit(p.table.limit(0))),
      "no training rows", "nothing was written"),
    R("fit: negative weights", lambda p: p.train(weightCol="negative"),
      "weightCol 'negative' must not be", "got -30"),
    R("fit: weights all 0", lambda p: p.train(weightCol="zero"),
      "weightCol 'zero' is 0 in all", "leave the column"),
    R("fit: indicator is an input", lambda p: p.fit(inputCols=["many"], validationIndicatorCol="many"),
      "validationIndicatorCol 'many' must be a column of its own", "copy it"),
    R("fit: best of no held-out rows", lambda p: p.fit(validationIndicatorCol="never", keep="best"),
      "validationIndicatorCol holds out none of the 60 rows", "hold out more"),
    R("fit: two ways to hold out", lambda p: p.fit(validationIndicatorCol="never", validationFraction=0.1),
      "validationFraction or validationIndicatorCol", "not both"),
    R("fit: half a split", lambda p: p.fit(validationFraction=1.5),
      "validationFraction must lie", "between 0 and 1"),
    R("fit: output column there", lambda p: p.fit(predictionCol="half"),
      "column half already exists", "drop it"),
    R("fit: one column for two", lambda p: p.fit(predictionCol="probability"),
      "output columns must differ", "got"),
]
# fmt: on

# fmt: off
SETTINGS = [
    R("fit: no model", lambda p: TorchClassifier().fit(p.table),
      "TorchClassifier needs a model", "ModelSpec"),
    R("fit: model is a class", lambda p: p.fit(model=nn.Linear),
      "model must be", "pass an instance", TypeError),
    R("fit: no such Param", lambda p: p.fit(bachSize=8),
      "no Param 'bachSize'", "mean 'batchSize'", TypeError),
    R("fit: unknown optimizer", lambda p: p.fit(optimizer="adamm"),
      "optimizer must be", "did you mean 'adam"),
    R("fit: unknown loss", lambda p: p.fit(loss="cross_entropi"),
      "loss must be", "did you mean 'cross_entropy'"),
    R("fit: unknown metric", lambda p: p.fit(metrics=["acuracie"]),
      "metrics must be", "did you mean 'accuracy'"),
    R("fit: metric without a name", lambda p: p.fit(metrics=[lambda outputs, labels: 0]),
      "metrics holds a lambda", "name it, as in"),
    R("fit: metric that fails", lambda p: p.train(metrics=[not_a_metric]),
      "metric 'not_a_metric' cannot take outputs and labels .* KeyError", "called as metric"),
    R("fit: metric of many numbers",
      lambda p: p.train(metrics=[{"all": lambda outputs, labels: outputs[None]}]),
      "metric 'all' must give one number per row or one number, got a tensor", "average it"),
    R("fit: metric of one argument", lambda p: unread(p, metrics=[{"mean": lambda x: x}]),
      "metric 'mean' cannot take outputs and labels: too many", r"called as metric\(outputs, labels\)"),
    R("fit: best by a metric of unknown direction", lambda p: unread(p,
        metrics=[{"mean": lambda outputs, labels: outputs.mean()}], monitor="mean", keep="best"),
      "monitor 'train_mean' is of a metric that does not say", "higher_is_better"),
    R("fit: transform that drops rows", lambda p: p.train(transformBatch=lambda x: x[:1]),
      "transformBatch must return 1 inputs of 2 rows, .*got a tensor", "neither drop nor repeat"),
    R("fit: row weights beside a transform of labels",
      lambda p: unread(p, transformBatch=lambda x, labels: (x, labels), weightCol="half"),
      "weightCol 'half' holds weights of rows, which do not follow", "leave out one of the two"),
    R("fit: transform of other inputs", lambda p: unread(p, transformInPrediction=lambda x, y: x),
      r"transformInPrediction cannot take the inputs \['features'\]: missing", "called on a whole batch"),
    R("fit: transform of rows end to end",
      lambda p: unread(p, inputCols=["uneven"], columns={"uneven": Ragged()}, transformBatch=lambda *x: x),
      "transformBatch takes inputs with an entry for each row", r"take Padded\(\) columns"),
    R("fit: transform that cannot travel", lambda p: p.fit(transformInPrediction=Locked()),
      "cannot be sent to the workers", "locks"),
    R("fit: metric of values", lambda p: p.fit(metrics=["rmse"]),
      "metrics of a classification must be among", "'accuracy'.* got 'rmse'"),
    R("fit: no patience", lambda p: p.fit(patience=0), "patience must be at least 1", "leave it unset"),
    R("fit: warm-up longer than all", lambda p: p.train(warmupSteps=500),
      "warmupSteps must be below", "got 500"),
    R("fit: rate scaled from no batch", lambda p: p.fit(scaleLearningRate="linear"),
      "scaleLearningRate needs its baseBatchSize", "such as {'name': 'linear', 'baseBatchSize': 256}"),
    R("fit: rate scaled by no rule", lambda p: p.fit(scaleLearningRate={"name": "linera"}),
      "scaleLearningRate must be 'none' or a dict", "did you mean 'linear'"),
    R("fit: rate scaled by another key",
      lambda p: p.fit(scaleLearningRate={"name": "sqrt", "baseBatchSize": 4, "warmupEpoch": 1}),
      "scaleLearningRate of name 'sqrt' takes the keys .*'warmupEpoch'", "did you mean 'warmupEpochs'"),
    R("fit: two warm-ups",
      lambda p: p.fit(warmupSteps=2, scaleLearningRate={**SCALING, "warmupEpochs": 0.5}),
      r"warmupEpochs \(0.5\) and warmupSteps \(2\) each raise the rate", "set warmupSteps=0"),
    R("fit: warm-up of all epochs", lambda p: p.fit(scaleLearningRate={**SCALING, "warmupEpochs": 2}),
      r"warmupEpochs must be below epochs \(2\), got 2.0", "train for more epochs"),
    R("fit: warm-up of nearly all epochs",
      lambda p: p.train(scaleLearningRate={**SCALING, "warmupEpochs": 1.999}),
      "warmupEpochs must end before the last of the training's steps", "train for more epochs"),
    R("fit: endless warm-up",
      lambda p: p.fit(scaleLearningRate={**SCALING, "warmupEpochs": float("inf")}),
      "scaleLearningRate's warmupEpochs must be", "0 or above and finite, got inf"),
    R("fit: batch sizes without epochs", lambda p: p.fit(batchSizeSchedule=[256, 512]),
      "batchSizeSchedule must map epochs to batch sizes", r"such as {4: 512, 7: 1024} .* got \[256, 512\]"),
    R("fit: a later size of the first epoch", lambda p: p.fit(batchSizeSchedule={1: 16}),
      "batchSizeSchedule's epochs must be whole numbers from 2", "batchSize is the first epoch's, got 1"),
    R("fit: batches of no row", lambda p: p.fit(batchSizeSchedule={2: 0}),
      "batchSizeSchedule's sizes must be", "of at least 1, got 0 from epoch 2 on"),
    R("fit: two batch sizes for an epoch", lambda p: p.fit(batchSizeSchedule=[[2, 16], [2, 32]]),
      "batchSizeSchedule must have one size for an epoch, got two for epoch 2", "drop one"),
    R("fit: later batches of less rows than workers",
      lambda p: p.fit(numWorkers=4, batchSizeSchedule={2: 3}),
      r"batchSizeSchedule counts rows over all workers, .* numWorkers \(4\)", "raise the size or lower"),
    R("fit: empty micro-batches later on",
      lambda p: p.fit(gradientAccumulation=8, batchSizeSchedule={2: 4}),
      r"gradientAccumulation \(8\) .* size of batchSizeSchedule", "lower gradientAccumulation or"),
    R("fit: schedule without step", lambda p: p.train(lrSchedule=lambda: 1.0),
      "lrSchedule", "got one with 0 arg"),
    R("fit: optimizer makes none", lambda p: p.train(optimizer=lambda parameters: None),
      "optimizer must return a torch.optim.Optimizer", "got NoneType"),
    R("fit: two losses, one label", lambda p: p.fit(loss=["mse", "mse"]), "loss must be one for all", "got"),
    R("fit: unknown schedule", lambda p: p.fit(lrSchedule="cosin"),
      "lrSchedule must be", "did you mean 'cosine'"),
    R("fit: unknown monitor", lambda p: unread(p, monitor="train_los", keep="best"),
      "monitor 'train_los'", "did you mean 'train_loss'"),
    R("fit: unknown collective", lambda p: p.fit(collective="mpi"),
      "collective must be", "torch.* got 'mpi'"),
    R("fit: unknown precision", lambda p: p.fit(precision="fp8"), "precision must be", "'bf16'.* got 'fp8'"),
    R("fit: loss of values for classes", lambda p: p.train(loss="KLDivLoss"),
      "loss 'KLDivLoss' takes", "take 'cross"),
    R("fit: loss of two logits", lambda p: p.train(loss="cross_entropy"),
      "'cross_entropy' needs one logit", "set loss"),
    R("fit: text as a number", lambda p: p.fit(epochs="ten"),
      "epochs must be a whole number", "got 'ten'", TypeError),
    R("fit: number as a column", lambda p: p.fit(labelCol=5), "labelCol must be a text", "got 5", TypeError),
    R("fit: number as a choice", lambda p: p.fit(precision=16),
      "precision must be 'fp32', 'bf16' or 'fp16'", "got 16", TypeError),
    R("fit: no epoch", lambda p: p.fit(epochs=0), "epochs must be", "at least 1, got 0"),
    R("fit: negative rate", lambda p: p.fit(learningRate=-1.0), "learningRate must be", "above 0 and finite"),
    R("fit: too many workers", lambda p: p.fit(numWorkers=999, batchSize=4096),
      r"numWorkers \(999\)", "lower numW"),
    R("fit: less rows than workers", lambda p: p.fit(numWorkers=9),
      "batchSize .* numWorkers", "raise batchSize"),
    R("fit: empty micro-batches",
      lambda p: p.fit(gradientAccumulation=9),
      r"gradientAccumulation \(9\) times .* batchSize \(8\)", "lower gradientAccumulation or"),
    R("fit: GPUs where there are none", lambda p: p.fit(useGpu=True), "useGpu", "useGpu=False"),
    R("fit: offload to where it is", lambda p: p.fit(activationOffload="host"),
      "'host'", "activationOffload='disk'"),
    R("fit: parameters in parts with horovod",
      lambda p: p.fit(sharding="parameters", collective="horovod", numWorkers=2),
      "sharding 'parameters'", "set collective='torch'"),
    R("mesh: no dict", lambda p: p.fit(parallelism="tensor"),
      "parallelism must be a dict of axes", "such as", TypeError),
    R("mesh: unknown axis", lambda p: p.fit(parallelism={"tensors": 2}),
      "parallelism takes data, .* got 'tensors'", "did you mean 'tensor'"),
    R("mesh: no workers", lambda p: p.fit(parallelism={"tensor": 0}),
      "'tensor' must be a whole number of workers, 1 or more, got 0", ""),
    R("mesh: half a worker", lambda p: p.fit(parallelism={"tensor": 1.5}),
      "'tensor' must be a whole number", "got 1.5"),
    R("mesh: not the workers", lambda p: p.fit(parallelism={"tensor": 4}, numWorkers=2),
      r"must multiply to numWorkers \(2\), got tensor 4 = 4", "set numWorkers"),
    R("mesh: more than the workers", lambda p: p.fit(parallelism={"data": 2, "tensor": 2}, numWorkers=2),
      r"got data 2 x tensor 2 = 4", "set numWorkers"),
    R("mesh: a plan that is none", lambda p: p.mesh(parallelism={"tensor": 2, "plan": "columns"}),
      "'plan' must be a dict of patterns", "such as"),
    R("mesh: a style that is none", lambda p: p.mesh(parallelism={"tensor": 2, "plan": {"head": "kolumn"}}),
      "style must be one of column, .* got 'kolumn'", "did you mean 'column'"),
    R("mesh: a plan for other layers", lambda p: p.mesh(parallelism={"tensor": 2, "plan": {"tail": "row"}}),
      "plan names 'tail', which fits no layer", "leave it out, or name some of trunk.0.linear, head"),
    R("mesh: a plan of half a pair",
      lambda p: p.mesh(parallelism={"tensor": 2, "plan": {"trunk.0.linear": "column"}}),
      "MLP does not run under parallelism", "name both layers of each pair"),
    R("mesh: a plan that cuts the outputs",
      lambda p: p.mesh(model=ModelSpec("mlp", {"in_features": 2, "hidden": [2], "out_features": 2}),
                       parallelism={"tensor": 2, "plan": {"head": "column"}}),
      r"in evaluation mode output 0 has shape \(2, 1\), but \(2, 2\) in the whole network",
      "use 'column_joined'"),
    R("mesh: no cuts", lambda p: p.fit(parallelism={"pipeline": 2, "cuts": None}),
      "'cuts' must be a list of names", r"such as \['blocks.2'\], got None"),
    R("mesh: a micro-batch without a row for each copy",
      lambda p: p.fit(numWorkers=4, gradientAccumulation=5, parallelism={"data": 2, "pipeline": 2}),
      r"gradientAccumulation \(5\) times the workers that read different rows \(2 of numWorkers 4\)",
      "lower gradientAccumulation or"),
    R("mesh: with steps of one's own",
      lambda p: p.fit(numWorkers=2, localSteps=4, parallelism={"tensor": 2}),
      "with localSteps they step apart", "set localSteps=1, or give all workers to 'data'"),
    R("mesh: with workers that do not wait",
      lambda p: p.fit(numWorkers=2, consistency="asp", parallelism={"tensor": 2}),
      "with consistency 'asp' they step apart", "set consistency='bsp', or give all workers to 'data'"),
    R("mesh: a plan that cuts no matrix",
      lambda p: p.mesh(parallelism={"tensor": 2, "plan": {"trunk.0.norm": "row"}}),
      "plan cannot cut 'trunk.0.norm': .* nn.Linear, got Identity", ""),
    R("mesh: a network without a plan", lambda p: p.mesh(model=SPEC, parallelism={"tensor": 2}),
      "'tensor' needs a plan .* Linear has none", "set parallelism's 'plan'"),
    R("mesh: more parts than columns", lambda p: p.mesh(parallelism={"tensor": 4}, numWorkers=4),
      "gives 'tensor' 4 workers, more than 'trunk.0.linear' can be cut into", "give fewer"),
    R("mesh: something else between", lambda p: p.mesh(parallelism={"tensor": 2, "between": "part"}),
      "'between' must be one of whole, parts, got 'part'", "did you mean 'parts'"),
    R("mesh: parts between without tokens", lambda p: p.mesh(parallelism={"tensor": 2, "between": "parts"}),
      "MLP cannot have parts of the tokens between its cut layers", "set parallelism's 'between'"),
    R("mesh: heads that do not divide",
      lambda p: p.mesh(model=three_heads(), parallelism={"tensor": 2}),
      r"'tensor' must divide num_heads \(3\), got 2", "set num_heads to a multiple"),
    R("mesh: layers that count parts of rows",
      lambda p: p.mesh(model=counting(), parallelism={"sequence": 2}),
      r"leave layer 'norm\.1' a part of each row", "set 'sequence' to 1"),
    R("mesh: rolled back with rows on their way",
      lambda p: p.mesh(onNonFinite="rollback", checkpointEverySteps=5,
                       parallelism={"pipeline": 2, "schedule": "2bw"}),
      "onNonFinite 'rollback' .* schedule '2bw'", "set onNonFinite='skip'"),
    R("mesh: no chunk of time", lambda p: p.mesh(parallelism={"pipeline": 2, "time_chunks": 0}),
      "'time_chunks' must be a whole number of chunks", "1 or more, got 0"),
    R("mesh: chunks of time without stages", lambda p: p.mesh(parallelism={"data": 2, "time_chunks": 4}),
      r"'time_chunks' \(4\) passes parts of rows", "give workers to 'pipeline'"),
    R("mesh: chunks of time of a network without any",
      lambda p: p.mesh(parallelism={"pipeline": 2, "time_chunks": 4}),
      "'time_chunks' needs a network with links that go along time .* MLP has none", "give its links"),
    R("mesh: chunks of time beside parts of rows",
      lambda p: p.mesh(numWorkers=4, parallelism={"pipeline": 2, "sequence": 2, "time_chunks": 4}),
      "'time_chunks' goes with the axes 'data', 'shard' and 'pipeline'", "leave the other axes"),
    R("mesh: chunks of time with backward passes in halves",
      lambda p: p.mesh(parallelism={"pipeline": 2, "schedule": "zero_bubble", "time_chunks": 4}),
      "'time_chunks' takes backward passes .* schedule 'zero_bubble' splits", "set schedule='1f1b'"),
    R("mesh: with horovod", lambda p: p.mesh(collective="horovod", parallelism={"tensor": 2}),
      "collective 'horovod' does not have", "set collective='torch'"),
    R("mesh: 'shard' without sharding", lambda p: p.mesh(parallelism={"shard": 2}),
      "'shard' cuts over its workers what sharding names, got sharding 'none'", "set sharding"),
    R("mesh: parts between with parameters in parts",
      lambda p: p.mesh(parallelism={"tensor": 2, "between": "parts"}, sharding="parameters"),
      "'between' \"parts\" sums gradients of whole parameters", "set sharding='gradients'"),
    R("mesh: stages in parts", lambda p: p.mesh(parallelism={"pipeline": 2}, sharding="parameters"),
      "sharding 'parameters' gathers a block in the same pass", "set sharding='gradients'"),
    R("mesh: with compression", lambda p: p.mesh(parallelism={"tensor": 2}, gradientCompression="sign"),
      "gradientCompression sums whole matrices", "set gradientCompression='none'"),
    R("mesh: with local steps", lambda p: p.mesh(parallelism={"tensor": 2}, localSteps=4),
      "exchange inside every step", "set localSteps=1"),
    R("mesh: with ranks apart", lambda p: p.mesh(parallelism={"tensor": 2}, consistency="asp"),
      "exchange inside every step", "consistency='bsp'"),
    R("mesh: with an optimizer of whole parameters",
      lambda p: p.mesh(parallelism={"tensor": 2}, optimizer="adafactor"),
      "optimizer 'adafactor' looks at whole ones", "or give the workers to 'pipeline'"),
    R("mesh: sharded stages with an optimizer of whole parameters",
      lambda p: p.mesh(parallelism={"pipeline": 2}, sharding="optimizer", optimizer="lamb"),
      "parts of a stage's parameters, and optimizer 'lamb' looks at whole ones", "set sharding='none'"),
    R("mesh: with sums of one bit", lambda p: p.mesh(parallelism={"pipeline": 2}, optimizer="adam1bit"),
      "optimizer 'adam1bit' sums whole gradients", "set optimizer='adamw'"),
    R("mesh: with adapters",
      lambda p: p.mesh(parallelism={"tensor": 2}, lora={"rank": 1, "targets": ["head"]}),
      "lora adds matrices", "leave lora unset"),
    R("mesh: compiled", lambda p: p.mesh(parallelism={"tensor": 2}, compile=True),
      "exchanges inside it", "set compile=False"),
    R("mesh: with the noise scale", lambda p: p.mesh(parallelism={"tensor": 2}, noiseScale=True),
      "noiseScale compares whole gradients", "leave noiseScale unset"),
    R("mesh: that may shrink", lambda p: p.mesh(parallelism={"tensor": 2}, minWorkers=1),
      r"needs all of its workers, and minWorkers \(1\)", "leave minWorkers unset"),
    R("mesh: planned, and none fits",
      lambda p: p.train(model=DEEP, numWorkers=2, parallelism="auto", memoryBudget=10),
      "'auto' found none: no mesh of 2 workers fits", "give more workers or memory"),
    R("fit: no chain to recompute", lambda p: p.train(gradientCheckpointing="sqrt"),
      "found no chain of blocks", ";"),
    R("fit: larger than the host", lambda p: p.train(model=huge()),
      "training needs at least .* per worker .* are available", "take an optimizer"),
    R("fit: budget of no size", lambda p: p.fit(memoryBudget="4x"), "memoryBudget must be", "such as '4g'"),
    R("fit: budget too small", lambda p: p.train(memoryBudget=10), "memoryBudget is 10 B", "no settings fit"),
    R("fit: one threshold", lambda p: p.train(thresholds=[0.5]),
      "thresholds must hold", "each of the 2 classes, got 1"),
    R("fit: callback is a class", lambda p: p.fit(callbacks=[dict]),
      "callbacks must be", "pass an inst", TypeError),
    R("fit: no such parameter", lambda p: unread(p, parameterGroups=[{"params": "x"}]), "'x'", "linear"),
    R("fit: unwritable storage", lambda p: p.fit(storageUri=blocked(p)),
      "cannot be written", "choose a folder"),
    R("fit: shards gone", lambda p: p.on_damaged(gone), "parquet' is missing", "write the shards again"),
    R("fit: shards cut", lambda p: p.on_damaged(cut),
      r"parquet' has \d+ bytes where", "write the shards again"),
    R("fitOnShards: part of a column as weights", part_as_weights,
      "have no column 'uneven.length'", "known: uneven, label"),
    R("fit: no shards", lambda p: p.fit(run=lambda e: e.fitOnShards(p.storage)),
      "holds no shards", "write_shards"),
]
# fmt: on

# fmt: off
NETWORKS = [
    R("model: nothing to train", lambda p: unread(p, model=nn.Flatten()),
      "Flatten has no trainable", "unfreeze some"),
    R("model: all frozen", lambda p: p.train(model=frozen()),
      "Linear has no trainable parameters", "unfreeze some"),
    R("model: other inputs",
      lambda p: p.train(model=ModelSpec("linear", {"in_features": 5, "out_features": 1})),
      r"Linear cannot take the input columns \[features \(2, 2\) float32\]", "match the model"),
    R("model: more inputs", lambda p: p.train(inputCols=["features", "half"]),
      "Linear cannot take", "match the model"),
    R("model: other outputs",
      lambda p: p.train(TorchRegressor, model=nn.Linear(2, 3)),
      r"Linear must return \(batch,\) or \(batch, 1\) for labelCol 'label', got", "change the model's last"),
    R("model: two outputs, one label", of_two_outputs, "TwoOutputs", "labelCols"),
    R("model: cannot travel", lambda p: p.fit(model=Locked()),
      "cannot be sent to the workers", "without references"),
    R("spec: unknown name", lambda p: ModelSpec("mlpp"), "unknown model 'mlpp'", "did you mean 'mlp'"),
    R("spec: no such module", lambda p: ModelSpec("no.such:Net").build(),
      "'no.such:Net' could not be imported", "give the class"),
    R("spec: of the main script", lambda p: ModelSpec("__main__:Net"),
      "'__main__:Net' is defined in", "move the class"),
    R("spec: not JSON", lambda p: ModelSpec("mlp", {"hidden": torch.ones(1)}),
      "argument 'hidden'", "must be JSON"),
    R("spec: wrong argument", lambda p: ModelSpec("linear", {"width": 2}).build(),
      "'linear' does not take", "it takes in_features"),
    R("spec: experts that choose, causal", lambda p: with_experts(num_experts=2, router="expert_choice"),
      "router 'expert_choice' has later tokens", "take 'switch' or 'gshard'"),
    R("spec: experts without a number", lambda p: with_experts(router="switch"),
      "experts must give num_experts", "such as"),
    R("spec: no network", lambda p: ModelSpec("json:loads").build(),
      "'json:loads' must be", "torch.nn.Module"),
    R("memory: no batch", lambda p: plan_memory(SPEC, None), "batch must be", r"\(inputs, labels\)"),
    R("memory: other shapes", lambda p: plan_memory(SPEC, columns(3)),
      "memory of model linear", "check the batch"),
    R("memory: rows of two numbers", lambda p: plan_memory(SPEC, uneven()),
      "same number of rows", "first dimension"),
    R("memory: budget of no size", lambda p: plan_memory(SPEC, columns(2), budget="x"),
      "budget", "such as '4g'"),
    R("memory: unknown setting", lambda p: plan_memory(SPEC, columns(2), sharding="all"),
      "sharding", "'optimizer'"),
]
# fmt: on


def columns(width: int) -> tuple[Any, Any]:
    """A batch for `plan_memory`."""
    return (((4, width), "float32"), ((4,), "float32"))


def uneven() -> tuple[Any, Any]:
    return (((4, 2), "float32"), ((5,), "float32"))


# fmt: off
RECOVERY = [
    R("fit: more workers than there are", lambda p: p.fit(minWorkers=2),
      "minWorkers .2. .* numWorkers", "lower"),
    R("fit: restarts below 0", lambda p: p.fit(maxRestarts=-1), "maxRestarts must be", "0 is for no restart"),
    R("fit: a checkpoint every 0 steps", lambda p: p.fit(checkpointEverySteps=0),
      "checkpointEverySteps", "least 1"),
    R("fit: negative interval", lambda p: p.fit(checkpointEverySeconds=-1),
      "checkpointEverySeconds", "0 or above"),
    R("fit: keeps no checkpoint", lambda p: p.fit(keepCheckpoints=0), "keepCheckpoints", "at least 1, got 0"),
    R("fit: no time", lambda p: p.fit(timeoutSeconds=0.0), "timeoutSeconds", "above 0 and finite"),
    R("fit: unknown onNonFinite", lambda p: p.fit(onNonFinite="ignore"), "onNonFinite", "'rollback'"),
    R("fit: back to no checkpoint", lambda p: p.fit(onNonFinite="rollback", checkpointEverySeconds=0),
      "'rollback' goes back to the last checkpoint, and none is asked for", "set checkpointEverySteps"),
    R("resume: no folder", lambda p: p.fit(resume=True),
      "resume=True goes on with", "set runUri to that folder"),
    R("resume: not asked for", lambda p: p.train(runUri=p.prepared("run")), "holds a run", "set resume=True"),
    R("resume: no run", lambda p: go_on(p, "shards"), "must be a new or empty folder", "give another folder"),
    R("resume: unwritable folder", lambda p: p.train(runUri=blocked(p)),
      "cannot be written", "choose a folder"),
    R("resume: other settings", lambda p: go_on(p, "run", learningRate=0.5),
      "cannot be resumed, .* learningRate: 0.001 -> 0.5", "set them back, or give another folder",
      RunRefusedError),
    R("resume: other batches later on", lambda p: go_on(p, "run", epochs=2, batchSizeSchedule={2: 9}),
      r"cannot be resumed, .* batchSizeSchedule: \[\] -> \[\[2, 9\]\]", "set them back",
      RunRefusedError),
    R("resume: other network", lambda p: go_on(p, "run", model=nn.Linear(2, 1)),
      "cannot be resumed, .* model: ", "set them back", RunRefusedError),
    R("resume: damaged record", lambda p: p.train(runUri=p.prepared("run", cut("run.json")), resume=True),
      "run.json is damaged", "give another folder", RunRefusedError),
    R("resume: one folder for two fits",
      lambda p: p.fit(run=lambda e: e.fit(p.pair, [{e.epochs: 1}, {e.epochs: 2}]), runUri=p.prepared()),
      "is the folder of one training, and 2 parameter maps", "leave runUri unset"),
]
# fmt: on


# fmt: off
TUNING = [
    R("freeze: misspelt", lambda p: unread(p, freeze="lineer.weight"),
      "'lineer.weight', which matches no parameter", "did you mean 'linear.weight'"),
    R("freeze: everything", lambda p: unread(p, freeze=["*"]),
      "freeze leaves no parameter of model Linear", "narrow its patterns"),
    R("lora: no targets", lambda p: p.fit(lora={"rank": 2}), "lora needs 'targets'", "it takes the keys"),
    R("lora: no such layer", lambda p: unread(p, lora={"rank": 2, "targets": ["*.query"]}),
      "lora's targets: .* '.*query' matches no linear layer", "they are"),
    R("lora: a layer of more than W x + b",
      lambda p: p.train(model=nn.Sequential(Doubled(2, 2)), lora={"rank": 1, "targets": ["*"]}),
      r"lora's targets: layer '0' computes more than W x \+ b", "choose other layers"),
    R("pretrained: a pickle",
      lambda p: p.train(pretrained=p.prepared(damage=lambda f: (f / "pytorch_model.bin").touch())),
      "pytorch_model.bin is a pickle", "convert it once: safetensors"),
    R("pretrained: another network",
      lambda p: p.train(model=DEEP, pretrained=p.prepared("saved")),
      "is not of model MLP: it lacks 'trunk", "name what stays out in 'ignore'"),
    R("emaDecay of 1", lambda p: p.fit(emaDecay=1.0), "emaDecay must lie", "between 0 and 1"),
]
# fmt: on


class Doubled(nn.Linear):
    """A layer with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def go_on(place: Place, copy_of: str, **changes: Any) -> Any:
    """Resumes the run in a copy of a folder."""
    settings = {"epochs": 1, "batchSize": 1024, "runUri": place.prepared(copy_of), "resume": True}
    return place.train(**(settings | changes))


# fmt: off
MODELS = [
    R("transform: no weights", lambda p: TorchModel(model=SPEC).transform(p.pair),
      "has no weights", "get one from"),
    R("transform: column missing", lambda p: p.model.transform(p.table.drop("features")),
      "'features' is not", ";"),
    R("transform: string column",
      lambda p: p.model.transform(p.table.select(F.col("text").alias("features"))),
      "'features' has type string", "Vocabulary"),
    R("transform: output column there",
      lambda p: p.model.transform(p.table.withColumnRenamed("half", "prediction")),
      "column prediction already exists", "drop it first"),
    R("transform: no rows at once", lambda p: p.model.copy().setInferenceBatchSize(0).transform(p.pair),
      "inferenceBatchSize", "at least 1, got 0"),
    R("transform: three thresholds",
      lambda p: p.model.copy().setThresholds([0.1, 0.2, 0.3]).transform(p.pair),
      "thresholds must hold", "each of the 2 classes, got 3"),
    R("export: unknown format", lambda p: p.model.export(f"{p.storage}/x", "tf"),
      "format must be", "'onnx'.* got 'tf'"),
    R("save: folder in use", lambda p: p.model.save(p.prepared("saved")), "exists already", "overwrite"),
    R("save: over something else", lambda p: p.model.write().overwrite().save(p.prepared("shards")),
      "holds something else than a saved stage", "give a folder of its own"),
    R("save: unwritable folder", lambda p: p.model.save(blocked(p)), "cannot be written", "choose a folder"),
    R("load: no model", lambda p: TorchModel.load(p.prepared()),
      "holds no saved TorchModel", "give the folder that"),
    R("load: other stage", lambda p: p.load(lambda f: None, TorchModel),
      "not a TorchModel", "load it with that class"),
    R("load: description cut", lambda p: p.load(cut("ringspark.json")), "is damaged", "save the stage again"),
    R("load: newer format", lambda p: p.load(edited("ringspark.json", lambda d: d | {"format_version": 9})),
      "its format is 9", "upgrade ringspark"),
    R("load: weights missing", lambda p: p.load(gone("weights/model.safetensors")),
      "model.safetensors", "; "),
    R("load: weights cut", lambda p: p.load(cut("weights/model.safetensors")),
      "has .* bytes, .* were written", "save the model"),
    R("load: record missing", lambda p: p.load(gone("weights/checkpoint.json")), "holds no checkpoint", "; "),
    R("load: weights of another network", lambda p: p.load(edited("ringspark.json", other_network)).module(),
      "is not of this model", "take the model that it was made of"),
    R("load: code without leave", lambda p: TorchClassifier.load(saved_with_code(p)),
      "holds pickled Python code", "RINGSPARK_ALLOW_PICKLE=1"),
    R("load: first weights missing",
      lambda p: TorchClassifier.load(saved_estimator(p, gone("model.safetensors"))),
      "network of 'model' cannot be loaded: model.safetensors is missing", "save the stage again"),
    R("load: program missing", lambda p: TorchModel.load(saved_program(p, gone("model.program.json"))),
      "network of 'model' cannot be loaded: model.program.json .* is missing", "save the stage again"),
    R("load: program with a function of Python",
      lambda p: TorchModel.load(saved_program(p, edited("model.program.json", with_system_call))),
      "asks for 'os.system', which is no operator that a program may name", "save the stage again"),
    R("load: layer of another torch",
      lambda p: TorchClassifier.load(saved_estimator(p, edited("ringspark.json", with_other_layer))),
      "torch .* has no layer 'Linear9'", "take the torch it was saved with"),
    R("fit: a saved program", lambda p: p.train(model=program_of(p)),
      "model is a saved program, which predicts and cannot be trained", "give a network of its class"),
]
# fmt: on


def other_network(description: dict[str, Any]) -> dict[str, Any]:
    spec = ModelSpec("linear", {"in_features": 3, "out_features": 1})
    return description | {"model": spec.to_json()}


class Line(nn.Linear):
    """A network of a class of the user's own."""


def saved_with_code(place: Place) -> str:
    return place.prepared(damage=lambda f: TorchClassifier(model=Line(2, 1)).save(str(f)))


def saved_estimator(place: Place, damage: Callable[[Path], None]) -> str:
    """An estimator whose network is described in JSON, after some damage."""

    def save(folder: Path) -> None:
        TorchClassifier(model=nn.Linear(2, 1)).save(str(folder))
        damage(folder)

    return place.prepared(damage=save)


def saved_program(place: Place, damage: Callable[[Path], None] = lambda folder: None) -> str:
    """A model whose network is a program, after some damage."""

    def save(folder: Path) -> None:
        module = Line(2, 1)
        save_checkpoint(str(place.root / "weights"), module)
        columns = [Column(name="features", kind=Array("float32", shape=(2,)))]
        model = TorchModel(model=module)
        model._set_trained(str(place.root / "weights"), [(1,)], None, columns=columns).save(str(folder))
        damage(folder)

    return place.prepared(damage=save)


def program_of(place: Place) -> nn.Module:
    return TorchModel.load(saved_program(place)).module()


def with_system_call(text: dict[str, Any]) -> dict[str, Any]:
    return text | {"steps": [["os.system", ["true"], {}]]}


def with_other_layer(description: dict[str, Any]) -> dict[str, Any]:
    description["modules"]["model"]["layers"]["layer"] = "Linear9"
    return description


# fmt: off
WINDOWS = [
    R("windows: null key", lambda p: fit_windows(p, keyCols="holey"),
      "'holey' is null where holey=null, many=7", "fill or drop it first, or .* handleInvalid='skip'"),
    R("windows: two rows of one time", lambda p: fit_windows(p, timeCol="zero_whole"),
      "two rows have never=false, zero_whole=0", "make one row of them first"),
    R("windows: null value", lambda p: fit_windows(p, valueCols="holey"),
      "'holey' is null where never=false, many=7", "fill or drop it first"),
    R("windows: no rows", lambda p: fit_windows(p, steps=0), "steps must be", "at least 1, got 0"),
    R("windows: no such key", lambda p: fit_windows(p, keyCols="nevr"),
      "keyCols 'nevr' is not a column", "did you mean 'never'"),
    R("windows: time in words", lambda p: fit_windows(p, timeCol="text"),
      "timeCol 'text' has type string", "make it a timestamp"),
    R("windows: over a stream",
      lambda p: windows(keyCols=[], timeCol="value", valueCols="value", steps=2).transform(
          p.spark.readStream.format("rate").load()),
      "takes no stream", "foreachBatch"),
]
# fmt: on


def windows(**params: Any) -> Any:
    # Imported here, because `ringspark.extras` may be missing.
    from ringspark.estimators import SequenceWindows

    return SequenceWindows(**params)


def fit_windows(place: Place, **changes: Any) -> Any:
    """A fit on windows over the table's rows, each with some Params changed."""
    params = {"keyCols": "never", "timeCol": "many", "valueCols": "half", "steps": 2} | changes
    table = place.table.drop("features").withColumn("zero_whole", F.col("zero").cast("int"))
    return place.fit(run=lambda estimator: estimator.fit(windows(**params).transform(table)))


# fmt: off
JOB_LINES = [
    R("etl: fraction of 2", lambda p: p.job("etl", "--fraction", "2"),
      "--fraction", "at most 1, got '2'", RefusedError),
    R("etl: results there", lambda p: p.job("etl", "--no-overwrite", "--output", with_results(p)),
      "there are results in", "give --overwrite or another --output", RefusedError),
    R("train: no shards", lambda p: p.job("train", "--data", p.prepared()),
      "holds no shards", "write them", RefusedError),
    R("train: no worker", lambda p: p.job("train", "--num-workers", "0"),
      "--num-workers", "must be at least 1, got 0", RefusedError),
    R("train: text as a rate", lambda p: p.job("train", "--learning-rate", "x"),
      "--learning-rate", "must be a number, got 'x'", RefusedError),
    R("train: misspelt option", lambda p: p.job("train", "--epoch", "1"),
      "--epoch 1", "see --help", RefusedError),
    R("train: restarts below 0", lambda p: p.job("train", "--max-restarts", "-1"),
      "--max-restarts", "0 is for no restart", RefusedError),
    R("train: time as text", lambda p: p.job("train", "--timeout-seconds", "x"),
      "--timeout-seconds", "must be a number, got 'x'", RefusedError),
    R("train: unfinished run",
      lambda p: p.job("train", "--data", with_unfinished_run(p)),
      "current holds an unfinished run", "give --resume to go on with it, --no-resume", RefusedError),
    R("score: no model", lambda p: p.job("score", "--data", p.prepared()),
      "no model at", "run jobs/train.py", RefusedError),
    R("shards: no command", lambda p: p.job("shards"), "required: COMMAND", "see --help", RefusedError),
    R("shards: no shards", lambda p: p.job("shards", "verify", p.prepared()),
      "holds no shards", "write", RefusedError),
    R("shards: one is missing",
      lambda p: p.job("shards", "verify", p.prepared("shards", gone("_shards*/*.parquet"))),
      "is missing", "write the shards again", RefusedError),
    R("shards: no such entry", lambda p: p.job("shards", "remove", p.prepared(), "ab"),
      "ab", ";", RefusedError),
]
# fmt: on


def with_unfinished_run(place: Place) -> str:
    """A job's folder in which a training has left a checkpoint."""

    def damage(folder: Path) -> None:
        found = list(folder.iterdir())
        (folder / "shards").mkdir()
        for path in found:
            path.rename(folder / "shards" / path.name)
        run = folder / "runs" / "current"
        (run / "checkpoints" / "step-0000000001").mkdir(parents=True)
        for name in ("owner.json", "run.json", "checkpoints/step-0000000001/checkpoint.json"):
            (run / name).write_text("{}")

    return place.prepared("shards", damage)


def with_results(place: Place) -> str:
    place.prepared("shards", lambda folder: (folder / "shards").mkdir())
    return str(place.root / "given")


TABLES = [
    R("fitOnParquet: no such folder", lambda p: on_table(p, f"{p.storage}/none"),
      r"there is no folder '.*none'", "give one that holds Parquet files"),
    R("fitOnParquet: a folder without tables", lambda p: on_table(p, p.prepared()),
      "holds no Parquet files", "give a folder that does"),
    R("fitOnParquet: a column of another type in one file",
      lambda p: on_table(p, p.prepared(damage=with_table(features=[[1, 2]] * 4))),
      r"'.*b\.parquet' holds column 'features' as list<int64> where .* list<double>", "cast it and write"),
    R("fitOnParquet: a file that is none",
      lambda p: on_table(p, p.prepared(damage=with_table(text="features"))),
      r"'.*b\.parquet' cannot be read as Parquet", "remove it"),
    R("fitOnParquet: nulls",
      lambda p: on_table(p, p.prepared(damage=with_table(label=[0.0, None, 1.0, 1.0]))),
      "'label' has nulls in 1 of 8 rows, and a table is read as it is", "fill or drop them"),
    R("fitOnParquet: single rows to hold out",
      lambda p: on_table(p, p.prepared(damage=with_table()), validationFraction=0.5),
      "validationFraction draws single rows", "name a column of its folders by validationIndicatorCol"),
    R("fitOnParquet: a struct", lambda p: on_table(p, on_structs(p)),
      "'features' has kind struct, which is made when rows are written", "use fit"),
    R("fitOnDelta: no Delta table", lambda p: p.fit(run=lambda e: e.fitOnDelta(p.storage)),
      "cannot be read as a Delta table", "give the folder that holds _delta_log"),
]  # fmt: skip


def on_table(place: Place, uri: str, **changes: Any) -> Any:
    """A fit on a folder of Parquet files."""
    return place.fit(run=lambda estimator: estimator.fitOnParquet(uri), **changes)


def on_structs(place: Place) -> str:
    """A folder with a Parquet file of structs."""
    table = pa.table({"features": [{"a": 1.0, "b": 2.0}] * 4, "label": [0.0, 1.0] * 2})
    return place.prepared(damage=lambda folder: pq.write_table(table, folder / "a.parquet"))


def with_table(text: str = "", **changes: Any) -> Callable[[Path], None]:
    """Puts two files into the folder: the second has other columns, or is that text."""

    def write(folder: Path) -> None:
        columns = {"features": [[1.0, 2.0]] * 4, "label": [0.0, 1.0] * 2}
        pq.write_table(pa.table(columns), folder / "a.parquet")
        if text:
            (folder / "b.parquet").write_text(text)
        else:
            pq.write_table(pa.table(columns | changes), folder / "b.parquet")

    return write


BAD_INPUTS = [
    *WRITING,
    *READING,
    *COLUMNS,
    *TEXTS,
    *SETTINGS,
    *NETWORKS,
    *TUNING,
    *RECOVERY,
    *MODELS,
    *WINDOWS,
    *JOB_LINES,
    *TABLES,
]

# Names of the rows whose check is in `ringspark.extras`.
OF_EXTRAS = frozenset(
    ["mesh: with compression", "mesh: planned, and none fits", *(row.name for row in WINDOWS)]
)
