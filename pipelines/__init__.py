"""From a Spark DataFrame to batches of NumPy columns, without torch.

`write_shards` writes shards, or `table_manifest` describes an external table. `plan_epoch` decides the order
of the rows, and `open_reader` reads them. Importing this package imports neither pyspark nor petastorm.
"""

from typing import TYPE_CHECKING

from ringspark.lazy_names import export_lazily

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
    from ringspark.pipelines.columns import Column as Column
    from ringspark.pipelines.epoch_plan import EpochPlan as EpochPlan
    from ringspark.pipelines.epoch_plan import plan_epoch as plan_epoch
    from ringspark.pipelines.kinds import Array as Array
    from ringspark.pipelines.kinds import Binary as Binary
    from ringspark.pipelines.kinds import HashBuckets as HashBuckets
    from ringspark.pipelines.kinds import Image as Image
    from ringspark.pipelines.kinds import Kind as Kind
    from ringspark.pipelines.kinds import Padded as Padded
    from ringspark.pipelines.kinds import Ragged as Ragged
    from ringspark.pipelines.kinds import Scalar as Scalar
    from ringspark.pipelines.kinds import Sparse as Sparse
    from ringspark.pipelines.kinds import Struct as Struct
    from ringspark.pipelines.kinds import Tokens as Tokens
    from ringspark.pipelines.kinds import Vector as Vector
    from ringspark.pipelines.kinds import Vocabulary as Vocabulary
    from ringspark.pipelines.manifest import ShardFile as ShardFile
    from ringspark.pipelines.manifest import ShardManifest as ShardManifest
    from ringspark.pipelines.readers import READERS as READERS
    from ringspark.pipelines.readers import ShardReader as ShardReader
    from ringspark.pipelines.readers import check_engine as check_engine
    from ringspark.pipelines.readers import default_engine as default_engine
    from ringspark.pipelines.readers import open_reader as open_reader
    from ringspark.pipelines.writing.shards import write_shards as write_shards

__getattr__, __dir__, __all__ = export_lazily(__name__)
