"""From a Spark DataFrame to batches of NumPy columns, without torch.

`write_shards` writes shards, or `table_manifest` describes an external table. `plan_epoch` decides the order
of the rows, and `open_reader` reads them. Importing this package imports neither pyspark nor petastorm.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringspark.pipelines.columns import Column
from ringspark.pipelines.epoch_plan import EpochPlan, plan_epoch
from ringspark.pipelines.kinds import (
    Array,
    Binary,
    HashBuckets,
    Image,
    Kind,
    Padded,
    Ragged,
    Scalar,
    Sparse,
    Struct,
    Tokens,
    Vector,
    Vocabulary,
)
from ringspark.pipelines.manifest import ShardFile, ShardManifest
from ringspark.pipelines.readers import READERS, ShardReader, check_engine, default_engine, open_reader
from ringspark.pipelines.writing.shards import write_shards

if TYPE_CHECKING:
    from ringspark.extras.external_tables import list_parquet as list_parquet
    from ringspark.extras.external_tables import table_manifest as table_manifest
    from ringspark.extras.external_tables.in_place.delta import list_delta as list_delta
    from ringspark.extras.external_tables.in_place.listing import Listing as Listing
    from ringspark.extras.reuse.cache_entries import CachedShards as CachedShards
    from ringspark.extras.reuse.cache_entries import list_cached as list_cached
    from ringspark.extras.reuse.cache_entries import remove_cached as remove_cached
    from ringspark.extras.reuse.cached_shards import cached_shards as cached_shards
    from ringspark.extras.tokenizer_training import train_tokenizer as train_tokenizer

__all__ = [
    "READERS",
    "Array",
    "Binary",
    "CachedShards",
    "Column",
    "EpochPlan",
    "HashBuckets",
    "Image",
    "Kind",
    "Listing",
    "Padded",
    "Ragged",
    "Scalar",
    "ShardFile",
    "ShardManifest",
    "ShardReader",
    "Sparse",
    "Struct",
    "Tokens",
    "Vector",
    "Vocabulary",
    "cached_shards",
    "check_engine",
    "default_engine",
    "list_cached",
    "list_delta",
    "list_parquet",
    "open_reader",
    "plan_epoch",
    "remove_cached",
    "table_manifest",
    "train_tokenizer",
    "write_shards",
]

# Public names of ringspark.extras -> their modules.
_EXTRAS = {
    **dict.fromkeys(("list_parquet", "table_manifest"), "external_tables"),
    "list_delta": "external_tables.in_place.delta",
    "Listing": "external_tables.in_place.listing",
    **dict.fromkeys(("CachedShards", "list_cached", "remove_cached"), "reuse.cache_entries"),
    "cached_shards": "reuse.cached_shards",
    "train_tokenizer": "tokenizer_training",
}


def __getattr__(name: str) -> Any:
    if name in _EXTRAS:
        return getattr(import_module(f"ringspark.extras.{_EXTRAS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
