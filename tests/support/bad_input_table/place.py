"""What the rows of the table use: the row itself, a `Place` to run it in, and damage to its files."""

import json
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from pyspark.sql import functions as F
from torch import nn

from ringspark.estimators import TorchClassificationModel, TorchClassifier
from ringspark.jobs import cli, etl, score, shards, train
from ringspark.models import ModelSpec
from ringspark.pipelines import write_shards

SPEC = ModelSpec("linear", {"in_features": 2, "out_features": 1})
DEEP = ModelSpec("mlp", {"in_features": 2, "hidden": [2], "out_features": 1})
JOBS = {"etl": etl, "train": train, "score": score, "shards": shards}
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


def unread(place: Place, kind: Any = TorchClassifier, **changes: Any) -> Any:
    """A fit on rows of which none can be read, so what refuses it has written nothing."""
    rows = place.table.where(F.raise_error(F.lit("a row was read")).isNull())
    return place.fit(kind, lambda estimator: estimator.fit(rows), **changes)


class Locked(nn.Module):
    """Cannot be sent to the workers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lock = nn.Linear(2, 1), threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]
