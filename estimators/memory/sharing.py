"""Computes what one rank alone does not show: its share of sharded state, and communication buffers.

Adjust these formulas if a collective or a strategy changes what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ringspark.estimators.collectives.base import num_bytes
from ringspark.estimators.options.compression import Uncompressed
from ringspark.estimators.parallel.data.compressed_sum import compressed_parameters
from ringspark.estimators.parallel.data.gradient_buckets import BUCKET_BYTES, deal
from ringspark.estimators.parallel.data.gradient_sum import bucket_bytes_of, deal_by_ranks
from ringspark.estimators.parallel.data.sparse_rows import sparse_parameters
from ringspark.estimators.parallel.model.expert import expert_names
from ringspark.estimators.parallel.sharded.fully_sharded import blocks_of
from ringspark.estimators.training.settings.config import TrainConfig

# Which parts each way of sharding splits over the ranks (Rajbhandari et al. 2020, "ZeRO").
SHARDED_PARTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("optimizer_state",),
    "gradients": ("optimizer_state", "gradients"),
    "parameters": ("optimizer_state", "gradients", "parameters"),
}


def num_summing(config: TrainConfig) -> int:
    """Returns how many ranks sum the gradients of one parameter."""
    sizes = config.axes
    return sizes["data"] * sizes["shard"] * sizes["expert"] * sizes["sequence"]


def num_sharers(config: TrainConfig) -> int:
    """Returns over how many ranks a sharding cuts: those of the axis `shard`, or all that sum gradients."""
    shard = config.axes["shard"]
    return shard if shard > 1 else num_summing(config)


def shares(sharding: str, num_workers: int) -> Mapping[str, float]:
    """Returns the share of each part on one rank; a rank holds all of a part without an entry."""
    return dict.fromkeys(SHARDED_PARTS[sharding], 1.0 / num_workers)


def sums_in_buckets(config: TrainConfig) -> bool:
    """Returns whether gradients, once summed, lie in the buffers in which they travelled."""
    return num_summing(config) > 1 and config.sync.strategy == "data_parallel"


def gradients_leave(config: TrainConfig) -> bool:
    """Returns whether gradients of a large network leave in the backward pass, in `leaving_buckets`."""
    return sums_in_buckets(config) and config.axes["pipeline"] == 1 and config.gradient_accumulation == 1


def leaving_buckets(module: nn.Module) -> list[list[nn.Parameter]]:
    """Returns the parameters whose gradients leave together, in their order; empty if all leave at the end.

    Args:
        module: A rank's part of the network.
    """
    tables, experts = sparse_parameters(module), expert_names(module)
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad and n not in tables}
    full = bucket_bytes_of(num_bytes(trained.values()), by_network=False)
    if full is None:
        return []
    dealt = deal_by_ranks(trained, full, lambda name: name in experts)
    return [list(bucket.values()) for _, bucket in dealt]


def communication_bytes(config: TrainConfig, module: nn.Module) -> int:
    """Returns the bytes of buffers that stay allocated between the ranks' exchanges.

    Args:
        module: Any copy of the network, also one on `meta`: only sizes count.
    """
    if num_summing(config) == 1:
        return 0
    # Ranks of one host share 2 MiB for each of them, which is not counted.
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
        # What is sent next, and what is left of what was sent before.
        compressed = 2 * num_bytes(large.values())
        trained = {name: p for name, p in trained.items() if name not in large}
        gradients = 0  # the others travel in one message a dtype
    buckets = deal(trained, bucket_bytes_of(gradients, by_network=False))
    # Every gradient has a place in a bucket, with a number that says how many ranks had it.
    sizes = [sum(num_bytes([p]) + p.element_size() for p in bucket.values()) for bucket in buckets]
    return compressed + sum(sizes)
