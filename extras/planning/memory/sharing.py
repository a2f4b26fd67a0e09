"""Computes the communication buffers of a rank.

`memory.step` measures a step of a single rank, without sharding and communication."""

from __future__ import annotations

from torch import nn

from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.memory.shares import data_parallel_size
from ringspark.estimators.options.compression import Uncompressed
from ringspark.estimators.parallel.data.gradient_all_reduce import choose_bucket_bytes, split_by_ranks
from ringspark.estimators.parallel.data.gradient_buckets import BUCKET_BYTES, split_into_buckets
from ringspark.estimators.parallel.data.sparse_rows import sparse_parameters
from ringspark.estimators.parallel.sharded.fully_sharded import blocks_of
from ringspark.estimators.training.settings.config import TrainConfig
from ringspark.extras.compressors.compressed_all_reduce import compressed_parameters
from ringspark.extras.model_parallel.expert import expert_names


def reduces_in_buckets(config: TrainConfig) -> bool:
    """Whether reduced gradients stay in the buckets in which they were sent."""
    return data_parallel_size(config) > 1 and config.sync.strategy == "data_parallel"


def reduces_during_backward(config: TrainConfig) -> bool:
    """Whether gradients of a large network are sent during the backward pass, in `backward_buckets`."""
    return reduces_in_buckets(config) and config.axes["pipeline"] == 1 and config.gradient_accumulation == 1


def backward_buckets(module: nn.Module) -> list[list[nn.Parameter]]:
    """Returns the parameters per gradient bucket, in order; empty if all are sent at the end."""
    tables, experts = sparse_parameters(module), expert_names(module)
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad and n not in tables}
    full = choose_bucket_bytes(num_bytes(trained.values()), by_network=False)
    if full is None:
        return []
    dealt = split_by_ranks(trained, full, lambda name: name in experts)
    return [list(bucket.values()) for _, bucket in dealt]


def communication_bytes(config: TrainConfig, module: nn.Module) -> int:
    """Returns the bytes of buffers that stay allocated between gradient synchronizations."""
    if data_parallel_size(config) == 1:
        return 0
    # The 2 MiB of shared memory per rank of a host do not count.
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gradients = num_bytes(trained.values())
    if config.sync.sharding == "parameters":
        # FSDP2 gathers the running block and the next one; parameters in no block stay for the whole step.
        units = blocks_of(module)
        inside = {parameter for unit in units for parameter in unit.parameters()}
        rest = num_bytes(p for p in module.parameters() if p not in inside)
        return rest + 2 * max([num_bytes(unit.parameters()) for unit in units], default=0)
    if config.sync.sharding != "none":
        # One bucket is filled while the previous one is being sent.
        return min(2 * BUCKET_BYTES, 2 * gradients)
    compressed = 0
    compression = config.sync.compressed
    if compression is not None and not isinstance(compression, Uncompressed):
        large = compressed_parameters(trained, compression)
        # The next message, and the residual of earlier messages.
        compressed = 2 * num_bytes(large.values())
        trained = {name: p for name, p in trained.items() if name not in large}
        gradients = 0  # the other gradients are sent in one message per dtype
    buckets = split_into_buckets(trained, choose_bucket_bytes(gradients, by_network=False))
    # A bucket holds every gradient and the number of ranks that had it.
    sizes = [sum(num_bytes([p]) + p.element_size() for p in bucket.values()) for bucket in buckets]
    return compressed + sum(sizes)
