"""The encoded rows of encoded_flights.py as plain Parquet for all contestants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from encoded_flights import feature_sizes

from ringspark.pipelines import ShardManifest, open_reader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def write(spark: SparkSession, root: Path, folder: Path) -> None:
    """Writes `train.parquet` and `test.parquet`: `categorical`, `numeric`, `label`; then `sizes.json`."""
    from pyspark.ml import PipelineModel
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    features = PipelineModel.load(str(root / "features"))
    numeric = vector_to_array(F.col("numeric"), "float32").alias("numeric")
    test = features.transform(spark.read.parquet(str(root / "test"))).select("categorical", numeric, "label")
    test.write.mode("overwrite").parquet(str(folder / "test.parquet"))
    # The training rows exist only as shards, which need the package's reader.
    manifest = ShardManifest.load(str(root / "shards")).select("train")
    batches = list(open_reader(manifest, engine="arrow", shuffle=False, batch_size=16_384).batches(0))
    columns = {
        name: pa.array([row for batch in batches for row in batch[name]])
        for name in ("categorical", "numeric", "label")
    }
    pq.write_table(pa.table(columns), folder / "train.parquet", row_group_size=1 << 16)
    cardinalities, num_numeric = feature_sizes(features)
    sizes = {"cardinalities": cardinalities, "num_numeric": num_numeric}
    (folder / "sizes.json").write_text(json.dumps(sizes))
