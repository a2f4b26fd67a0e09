"""From a Spark DataFrame to batches of NumPy columns, without torch.

`write_shards` writes shards, or `table_manifest` describes an external table. `plan_epoch` decides the order
of the rows, and `open_reader` reads them. Importing this package imports neither pyspark nor petastorm.
"""

from ringspark.pipelines.columns import Column
from ringspark.pipelines.epoch_plan import EpochPlan, plan_epoch
from ringspark.pipelines.external.delta import list_delta
from ringspark.pipelines.external.listing import Listing, list_parquet
from ringspark.pipelines.external.table_manifest import table_manifest
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
from ringspark.pipelines.reuse.cache_entries import CachedShards, list_cached, remove_cached
from ringspark.pipelines.reuse.cached_shards import cached_shards
from ringspark.pipelines.tokenizer_training import train_tokenizer
from ringspark.pipelines.writing.shards import write_shards

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
