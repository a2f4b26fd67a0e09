"""Column types "vocabulary" and "hash": the write turns strings into int64 ids.

A hash needs no pass over the data and no table of words, but different strings may get the same id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ringspark.pipelines.kinds.base import BatchArray, Encoded, Kind
from ringspark.pipelines.kinds.scalar import Scalar
from ringspark.pipelines.kinds.values import to_texts
from ringspark.pipelines.rows import Rows

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType
    from typing_extensions import Self


@dataclass(frozen=True)
class _Ids(Kind):
    dtype: ClassVar[str] = "int64"
    request = ("str", ())
    row_bytes = 8

    def adopt(self, name: str, data_type: DataType) -> Self:
        check_string(type(self), name, data_type)
        return self

    def stored(self, name: str) -> dict[str, Any]:
        return {name: pa.int64()}

    def decode(self, columns: Sequence[Any]) -> Rows:
        return Scalar("int64").decode(columns)

    def arrays(self, name: str) -> dict[str, BatchArray]:
        return {name: BatchArray("int64")}


@dataclass(frozen=True)
class Vocabulary(_Ids):
    """The id of a string is its index in `words`. Null and all other strings have the id `len(words)`.

    Attributes:
        words: Known strings. If it is None, `write_shards` counts strings in a separate job before the write.
            The most frequent string gets id 0, and equally frequent ones are sorted alphabetically, as in
            Spark's StringIndexer.
        max_size: Number of most frequent strings to keep; None keeps all.
        min_count: Smallest count of a string that is kept.
        order: Order of the ids: by "frequent", the most frequent string first, or by "alphabet", which does
            not depend on counts.
    """

    tag: ClassVar[str] = "vocabulary"
    words: tuple[str, ...] | None = None
    max_size: int | None = None
    min_count: int = 1
    order: Literal["frequent", "alphabet"] = "frequent"

    def __post_init__(self) -> None:
        if isinstance(self.words, str):
            raise ValueError(f"words of Vocabulary must be a list of strings, got {self.words!r}")
        if self.words is not None:
            object.__setattr__(self, "words", tuple(self.words))
            if not all(isinstance(word, str) for word in self.words):
                raise ValueError("words of Vocabulary must be strings")
            if len(set(self.words)) != len(self.words):
                raise ValueError("words of Vocabulary must not repeat a string")
        if self.order not in ("frequent", "alphabet"):
            raise ValueError(f"order of Vocabulary must be 'frequent' or 'alphabet', got {self.order!r}")
        if self.min_count < 1 or (self.max_size is not None and self.max_size < 1):
            raise ValueError("max_size and min_count of Vocabulary must be at least 1")

    def select(self, source: SparkColumn, data_type: DataType) -> SparkColumn:
        return source.cast("string")  # the cast drops the collation

    def read_values(self, values: Any, source: str = "", zone: str = "UTC") -> Any:
        return to_texts(values)

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        assert self.words is not None
        ids = pc.index_in(values.cast(pa.string()), value_set=value_set(self.words)).cast(pa.int64())
        ids = pc.fill_null(ids, len(self.words))
        if valid is not None:
            ids = pc.if_else(pa.array(valid), ids, pa.scalar(len(self.words), pa.int64()))
        return Encoded([ids])

    @property
    def num_ids(self) -> int | None:
        return None if self.words is None else len(self.words) + 1

    def __repr__(self) -> str:
        # The words of a large vocabulary would fill the screen.
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "words"]
        words = "None"
        if self.words is not None:
            digest = hashlib.sha256("\0".join(self.words).encode()).hexdigest()[:16]
            words = f"<{len(self.words)} words, {digest}>"
        return f"Vocabulary(words={words}, {', '.join(shown)})"

    def __str__(self) -> str:
        return f"int64 ids of {len(self.words or ())} words"


@dataclass(frozen=True)
class HashBuckets(_Ids):
    """The id of a string is its seeded xxHash64 (as in Spark SQL) modulo the number of buckets.

    In Spark SQL: `pmod(xxhash64(seed, column), num_buckets)` with `seed` a bigint.

    Attributes:
        num_buckets: Number of ids, which run from 0 to `num_buckets - 1`.
        seed: Any 64-bit whole number.
    """

    tag: ClassVar[str] = "hash"
    packages = ("xxhash",)
    num_buckets: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_buckets < 1:
            raise ValueError(f"num_buckets of HashBuckets must be at least 1, got {self.num_buckets}")
        check_seed("seed of HashBuckets", self.seed)

    def select(self, source: SparkColumn, data_type: DataType) -> SparkColumn:
        from pyspark.sql import functions as F

        # The cast drops the collation, so strings are equal if their bytes are, as in a vocabulary.
        hashed = F.xxhash64(F.lit(self.seed).cast("bigint"), source.cast("string"))
        # xxhash64 returns a number for null too, but null must stay null.
        return F.when(source.isNotNull(), F.pmod(hashed, F.lit(self.num_buckets).cast("bigint")))

    def read_values(self, values: Any, source: str = "", zone: str = "UTC") -> Any:
        texts = to_texts(values)
        ids = np.zeros(len(texts), dtype=np.int64)
        is_valid = texts.is_valid().to_numpy(zero_copy_only=False)
        ids[is_valid] = hash_buckets(texts.drop_null(), self.num_buckets, self.seed)
        return pa.array(ids, mask=~is_valid)

    def encode(self, values: Any, valid: Any = None) -> Encoded:
        return Encoded([values])

    @property
    def num_ids(self) -> int | None:
        return self.num_buckets

    def __str__(self) -> str:
        return f"int64 of {self.num_buckets} buckets"


def hash_buckets(strings: Any, num_buckets: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns Spark SQL's `pmod(xxhash64(seed, string), num_buckets)` for an Arrow array without nulls."""
    # Imported here, because a cluster may lack the package until a table has such a column.
    from xxhash import xxh64_intdigest

    encoded = strings.dictionary_encode()
    words = encoded.dictionary.cast(pa.large_binary())
    _, offsets, data = words.buffers()
    ends = np.frombuffer(offsets, np.int64)[words.offset :][: len(words) + 1].tolist() if len(words) else []
    view = memoryview(data or b"")
    # Spark hashes one column after the other: each hash is the seed of the next, and the first seed is 42.
    start = xxh64_intdigest(seed.to_bytes(8, "little", signed=True), 42)
    digests = [xxh64_intdigest(view[begin:end], start) for begin, end in pairwise(ends)]
    hashes = np.array(digests, dtype=np.uint64).view(np.int64)
    ids: npt.NDArray[np.int64] = (hashes % num_buckets)[encoded.indices.to_numpy()]
    return ids


def fill_vocabulary(kind: Vocabulary, counts: Sequence[tuple[str, int]]) -> Vocabulary:
    """Returns the vocabulary with its words; `counts` are (string, count) pairs in any order."""
    kept = sorted((-count, word) for word, count in counts if count >= kind.min_count)
    words = [word for _, word in kept[: kind.max_size]]
    return replace(kind, words=tuple(sorted(words) if kind.order == "alphabet" else words))


def check_string(kind: type[Kind], name: str, data_type: DataType) -> None:
    if data_type.typeName().split("(")[0] not in ("string", "varchar", "char"):
        raise ValueError(
            f"column {name!r} has type {data_type.simpleString()}: {kind.__name__} is for strings; "
            "numbers are stored as they are"
        )


def check_seed(name: str, seed: int) -> None:
    if not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"{name} must be a whole number of 64 bits, got {seed!r}")


@lru_cache(maxsize=256)
def value_set(words: tuple[str, ...]) -> Any:
    return pa.array(words, pa.string())
