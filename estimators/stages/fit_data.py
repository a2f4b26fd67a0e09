"""Writes the shards of a DataFrame once for all fits that read the same columns and rows.

The first fit of a `CrossValidator`'s fold writes the shards, and the last fit removes them.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from ringspark.estimators.columns.expressions import all_of
from ringspark.estimators.columns.inputs import ModelInput, bind
from ringspark.estimators.techniques import FUNCTIONS
from ringspark.estimators.training.settings.choices import DataPlace
from ringspark.pipelines import ShardManifest, storage, write_shards
from ringspark.pipelines.columns import Column, quote
from ringspark.pipelines.kinds import HashBuckets, TableRow, Vocabulary, kind_from_json
from ringspark.pipelines.kinds.scalar import SPARK_DTYPES
from ringspark.pipelines.spark_paths import to_spark_uri
from ringspark.pipelines.table_files import InPlaceError
from ringspark.pipelines.writing.commit import discard_shards

_logger = logging.getLogger(__name__)

AUTO_BYTES = 1 << 30
"""Size of the smallest table that data="auto" reads in place, in bytes; copies of smaller ones are cheap."""

# Computed columns of these types are stored next to references, because a row takes at most 8 bytes.
_SMALL = {Vocabulary.tag, HashBuckets.tag}


# Matches an error about a column that a technique has added to the rows.
_COMPUTED = re.compile(r"'__ringspark_([a-z]+)_\w+' (has arrays of [^;]+);")


@dataclass(frozen=True, kw_only=True)
class FitData:
    """The columns and rows of one fit; fits with equal values can share their shards.

    Attributes:
        seed: Seed of the random hold-out; 0 without a hold-out, so that fits of all seeds share their shards.
        kinds: Column types by column, as JSON text of the setting `columns`.
        place: The setting `data`: whether the rows are copied, or read from the files below the DataFrame.
        root: Parent of the folder with the shards, or the run's folder that the user named.
        imports: Modules that Spark's Python workers import during the write, because the training needs them.
    """

    columns: tuple[str, ...]
    validation_col: str | None = None
    validation_fraction: float | None = None
    seed: int = 0
    drops_invalid: bool = False
    root: str
    kinds: str = "{}"
    place: DataPlace = "copy"
    imports: tuple[str, ...] = field(default=(), compare=False)

    def write(self, dataset: DataFrame, uri: str) -> ShardManifest:
        """Writes the shards, or references to the rows; a failure leaves nothing in `uri`."""
        if self.place == "copy":
            return self._write(dataset, uri, None)
        try:
            scan = FUNCTIONS["find_scan"](dataset, self.columns)
            self._check_scan(scan, dataset.schema)
            manifest = self._write(dataset, uri, scan.columns)
        except InPlaceError as error:
            if self.place == "inPlace" and not self._is_plain_table:
                raise ValueError(
                    f"data='inPlace' cannot read the rows from the files below the DataFrame: {error}; set "
                    "data='copy'"
                ) from error
            _logger.warning("data=%r copies the rows: %s", self.place, error)
            return self._write(dataset, uri, None)
        if self.place == "auto":
            _logger.warning(
                "data='auto' reads the rows in place, from files of %d MiB", scan.num_bytes / 2**20
            )
        return manifest

    @property
    def _is_plain_table(self) -> bool:
        return any(kind["kind"] == TableRow.tag for kind in json.loads(self.kinds).values())

    def _check_scan(self, scan: Any, schema: StructType) -> None:
        """Raises InPlaceError if a column that is not in the files is too large to store with references."""
        if self._is_plain_table:
            raise InPlaceError("the network for a table needs columns that Spark computes")
        if self.place == "auto" and scan.num_bytes < AUTO_BYTES:
            raise InPlaceError(f"the files are smaller than {AUTO_BYTES >> 30} GiB")
        kinds = json.loads(self.kinds)
        computed = [name for name in self.columns if name not in scan.columns]
        for name in computed:
            is_number = schema[name].dataType.simpleString().partition("(")[0] in {*SPARK_DTYPES, "decimal"}
            if kinds.get(name, {}).get("kind") not in _SMALL and not is_number:
                raise InPlaceError(f"the files have no column {name!r}, which Spark computes for each row")
        if len(computed) == len(self.columns):
            raise InPlaceError(f"Spark computes all columns, {computed}")

    def _write(self, dataset: DataFrame, uri: str, references: Any) -> ShardManifest:
        kinds = {name: kind_from_json(kind) for name, kind in json.loads(self.kinds).items()}
        valid = None
        if self.drops_invalid:
            chosen = {
                name: ModelInput(column=Column(name=name, kind=kind))
                for name, kind in kinds.items()
                if kind.is_choice
            }
            fields = {field.name: field for field in dataset.schema.fields}
            inputs = [(chosen.get(name, ModelInput()), fields[name]) for name in self.columns]
            valid = all_of([bind(*pair).valid for pair in inputs])
        names = list(dict.fromkeys(c for c in (*self.columns, self.validation_col) if c is not None))
        if names != dataset.columns:
            dataset = dataset.selectExpr(*map(quote, names))
        try:
            return write_shards(
                dataset,
                to_spark_uri(dataset.sparkSession, uri),
                columns=kinds,
                # Only the writing tasks can find some invalid rows, such as broken images.
                handle_invalid="skip" if self.drops_invalid else "error",
                validation_col=self.validation_col,
                validation_fraction=self.validation_fraction,
                seed=self.seed,
                imports=self.imports,
                references=references,
                valid=valid,
            )
        except ValueError as error:
            if isinstance(error, InPlaceError) or "to write_shards" not in str(error):
                raise
            if (computed := _COMPUTED.search(str(error))) is not None:
                raise ValueError(f"{computed[1]} {computed[2]}; give every row the same number") from None
            raise ValueError(f"{error}; for fit, set the estimator's Param columns to this dict") from None


class SharedShards:
    def __init__(self, datasets: Mapping[FitData, DataFrame], fits: Iterable[FitData]) -> None:
        self._datasets = datasets
        self._writes = {data: _Write(users) for data, users in Counter(fits).items()}
        # Data must not stay behind if one fit fails and the other fits never start.
        for write in self._writes.values():
            weakref.finalize(self, write.discard)

    @contextmanager
    def shards(self, data: FitData) -> Iterator[ShardManifest]:
        """Yields the shards of one fit and keeps them while the context lasts."""
        write = self._writes[data]
        try:
            with write.lock:
                # After a failed write, the next fit tries again and raises its own error.
                if write.manifest is None:
                    uri = storage.join(data.root, f"shards-{uuid.uuid4().hex[:12]}")
                    write.manifest = data.write(self._datasets[data], uri)
            yield write.manifest
        finally:
            with write.lock:
                write.users -= 1
                if write.users <= 0:
                    write.discard()


class _Write:
    """One set of shards, and the number of fits that have yet to read it."""

    def __init__(self, users: int) -> None:
        self.lock = threading.Lock()
        self.users = users
        self.manifest: ShardManifest | None = None

    def discard(self) -> None:
        if self.manifest is not None:
            manifest, self.manifest = self.manifest, None
            discard_shards(manifest)
