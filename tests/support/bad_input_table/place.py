"""A row of the table, the `Place` in which it runs, and functions that damage its files."""

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

import demo
import etl
import score
from ringspark.estimators import TorchClassificationModel, TorchClassifier
from ringspark.estimators.options.checked import WrongTypeError
from ringspark.jobs import cli, command
from ringspark.models import ModelSpec
from ringspark.pipelines import write_shards

SPEC = ModelSpec("linear", {"in_features": 2, "out_features": 1})
DEEP = ModelSpec("mlp", {"in_features": 2, "hidden": [2], "out_features": 1})
JOBS = {"demo": demo, "etl": etl, "score": score}
NUMBERS = ["broken", "endless", "many", "half", "negative", "zero"]


class RefusedError(Exception):
    """Error that a job printed."""


class Place:
    """The data of all rows, and an empty folder `root` for each row.

    Attributes:
        table: 60 rows with columns of many types.
        storage: `storageUri` of the fits: an empty folder that stays empty.
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
        """Makes a folder: empty, or a copy of the "shards", the "run" or the "saved" model."""
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
        """Returns every file and folder below the root, with its size."""
        return {(str(path), path.stat().st_size if path.is_file() else 0) for path in self.root.rglob("*")}

    def train(self, kind: Any = TorchClassifier, **changes: Any) -> Any:
        """Fits on existing shards, so the refusal needs no Spark job."""
        return self.fit(kind, lambda estimator: estimator.fitOnShards(str(self._shards)), **changes)

    def fit(self, kind: Any = TorchClassifier, run: Any = None, **changes: Any) -> Any:
        """Fits on the table with some settings changed, or passes the estimator to `run`."""
        params: dict[str, Any] = {"model": SPEC, "epochs": 2, "batchSize": 8, "storageUri": self.storage}
        if "runUri" in changes:
            params["storageUri"] = None
        estimator = kind(**(params | {"showProgress": False} | changes))
        return estimator.fit(self.table) if run is None else run(estimator)

    def mesh(self, **changes: Any) -> Any:
        """Fits a network of two layers on two workers."""
        return self.fit(**({"model": DEEP, "numWorkers": 2} | changes))

    def write(self, *columns: str, **settings: Any) -> Any:
        """Writes some columns."""
        given = self.table.select(*columns) if columns else self.pair
        return write_shards(given, **({"uri": f"{self.storage}/shards"} | settings))

    def stream(self) -> Any:
        """Writes a streaming DataFrame."""
        return write_shards(self.spark.readStream.format("rate").load(), self.storage)

    def on_damaged(self, damage: Callable[[str], Callable[[Path], None]]) -> Any:
        """Fits on shards after damage to one of them."""
        uri = self.prepared("shards", damage("_shards*/*.parquet"))
        return self.fit(run=lambda estimator: estimator.fitOnShards(uri))

    def load(self, damage: Callable[[Path], Any], kind: Any = TorchClassificationModel) -> Any:
        """Loads the saved model after damage."""
        return kind.load(self.prepared("saved", damage))

    def job(self, name: str, *options: str) -> None:
        """Runs a script of the flights, or a command of `ringspark`, in this process."""
        errors = StringIO()
        with redirect_stderr(errors):
            try:
                if name in JOBS:
                    code = cli.main(JOBS[name].build_parser(), JOBS[name].run, options)
                else:
                    code = command.main([name, *options])
            except SystemExit as ended:
                code = ended.code
        if code:
            raise RefusedError(errors.getvalue().removesuffix("\n"))


@dataclass(frozen=True)
class BadInput:
    """One row: its error message must match `subject`, followed by `remedy`.

    Attributes:
        do: Raises `error`.
        remedy: What to do, or the values that are allowed.
    """

    name: str
    do: Callable[[Place], Any]
    subject: str
    remedy: str
    error: type[Exception] = ValueError

    def problem(self, error: BaseException) -> str:
        """Returns what is wrong with the error, or an empty text."""
        text = str(error)
        # A value of a wrong type is a TypeError and a ValueError.
        if type(error) not in (self.error, WrongTypeError):
            return f"raised {type(error).__name__}, not {self.error.__name__}"
        if "\n" in text or "Traceback" in text or "py4j" in text:
            return "is more than one line"
        if re.search(f"{self.subject}.*{self.remedy}", text) is None:
            return f"lacks /{self.subject}/ or, behind it, /{self.remedy}/"
        return ""


def edited(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Returns a function that changes the JSON of a file in a folder."""

    def damage(folder: Path) -> None:
        path = folder / name
        value = json.loads(path.read_text())
        path.write_text(json.dumps(change(value)))

    return damage


def cut(pattern: str) -> Callable[[Path], None]:
    """Returns a function that cuts the second half off the first matching file."""

    def damage(folder: Path) -> None:
        path = next(iter(sorted(folder.glob(pattern))))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return damage


def gone(pattern: str) -> Callable[[Path], None]:
    """Returns a function that removes the first matching file."""
    return lambda folder: next(iter(sorted(folder.glob(pattern)))).unlink()


def blocked(place: Place) -> str:
    """Returns a path that cannot be a folder, because a file is its parent."""
    place.prepared(damage=lambda folder: (folder / "file").write_text("no folder"))
    return str(place.root / "given" / "file" / "inside")


def unread(place: Place, kind: Any = TorchClassifier, **changes: Any) -> Any:
    """Fits on rows that raise an error when they are read: the refusal must come first."""
    rows = place.table.where(F.raise_error(F.lit("a row was read")).isNull())
    return place.fit(kind, lambda estimator: estimator.fit(rows), **changes)


class Locked(nn.Module):
    """Cannot be sent to the workers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lock = nn.Linear(2, 1), threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)
