"""Spark's TorchDistributor with DDP in job "network", on Parquet that Spark writes during the fit.

The variant names the loader: "arrow", written here as a user would, or Petastorm's "batched" loader.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import contest
import harness
from pyspark.ml.functions import predict_batch_udf
from pyspark.ml.torch.distributor import TorchDistributor

from ringspark.jobs import cli

if TYPE_CHECKING:
    import torch
    from pyspark.sql import DataFrame

ROW_GROUP_BYTES = 16 << 20  # small enough for several per rank, large enough for fast reading


def arrow_batches(folder: str, batch_size: int, epoch: int, rank: int, ranks: int) -> Iterator[Any]:
    """Yields one epoch of a rank: row groups in random order, rows shuffled in each. Runs on every rank."""
    import pyarrow.dataset as ds
    import torch

    draw = torch.Generator().manual_seed(epoch)
    groups = [group for file in ds.dataset(folder).get_fragments() for group in file.split_by_row_group()]
    groups = [groups[i] for i in torch.randperm(len(groups), generator=draw)]
    for group in groups[rank::ranks]:
        table = group.to_table(columns=["features", "label"]).combine_chunks()
        labels = torch.from_numpy(table["label"].to_numpy())
        flat = table["features"].chunk(0).flatten().to_numpy()
        features = torch.from_numpy(flat).reshape(len(labels), -1)
        for rows in torch.randperm(len(labels), generator=draw).split(batch_size):
            yield features[rows], labels[rows]


def petastorm_batches(folder: str, batch_size: int, epoch: int, rank: int, ranks: int) -> Iterator[Any]:
    """Yields the same with Petastorm's reader and its faster loader. Runs on every rank."""
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader

    reader = make_batch_reader(f"file://{folder}", cur_shard=rank, shard_count=ranks)
    with BatchedDataLoader(reader, batch_size=batch_size, shuffling_queue_capacity=50_000) as loader:
        for batch in loader:
            yield batch["features"], batch["label"]


def train(
    module: torch.nn.Module, batches: Callable[..., Iterator[Any]], epochs: int, learning_rate: float
) -> dict[str, Any] | None:
    """Trains as in DDP's tutorial. Runs on every rank; returns rank 0's weights."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for epoch in range(epochs):
        # A rank with fewer batches still joins the collective calls of the other ranks.
        with model.join():
            for features, labels in batches(epoch=epoch, rank=rank, ranks=ranks):
                optimizer.zero_grad()
                mse_loss(model(features).squeeze(1), labels).backward()
                optimizer.step()
    dist.destroy_process_group()
    return module.state_dict() if rank == 0 else None


def contestant(entry: contest.Entry) -> contest.Figures:
    """Trains with two processes in a barrier stage, and predicts with Spark's `predict_batch_udf`."""
    loader = {"arrow": arrow_batches, "batched": petastorm_batches}[entry.variant]
    folder = f"{entry.scratch}/rows"

    def fit(frame: DataFrame, epochs: int) -> torch.nn.Module:
        shutil.rmtree(folder, ignore_errors=True)
        frame.write.option("parquet.block.size", ROW_GROUP_BYTES).parquet(folder)
        module = contest.network()
        batches = partial(loader, folder, contest.BATCH_SIZE)
        distributor = TorchDistributor(num_processes=harness.NUM_WORKERS, local_mode=False, use_gpu=False)
        module.load_state_dict(distributor.run(train, module, batches, epochs, contest.LEARNING_RATE))
        return module

    def predict(module: torch.nn.Module, frame: DataFrame) -> DataFrame:
        def make_predict() -> Callable[[Any], Any]:
            import torch

            torch.set_num_threads(1)

            def forward(features: Any) -> Any:
                with torch.inference_mode():
                    return module(torch.from_numpy(features)).squeeze(1).numpy()

            return forward

        from pyspark.sql.types import FloatType

        model = predict_batch_udf(
            make_predict, return_type=FloatType(), batch_size=4096, input_tensor_shapes=[[harness.DIM]]
        )
        return frame.withColumn("prediction", model("features"))

    with cli.spark("TorchDistributor", harness.MASTER) as spark:
        return contest.measure_network(spark, entry, fit, predict)


if __name__ == "__main__":
    contest.run(contestant)
