"""Writes the shards of a DataFrame once for all fits that read the same columns and rows.

`CrossValidator` fits one fold with many parameter maps. The first fit that needs the fold writes it. The
other fits wait for that write, and the last fit removes the shards.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import and_

from pyspark.sql import DataFrame

from ringspark.estimators.columns.inputs import ModelInput, bind
from ringspark.estimators.columns.schema import explain_for_fit
from ringspark.pipelines import ShardManifest, storage, write_shards
from ringspark.pipelines.columns import Column, quote
from ringspark.pipelines.kinds import kind_from_json
from ringspark.pipelines.spark_paths import to_spark_uri

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FitData:
    """The columns and rows of one fit; fits with equal values can share one write.

    Attributes:
        columns: Names of inputs, labels and weight, each once.
        validation_col: Column that marks the held-out rows, or None.
        validation_fraction: Share of the rows to hold out instead, between 0 and 1, or None.
        seed: Seed that draws the held-out rows; 0 without a draw, so that other seeds share the write.
        drops_invalid: Whether rows with nulls or NaN are left out.
        kinds: Column types by column, as JSON text of the setting `columns`.
        root: Parent of the folder with the shards, or the run's folder that the user named.
        imports: Modules that the tasks of the write also import.
    """

    columns: tuple[str, ...]
    validation_col: str | None
    validation_fraction: float | None
    seed: int
    drops_invalid: bool
    root: str
    kinds: str = "{}"
    imports: tuple[str, ...] = field(default=(), compare=False)

    def write(self, dataset: DataFrame, uri: str) -> ShardManifest:
        """Writes the shards; a failure leaves nothing in `uri`."""
        kinds = {name: kind_from_json(kind) for name, kind in json.loads(self.kinds).items()}
        if self.drops_invalid:
            schema = dataset.schema
            chosen = {
                name: ModelInput(column=Column(name=name, kind=kind))
                for name, kind in kinds.items()
                if kind.is_choice
            }
            valid = [bind(chosen.get(name, ModelInput()), schema[name]).valid for name in self.columns]
            dataset = dataset.where(reduce(and_, valid))
        names = dict.fromkeys(c for c in (*self.columns, self.validation_col) if c is not None)
        try:
            return write_shards(
                dataset.select(*map(quote, names)),
                to_spark_uri(dataset.sparkSession, uri),
                columns=kinds,
                # Only the writing tasks can find some invalid rows, such as broken images.
                handle_invalid="skip" if self.drops_invalid else "error",
                validation_col=self.validation_col,
                validation_fraction=self.validation_fraction,
                seed=self.seed,
                imports=self.imports,
            )
        except ValueError as error:
            raise explain_for_fit(error) from None


class SharedShards:
    """The shards of several fits over one DataFrame."""

    def __init__(self, dataset: DataFrame, fits: Iterable[FitData]) -> None:
        self._dataset = dataset
        self._writes = {data: _Write(users) for data, users in Counter(fits).items()}
        # Data must not stay behind if one fit fails and the other fits never start.
        weakref.finalize(self, _discard_all, list(self._writes.values()))

    @contextmanager
    def shards(self, data: FitData) -> Iterator[ShardManifest]:
        """Yields the shards of one fit and keeps them while the context lasts."""
        write = self._writes[data]
        try:
            with write.lock:
                # After a failed write, the next fit tries again and raises its own error.
                if write.manifest is None:
                    uri = storage.join(data.root, f"shards-{uuid.uuid4().hex[:12]}")
                    write.manifest = data.write(self._dataset, uri)
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
            uri, self.manifest = self.manifest.uri, None
            discard(uri)


def _discard_all(writes: list[_Write]) -> None:
    for write in writes:
        write.discard()


def discard(uri: str) -> None:
    """Removes a folder; a failure is only logged, because it must hide neither a model nor an error."""
    try:
        storage.remove(uri, recursive=True)
    except OSError as error:
        _logger.warning("could not remove %s: %s", uri, error)
