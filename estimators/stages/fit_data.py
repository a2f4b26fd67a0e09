"""What a fit reads of a DataFrame, written once for all the fits that read the same.

`CrossValidator` fits one fold with many parameter maps: the fold is written by the first fit that
needs it, the others wait for that, and the last one removes it.
"""

from __future__ import annotations

import logging
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import and_

from pyspark.sql import DataFrame

from ringspark.estimators.columns.inputs import ModelInput, bind
from ringspark.estimators.columns.schema import for_fit
from ringspark.pipelines import ShardManifest, storage, write_shards
from ringspark.pipelines.columns import quote

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FitData:
    """The columns and rows of one fit; fits with equal values can share one write.

    Attributes:
        columns: Inputs, labels and weight, each once.
        validation_col: Column that tells the held-out rows apart, or None.
        validation_fraction: Share to hold out instead, or None.
        seed: Of that draw; 0 where none is made, so that other seeds share the write.
        drops_invalid: Whether rows with nulls or NaN are left out.
        root: Folder that the shards' own folder is made in.
    """

    columns: tuple[str, ...]
    validation_col: str | None
    validation_fraction: float | None
    seed: int
    drops_invalid: bool
    root: str

    def write(self, dataset: DataFrame, uri: str) -> ShardManifest:
        """Writes the shards; a failure leaves nothing in `uri`."""
        if self.drops_invalid:
            schema = dataset.schema
            valid = [bind(ModelInput(), schema[name]).valid for name in self.columns]
            dataset = dataset.where(reduce(and_, valid))
        names = dict.fromkeys(c for c in (*self.columns, self.validation_col) if c is not None)
        try:
            return write_shards(
                dataset.select(*map(quote, names)),
                uri,
                validation_col=self.validation_col,
                validation_fraction=self.validation_fraction,
                seed=self.seed,
            )
        except ValueError as error:
            raise for_fit(error) from None


class SharedShards:
    """The shards of some fits over one DataFrame."""

    def __init__(self, dataset: DataFrame, fits: Iterable[FitData]) -> None:
        self._dataset = dataset
        self._writes = {data: _Write(users) for data, users in Counter(fits).items()}
        # Fits that never took place, after another one failed, must not leave data behind either.
        weakref.finalize(self, _discard_all, list(self._writes.values()))

    @contextmanager
    def shards(self, data: FitData) -> Iterator[ShardManifest]:
        """The shards of one fit, kept while the context lasts."""
        write = self._writes[data]
        try:
            with write.lock:
                # A write that failed is tried again by the next fit, which then has its own error.
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
    """One set of shards, and how many fits will still read it."""

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
    """Removes a folder, best effort: a store that hiccups must hide neither a model nor an error."""
    try:
        storage.remove(uri, recursive=True)
    except OSError as error:
        _logger.warning("could not remove %s: %s", uri, error)
